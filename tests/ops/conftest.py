# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the op tests: a queue that is closed at the end, and a lane held up by a pipe."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tencache_ds.ops.tencache_aio import load_tencache_aio
from tests.io.conftest import aligned, small_device

__all__ = ["small_device"]

PAGE = 4096


@dataclass
class Driver:
    """A queue with the bookkeeping a caller has to do: ids, buffers that stay alive, completions."""

    queue: Any
    ended: list[Any] = field(default_factory=list)
    _ids: itertools.count = field(default_factory=lambda: itertools.count(1))
    _buffers: list[torch.Tensor] = field(default_factory=list)

    def submit(self, fd: int, offset: int, buffer: torch.Tensor, *, write: bool = False, urgent: bool = False) -> int:
        """Queues a request; its id."""
        request_id = next(self._ids)
        self._buffers.append(buffer)
        assert self.queue.submit(request_id, write, fd, offset, buffer.data_ptr(), buffer.numel(), urgent)
        return request_id

    def collect(self, n: int, timeout_s: float = 30) -> list[Any]:
        """The next ``n`` completions."""
        deadline_s = time.monotonic() + timeout_s
        got: list[Any] = []
        while len(got) < n:
            assert time.monotonic() < deadline_s, f"{len(got)} of {n} requests ended"
            got += self.queue.collect(n - len(got), 1.0)
        self.ended += got
        return got

    def one(self) -> Any:
        """The next completion."""
        return self.collect(1)[0]


class HeldLane:
    """Keeps one lane inside ``io_submit``: reading a pipe blocks there until somebody writes."""

    def __init__(self, driver: Driver) -> None:
        self.read_end, self.write_end = os.pipe()
        self.buffer = torch.zeros(PAGE, dtype=torch.uint8)
        self.id = driver.submit(self.read_end, 0, self.buffer, urgent=True)
        time.sleep(0.1)  # until the lane has taken it

    def release(self) -> None:
        """Lets the lane continue."""
        os.write(self.write_end, b"x" * PAGE)

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)


@pytest.fixture
def make():
    """Makes drivers with queues of given options, and closes them."""
    op, drivers = load_tencache_aio(), []

    def make(n_lanes=2, block_nbytes=PAGE, queue_depth=8, background_nbytes=1 << 20) -> Driver:
        drivers.append(Driver(op.IoQueue(n_lanes, block_nbytes, queue_depth, background_nbytes)))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.queue.close(5.0, True)


@pytest.fixture
def file(tmp_path):
    """A descriptor of a file of 64 pages, page i filled with byte i, opened with O_DIRECT."""
    path = tmp_path / "data"
    path.write_bytes(b"".join(bytes([i]) * PAGE for i in range(64)))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    yield fd
    os.close(fd)


def page(fill: int | None = 0, n: int = 1) -> torch.Tensor:
    """An aligned buffer of ``n`` pages."""
    return aligned(n * PAGE, fill)
