# SPDX-License-Identifier: Apache-2.0
"""When graphs are made, and that a call does the same with and without them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tencache_ds.host_path import launches
from tencache_ds.host_path.launches import WORTH_CALLS, LaunchGraphs
from tencache_ds.tensors import filled


class Stand:
    """Stands in for a graph: runs what was recorded with what is in its tensor now."""

    def __init__(self, function: Callable[[torch.Tensor], None], values: torch.Tensor) -> None:
        self.values = values
        self.function = function
        self.gone = False

    def replay(self) -> None:
        if self.gone:
            raise AssertionError("replayed after the step")
        self.function(self.values)

    def reset(self) -> None:
        self.gone = True


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchGraphs, list[Stand]]:
    """Graphs that are made on any device, and those that were made."""
    made: list[Stand] = []

    def record(self: Any, function: Callable[[torch.Tensor], None], values: torch.Tensor) -> Stand:
        made.append(Stand(function, values))
        return made[-1]

    monkeypatch.setattr(LaunchGraphs, "_record", record)
    monkeypatch.setattr(LaunchGraphs, "_on_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(launches, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    return LaunchGraphs(enabled=True), made


def double(values: torch.Tensor) -> None:
    values.mul_(2.0)


def step(graphs: LaunchGraphs, keys: list[str]) -> list[float]:
    results = []
    with graphs.step():
        for number, key in enumerate(keys):
            values = filled(3, float(number), torch.float32)
            graphs.run(key, double, values)
            results.append(values[0].item())
    return results


def test_what_recurs_has_a_graph_from_the_second_step_on(graphs: tuple[LaunchGraphs, list[Stand]]) -> None:
    calls, made = graphs
    keys = ["a"] * WORTH_CALLS + ["b"] * (WORTH_CALLS - 1) + ["c"] * (WORTH_CALLS + 1)
    expected = [2.0 * number for number in range(len(keys))]
    assert step(calls, keys) == expected
    assert not made
    assert step(calls, keys) == expected
    assert len(made) == 2  # of a and c
    assert all(each.gone for each in made)
    assert step(calls, keys) == expected
    assert len(made) == 4  # new ones: none outlives its step
    assert step(calls, ["new"] * 5) == expected[:5]
    assert len(made) == 4


def test_a_step_that_fails_leaves_no_graph(graphs: tuple[LaunchGraphs, list[Stand]]) -> None:
    calls, made = graphs
    step(calls, ["a"] * WORTH_CALLS)

    def broken(values: torch.Tensor) -> None:
        raise RuntimeError("broken")

    def fail() -> None:
        with calls.step():
            calls.run("a", double, filled(3, 1.0, torch.float32))
            calls.run("b", broken, filled(3, 1.0, torch.float32))

    with pytest.raises(RuntimeError, match="broken"):
        fail()
    assert [each.gone for each in made] == [True]
    assert step(calls, ["a"] * 2) == [0.0, 2.0]


def test_switched_off_functions_are_called() -> None:
    calls = LaunchGraphs(enabled=False)
    for _ in range(3):
        assert step(calls, ["a"] * (WORTH_CALLS + 1))[-1] == 2.0 * WORTH_CALLS


if torch.cuda.is_available():

    def test_a_graph_launches_the_same_kernels_and_gives_its_memory_back() -> None:
        def square(values: torch.Tensor) -> None:
            matrix = values.view(64, 64)
            matrix.copy_(matrix @ matrix.T / 64)

        calls, reserved = LaunchGraphs(enabled=True), []
        for _ in range(4):
            with calls.step():
                for seed in range(WORTH_CALLS):
                    torch.cuda.manual_seed(seed)
                    values = filled(64 * 64, 0.0, torch.bfloat16, "cuda").normal_()
                    expected = values.clone()
                    square(expected)
                    calls.run("square", square, values)
                    assert torch.equal(values, expected)
                torch.cuda.synchronize()
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[1:] == reserved[:1] * 3

    def test_what_cannot_be_recorded_is_called(caplog: pytest.LogCaptureFixture) -> None:
        def waits(values: torch.Tensor) -> None:
            values.add_(float(values[0].item()))

        calls = LaunchGraphs(enabled=True)
        for _ in range(3):
            with calls.step():
                for _ in range(WORTH_CALLS):
                    values = filled(3, 2.0, torch.float32, "cuda")
                    calls.run("waits", waits, values)
                    assert values.tolist() == [4.0] * 3
        assert caplog.text.count("no CUDA graph could be made") == 1
