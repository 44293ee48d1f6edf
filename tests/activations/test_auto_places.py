# SPDX-License-Identifier: Apache-2.0
"""Real autograd in memory that is counted and limited like a GPU's: what fits stays, and what does not still trains."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tencache_ds.activations.auto_places import AutoPlaces
from tencache_ds.profiling.waits import HostClock
from tests.activations.counted_memory import CountedMemory
from tests.activations.test_saved_tensors import PLACES, Layers, Rig, gradients

pytestmark = pytest.mark.timeout(60)

ROW_NBYTES = 64 * 4


class Auto:
    """Training in counted memory."""

    def __init__(self, folder: Any, capacity: int, **options: Any) -> None:
        self.memory = CountedMemory(capacity)
        self.said: list[str] = []
        self.auto = AutoPlaces(self.memory.usage, lambda: 0, self.said.append)
        self.rig = Rig(folder, auto=self.auto, **options)
        self.model = Layers(depth=8)
        self.generator = torch.Generator().manual_seed(5)

    @contextlib.contextmanager
    def forward(self, elements: int) -> Iterator[None]:
        with _disable_current_modes():
            takes = self.rig.saved.begin_forward(elements)
        if not takes:
            yield
            return
        self.rig.saved.begin_forward = lambda: True  # type: ignore[method-assign]
        hooks = self.rig.hooks()
        del self.rig.saved.begin_forward
        with hooks:
            yield

    def step(self, rows: int) -> list[torch.Tensor]:
        """The gradients of a step."""
        torch.manual_seed(11)
        x = torch.randn(rows, 64, generator=self.generator)
        self.model.zero_grad()
        with self.memory:
            with self.forward(x.numel()):
                loss = self.model(x)
            self.rig.saved.begin_backward()
            loss.backward()
        del loss
        self.rig.saved.step_done()
        return gradients(self.model)

    @property
    def moved_nbytes(self) -> int:
        return int(self.rig.counters.total().nbytes["d2h"])


@pytest.fixture
def training(tmp_path):
    made: list[Auto] = []

    def make(capacity: int, **options: Any) -> Auto:
        made.append(Auto(tmp_path, capacity, **options))
        return made[-1]

    yield make
    for each in made:
        each.rig.close()


def expected(rows: list[int]) -> list[list[torch.Tensor]]:
    model, generator, found = Layers(depth=8), torch.Generator().manual_seed(5), []
    for each in rows:
        torch.manual_seed(11)
        x = torch.randn(each, 64, generator=generator)
        model.zero_grad()
        model(x).backward()
        found.append(gradients(model))
    return found


def assert_trains(training: Auto, rows: list[int]) -> None:
    for mine, theirs in zip([training.step(each) for each in rows], expected(rows), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    gc.collect()
    training.rig.assert_idle()


def peak_nbytes(rows: int) -> int:
    """Peak of a step without hooks."""
    model, memory = Layers(depth=8), CountedMemory()
    x = torch.randn(rows, 64)
    with memory:
        model(x).backward()
    return memory.peak_nbytes


def test_where_everything_fits_hooks_are_gone_after_the_first_pass(training):
    made = training(16 * peak_nbytes(64))
    made.step(64)
    made.rig.saved.save = None  # nobody calls it any more
    looks = made.memory.n_looks
    for _ in range(5):
        made.step(64)
    assert made.moved_nbytes == 0
    assert made.memory.n_looks - looks == 10, "when a pass begins, and when its step does"
    assert len(made.said) == 1
    assert made.said[0].startswith("activations stay in GPU memory from now on: a pass takes ")
    assert made.rig.saved.figures.kept_nbytes > 0


@pytest.mark.parametrize("place", ["host", "nvme", "both", "late_host", "late_nvme", "little_staging"])
def test_a_batch_that_does_not_fit_trains(training, place):
    capacity = int(0.7 * peak_nbytes(256))
    with pytest.raises(torch.OutOfMemoryError), CountedMemory(capacity):
        Layers(depth=8)(torch.randn(256, 64)).backward()
    made = training(capacity, **PLACES[place])
    assert_trains(made, [256] * 6)
    assert made.moved_nbytes > 0
    assert [said.split(":")[0] for said in made.said] == ["activations are moved from now on"]
    assert "less GPU memory is free than such a pass takes" in made.said[0]


def test_host_memory_of_the_first_pass_is_freed_when_everything_stays(training):
    made = training(4 * peak_nbytes(64))
    made.step(64)
    assert made.moved_nbytes > 0
    for _ in range(2):
        made.step(64)
    assert not made.auto.takes
    assert made.rig.resident.allocated_nbytes == 0


def test_what_stayed_leaves_when_the_rest_of_the_pass_takes_more_than_expected(training):
    # Half of the bytes are in tensors too small to move; those that had stayed until that shows are too many.
    made = training(int(0.7 * peak_nbytes(256)), least_nbytes=100 * 1024)
    assert_trains(made, [256])


def test_no_more_is_moved_than_has_to(training):
    made = training(peak_nbytes(256))  # none to spare
    for _ in range(3):
        made.step(256)
    before = made.moved_nbytes
    made.step(256)
    figures = made.rig.saved.figures
    assert figures.kept_nbytes > figures.host_nbytes == made.moved_nbytes - before > 0


def test_what_moves_is_measured_and_a_plan_is_followed(training):
    made = training(16 * peak_nbytes(64))
    for _ in range(2):
        made.step(64)
    assert not made.auto.takes
    made.auto.measure(HostClock())
    made.step(64)
    costs = made.auto.measured()
    assert made.moved_nbytes == sum(cost.moved_nbytes for cost in costs.values()) > 0
    waited_for = sorted(position for position, cost in costs.items() if cost.seconds > 0)
    assert len(costs) - len(waited_for) <= 1, "all but the input, which the test holds itself"
    leaving = waited_for[::2]
    made.auto.follow(leaving)
    before = made.moved_nbytes
    for _ in range(3):
        made.step(64)
        assert made.auto.takes
    assert made.moved_nbytes - before == 3 * sum(costs[position].nbytes for position in leaving)
    before = made.moved_nbytes
    made.auto.follow([])
    made.rig.saved.trim()
    made.step(64)
    assert not made.auto.takes
    assert made.moved_nbytes == before
    gc.collect()
    made.rig.settle()
    made.rig.saved.trim()
    assert made.rig.resident.allocated_nbytes == 0
    assert [said.split(" from")[0] for said in made.said] == [
        "activations stay in GPU memory",
        "activations are moved in some steps, to measure what that costs",
        "activations are moved",
        "activations stay in GPU memory",
    ]


def test_batches_that_double_in_mid_run_train(training):
    made = training(int(0.7 * peak_nbytes(256)))
    rows = [64, 64, 64, 128, 128, 256, 256, 256, 64, 128, 256]
    assert_trains(made, rows)
    assert [said.split(" ")[1] for said in made.said] == ["stay", "are"]


def test_a_pass_that_fails_for_want_of_memory_is_followed_by_one_that_does_not(training):
    made = training(16 * peak_nbytes(64))
    for _ in range(3):
        made.step(64)
    made.memory.capacity = int(0.6 * peak_nbytes(64))
    used = made.memory.usage
    made.auto._usage = lambda: used().__class__(2**40, 0, made.memory.nbytes, made.memory.peak_nbytes, 0,
                                                made.memory.n_failures)  # fmt: skip
    with pytest.raises(torch.OutOfMemoryError):
        made.step(64)
    made.auto._usage = used
    gc.collect()
    state = made.generator.get_state()
    found = [made.step(64) for _ in range(3)]
    assert made.moved_nbytes > 0
    made.generator.set_state(state)
    made.memory.capacity = 2**40
    for each in found:
        assert all(torch.equal(a, b) for a, b in zip(made.step(64), each, strict=True))


def test_forwards_without_backward_and_with_an_exception(training):
    made = training(int(0.7 * peak_nbytes(256)))
    made.step(256)
    for _ in range(3):
        with made.memory, made.forward(256 * 64):
            loss = made.model(torch.randn(256, 64))
        del loss
    made.model.layers[5].forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        made.step(256)
    del made.model.layers[5].forward
    made.generator.manual_seed(5)
    gc.collect()
    assert_trains(made, [256] * 4)


def test_two_forwards_before_one_backward(training):
    made = training(3 * peak_nbytes(64))
    x = torch.randn(64, 64)
    for step in range(4):
        with made.memory:
            with made.forward(x.numel()):
                first = made.model(x)
            assert made.auto.takes == (step == 0)
            with made.forward(x.numel()):
                second = made.model(x)
            assert made.auto.takes == (step == 0), "both belong to the recorded pass"
            made.rig.saved.begin_backward()
            (first + second).backward()
        made.rig.saved.step_done()


def test_a_model_that_saves_nothing_large_is_left_alone(training):
    made = training(4 * peak_nbytes(64), least_nbytes=2**30)
    for step in range(3):
        made.step(64)
        assert made.auto.takes == (step == 0)
