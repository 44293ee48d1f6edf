# SPDX-License-Identifier: Apache-2.0
"""The loops of ``tencache tune`` and of the storage micro-benchmark, on scripted storage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tencache_ds.cli import tune_measure
from tencache_ds.cli.tune_measure import Requests, StockSession, keep_in_flight, operation_of
from tencache_ds.errors import StorageError
from tencache_ds.integration.config_checks import read_aio_section
from tencache_ds.io import Operation
from tencache_ds.profiling.probe import Kind

PAGE = 4096


def requests(n_buffers: int = 4, n_extents: int = 12) -> Requests:
    buffers = torch.zeros(n_buffers * PAGE, dtype=torch.uint8).split(PAGE)
    return Requests("the folder", buffers, n_extents, lambda extent: (f"file{extent % 3}", extent // 3 * PAGE))


class Clock:
    """Stands still unless a test moves it."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tune_measure, "time", clock)
    return clock


class Handle:
    """Stands for DeepSpeed's ``aio_handle``: remembers what it was asked for, and loses what it is told to."""

    lost = 0

    def __init__(self, *arguments: bool | int) -> None:
        self.arguments = arguments
        self.batch: list[tuple[str, str, int]] = []
        self.batches: list[list[tuple[str, str, int]]] = []

    def async_pread(self, buffer: torch.Tensor, path: str, offset: int) -> None:
        self.batch.append(("read", path, offset))

    def async_pwrite(self, buffer: torch.Tensor, path: str, offset: int) -> None:
        self.batch.append(("write", path, offset))

    def wait(self) -> int:
        batch, self.batch = self.batch, []
        self.batches.append(batch)
        return len(batch) - self.lost


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> StockSession:
    monkeypatch.setattr("tencache_ds.ops.async_io.load_async_io", lambda: SimpleNamespace(aio_handle=Handle))
    return StockSession(read_aio_section({}) | {"block_size": 8 * PAGE, "intra_op_parallelism": 3}, requests())


def test_a_buffer_has_extents_of_its_own_and_together_they_walk_through_all() -> None:
    work = requests()
    walk = [work.extent(slot, turn) for turn in range(3) for slot in range(4)]
    assert walk == list(range(12))
    assert {work.extent(1, turn) for turn in range(100)} == {1, 5, 9}
    assert work.request_nbytes == PAGE


@pytest.mark.parametrize(("kind", "writers"), [(Kind.READ, []), (Kind.WRITE, [0, 1, 2, 3]), (Kind.MIXED, [1, 3])])
def test_who_writes(kind: Kind, writers: list[int]) -> None:
    assert [slot for slot in range(4) if operation_of(kind, slot) is Operation.WRITE] == writers


def test_every_buffer_is_in_flight_until_the_time_is_over(clock: Clock) -> None:
    in_flight: list[int] = []
    started: list[tuple[int, int]] = []

    def issue(operation: Operation, slot: int, extent: int) -> Any:
        assert slot not in in_flight
        in_flight.append(slot)
        started.append((slot, extent))

        def wait(timeout_s: float) -> None:
            assert len(in_flight) == 4 or clock.now_s >= 6
            in_flight.remove(slot)
            clock.now_s += 1

        return SimpleNamespace(nbytes=PAGE, wait=wait)

    assert keep_in_flight(requests(), Kind.READ, 6.0, issue) == 9 * PAGE
    assert started == [(i % 4, i) for i in range(9)]
    assert in_flight == []


def test_stock_works_in_batches_with_its_own_settings(stock: StockSession, clock: Clock) -> None:
    defaults = read_aio_section({})
    handle = stock.handle
    assert handle.arguments == (8 * PAGE, defaults["queue_depth"], False, True, 3)
    assert stock.transfer(Kind.MIXED, 0.0) == 4 * PAGE
    assert handle.batches == [
        [("read", "file0", 0), ("write", "file1", 0), ("read", "file2", 0), ("write", "file0", PAGE)]
    ]


def test_a_stock_handle_that_loses_a_request_is_an_error(stock: StockSession) -> None:
    stock.handle.lost = 1
    with pytest.raises(StorageError, match="read failed at the folder.*3 of 4 requests as completed"):
        stock.transfer(Kind.READ, 0.0)
