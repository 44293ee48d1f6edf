# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tencache_ds.errors import MemoryLimitError, TenCacheError
from tencache_ds.observability.counters import Counters
from tencache_ds.tiers.gradients import GradientSegment, GradientTier
from tests.tiers.conftest import numbers
from tests.tiers.ordinary_gradients import OrdinaryGradientMemory, gradient_tier


def make(numels: list[int], dtype: torch.dtype = torch.float32, n_groups: int = 1) -> GradientTier:
    segments, start = [], 0
    for key, numel in enumerate(numels):
        segments.append(GradientSegment(key, start, numel))
        start += numel
    per_group = -(-len(numels) // n_groups)
    groups = [segments[first : first + per_group] for first in range(0, len(segments), per_group)]
    return GradientTier(groups, dtype, OrdinaryGradientMemory(), Counters())


def filled(tier: GradientTier, start: int = 0, numel: int | None = None) -> torch.Tensor:
    target = torch.full((sum(part.numel for part in tier._ordered) - start if numel is None else numel,), float("nan"))
    tier.fill(target, start)
    return target


def test_the_first_micro_step_replaces_later_ones_add():
    tier = make([3, 2])
    one, two = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])
    assert torch.equal(tier.accumulate(0, one, first=True), one)
    accumulated = tier.accumulate(0, two, first=False)
    assert torch.equal(accumulated, one + two)
    assert accumulated.data_ptr() == tier.segment(0).data_ptr()
    assert torch.equal(tier.accumulate(0, two, first=True), two)
    assert torch.equal(filled(tier), torch.tensor([10.0, 20.0, 30.0, 0.0, 0.0]))
    assert list(tier.live()) == [0]


def test_a_weight_whose_first_gradient_comes_late_starts_from_nothing():
    tier = make([2])
    tier.accumulate(0, torch.ones(2), first=True)
    tier.end_step()
    tier.accumulate(0, torch.full((2,), 5.0), first=False)
    assert torch.equal(tier.value(0), torch.full((2,), 5.0))


def test_a_gradient_of_a_step_that_is_done_counts_as_zero():
    tier = make([2, 2])
    tier.accumulate(0, torch.ones(2), first=True)
    tier.accumulate(1, torch.ones(2), first=True)
    tier.end_step()
    assert list(tier.live()) == []
    assert not tier.value(0).any()
    tier.accumulate(1, torch.full((2,), 2.0), first=True)
    tier.settle()
    assert torch.equal(filled(tier), torch.tensor([0.0, 0.0, 2.0, 2.0]))
    assert list(tier.live()) == [1]


def test_a_partition_shorter_than_its_segment_leaves_zeros():
    tier = make([4])
    tier.segment(0).fill_(9)
    tier.accumulate(0, torch.ones(3), first=True)
    assert torch.equal(filled(tier), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    tier.accumulate(0, torch.ones(3), first=False)
    assert torch.equal(filled(tier), torch.tensor([2.0, 2.0, 2.0, 0.0]))


def test_bytes_from_the_device_are_counted():
    counters = Counters()
    tier = gradient_tier([[GradientSegment(0, 0, 4)]], torch.float32, counters)
    tier.accumulate(0, torch.ones(3), first=True)
    tier.accumulate(0, torch.ones(3), first=False)
    total = counters.total()
    assert total.nbytes == {"d2h": 24, "h2d": 0, "nvme_read": 0, "nvme_write": 0}


def test_a_replaced_gradient_keeps_full_precision():
    tier = make([2, 3], torch.bfloat16)
    tier.accumulate(1, torch.ones(3, dtype=torch.bfloat16), first=True)
    exact = torch.tensor([1.0 + 2**-20, 3.0 - 2**-18])
    tier.replace(0, exact)
    exact_copy = exact.clone()
    exact.zero_()  # what the caller does with its tensor afterwards is its own business
    assert torch.equal(tier.value(0), exact_copy)
    assert torch.equal(filled(tier), torch.cat([exact_copy, torch.ones(3)]))
    assert torch.equal(tier.segment(0), exact_copy.bfloat16())
    assert list(tier.live()) == [0, 1]
    tier.value(0).zero_()  # a copy
    assert torch.equal(tier.value(0), exact_copy)


def test_a_replaced_gradient_lasts_for_its_step():
    tier = make([2], torch.bfloat16)
    tier.replace(0, torch.tensor([0.1, 0.2]))
    tier.end_step()
    assert not tier.value(0).any()
    tier.settle()
    assert not filled(tier).any()


def test_what_comes_after_a_replacement_counts():
    tier = make([2], torch.bfloat16)
    tier.replace(0, torch.tensor([1.0, 2.0]))
    tier.accumulate(0, torch.ones(2, dtype=torch.bfloat16), first=False)
    assert torch.equal(tier.value(0), torch.tensor([2.0, 3.0]))
    tier.replace(0, torch.tensor([0.1, 0.2]))
    tier.accumulate(0, torch.ones(2, dtype=torch.bfloat16), first=True)
    assert torch.equal(filled(tier), torch.ones(2))


def test_an_overwritten_gradient_is_of_this_step_in_the_accumulation_dtype():
    tier = make([4, 4], torch.bfloat16)
    tier.replace(0, torch.full((4,), 1 + 2**-20))
    assert torch.equal(tier.contents(0), torch.full((4,), 1 + 2**-20))
    for key in (0, 1):
        tier.overwrite(key, torch.full((4,), key + 1.0, dtype=tier.dtype))
        assert torch.equal(tier.contents(key), torch.full((4,), key + 1.0, dtype=tier.dtype))
    assert not tier.any_replaced
    assert list(tier.live()) == [0, 1]
    tier.end_step()
    tier.settle()
    assert not tier.contents(1).any()


def test_a_replacement_of_another_length_is_refused():
    tier = make([2])
    with pytest.raises(TenCacheError, match="weight id 0 has 2 elements here, not 3"):
        tier.replace(0, torch.ones(3))
    assert list(tier.live()) == []


def test_an_overflow_that_was_left_in_host_memory_does_not_count():
    tier = make([2, 2])
    tier.accumulate(0, torch.full((2,), float("inf")), first=True)
    tier.end_step()
    tier.move(0, torch.zeros(2))
    tier.accumulate(0, torch.ones(2), first=True)
    tier.settle()
    assert tier.all_finite(1)
    tier.accumulate(1, torch.tensor([1.0, float("nan")]), first=True)
    assert not tier.all_finite(1)


def test_host_memory_of_a_sub_group_is_freed_when_all_of_it_is_on_the_device():
    tier = make([2, 2, 3], n_groups=2)
    memory = tier._memory
    tier.accumulate(0, torch.ones(2), first=True)
    tier.move(0, torch.zeros(2))
    assert tier.unused_host_nbytes == 0
    tier.move(1, torch.zeros(2))
    assert (tier.unused_host_nbytes, memory.nbytes) == (16, 28)
    tier.free_unused()
    assert (tier.unused_host_nbytes, memory.nbytes) == (0, 12)
    assert tier.host_nbytes_of([0, 1, 2]) == 16
    assert tier.view(0, 4) is None
    assert torch.equal(filled(tier), torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0]))
    tier.move(0, None)
    assert memory.nbytes == 28
    assert torch.equal(tier.segment(0), torch.ones(2))
    tier.move(1, None)
    assert torch.equal(tier.view(0, 4), torch.tensor([1.0, 1.0, 0, 0]))


def test_a_gradient_stays_on_the_device_when_there_is_no_host_memory_for_it():
    class Full(OrdinaryGradientMemory):
        full = False

        def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            if self.full:
                raise MemoryLimitError("not now")
            return super().take(numel, dtype)

    memory = Full()
    tier = GradientTier([[GradientSegment(0, 0, 2)]], torch.float32, memory, Counters())
    tier.move(0, torch.zeros(2))
    tier.accumulate(0, torch.ones(2), first=True)
    tier.free_unused()
    memory.full = True
    with pytest.raises(MemoryLimitError):
        tier.move(0, None)
    assert tier.on_device(0)
    assert torch.equal(tier.value(0), torch.ones(2))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.sets(st.integers(0, 5)), st.integers(1, 3), st.data())
def test_fill_any_range_with_overrides(numels, replaced, n_groups, data):
    """A chunk begins and ends anywhere within weights."""
    tier = make(numels, torch.bfloat16, n_groups)
    expected = []
    for key, numel in enumerate(numels):
        if key in replaced:
            expected.append(numbers(numel, torch.float32, key))
            tier.replace(key, expected[-1])
        else:
            expected.append(numbers(numel, torch.bfloat16, key).float())
            tier.accumulate(key, expected[-1].bfloat16(), first=True)
    dense = torch.cat(expected)
    start = data.draw(st.integers(0, dense.numel()))
    numel = data.draw(st.integers(0, dense.numel() - start))
    assert torch.equal(filled(tier, start, numel), dense[start : start + numel])


class GradientMachine(RuleBasedStateMachine):
    """Random steps against a dense model: a dict of fp32 gradients, empty after each step."""

    @initialize(
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        numels=st.lists(st.integers(1, 5), min_size=3),
        n_groups=st.integers(1, 3),
    )
    def build(self, dtype: torch.dtype, numels: list[int], n_groups: int) -> None:
        self.dtype, self.numels = dtype, numels
        self.tier = make(numels, dtype, n_groups)
        self.model: dict[int, torch.Tensor] = {}
        self.seed = 0

    def dense(self) -> torch.Tensor:
        return torch.cat([self.model.get(key, torch.zeros(numel)) for key, numel in enumerate(self.numels)])

    @rule(pick=st.integers(0, 100), first=st.booleans(), padding=st.integers(0, 2))
    def accumulate(self, pick: int, first: bool, padding: int) -> None:
        key = pick % len(self.numels)
        numel = self.numels[key]
        self.seed += 1
        partition = numbers(max(numel - padding, 1), self.dtype, self.seed)
        padded = torch.nn.functional.pad(partition, (0, numel - partition.numel()))
        if first or key not in self.model:
            self.model[key] = padded.float()
        else:
            self.model[key] = (self.model[key].to(self.dtype) + padded).float()
        result = self.tier.accumulate(key, partition, first=first)
        assert torch.equal(result.float(), self.model[key][: partition.numel()])

    @rule(pick=st.integers(0, 100))
    def replace(self, pick: int) -> None:
        key = pick % len(self.numels)
        self.seed += 1
        self.model[key] = numbers(self.numels[key], torch.float32, self.seed)
        self.tier.replace(key, self.model[key])

    @rule()
    def end_step(self) -> None:
        self.tier.end_step()
        self.model.clear()

    @rule(pick=st.integers(0, 100), there=st.booleans())
    def move(self, pick: int, there: bool) -> None:
        """Also a gradient that no step has used yet: it keeps its value."""
        key = pick % len(self.numels)
        memory = torch.full((self.numels[key],), float("nan"), dtype=self.dtype) if there else None
        version = self.tier.version
        assert self.tier.move(key, memory) is self.tier.segment(key) or not there
        assert self.tier.version > version
        assert self.tier.on_device(key) is there

    @rule()
    def free_unused(self) -> None:
        self.tier.free_unused()
        assert self.tier.unused_host_nbytes == 0

    @rule(start=st.integers(0, 100), numel=st.integers(0, 100))
    def settle_and_fill(self, start: int, numel: int) -> None:
        self.tier.settle()
        dense = self.dense()
        start %= dense.numel()
        expected = dense[start : start + numel]
        assert torch.equal(filled(self.tier, start, expected.numel()), expected)
        for key, numel in enumerate(self.numels):
            expected = self.model.get(key, torch.zeros(numel)).to(self.dtype)
            assert torch.equal(self.tier.segment(key), expected)
        actual = self.tier.pieces(start, expected_numel := min(numel, dense.numel() - start))
        assert self.tier.all_finite(3)
        if self.tier.any_replaced:
            return
        assert actual is not None
        position = 0
        for first, tensor in actual:
            assert first == position
            assert torch.equal(tensor.float(), dense[start + first : start + first + tensor.numel()])
            position += tensor.numel()
        assert position == expected_numel

    @invariant()
    def every_value_is_right(self) -> None:
        if not hasattr(self, "tier"):
            return
        assert list(self.tier.live()) == sorted(self.model)
        for key, numel in enumerate(self.numels):
            assert torch.equal(self.tier.value(key), self.model.get(key, torch.zeros(numel)))


GradientMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)
TestGradientMachine = GradientMachine.TestCase
