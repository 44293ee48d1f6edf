# SPDX-License-Identifier: Apache-2.0
"""How much GPU memory forward passes leave to weights, and which weights of a model without optimizer live there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.gpu_policy import LEAST_HEADROOM_NBYTES
from tencache_ds.placement.inference_policy import (
    AMPLE_PAUSE_S,
    FIRST_PATIENCE,
    PassMemory,
    choose_weights,
    spread_order,
)
from tencache_ds.placement.memory_watch import LONGEST_PAUSE_S, LOOK_EVERY_S, LOOK_SHARE
from tencache_ds.placement.places import GpuUsage

GIB = 2**30
CAPACITY = 100 * GIB


class Gpu:
    """A GPU with weights, a cache of keys and values, and passes that take memory for a moment."""

    def __init__(self) -> None:
        self.weights = self.cache = self.peak = 0
        self.watch = PassMemory()
        self.missing = 0
        self.left = 0
        self.spare = 0
        self.limit = 0
        """Limit of weights that are gathered in each pass, where some are not in GPU memory."""

    def usage(self, taken: int = 0) -> GpuUsage:
        allocated = self.weights + self.cache + taken
        self.peak = max(self.peak, allocated)
        return GpuUsage(CAPACITY - allocated, 0, allocated, self.peak)

    def release(self, nbytes: int) -> None:
        released = min(max(nbytes, 0), self.weights)
        if released:
            self.weights -= released
            self.left += released
            self.watch.released(released)

    def run_pass(self, tokens: int, taken: int, *, keeps: int = 0, layers: int = 8, gathered: int = 0) -> None:
        """A pass that takes ``taken`` bytes in each layer for a moment, and keeps some. It holds ``gathered`` bytes of
        weights until its last layer."""
        self.release(self.watch.begin_pass(self.usage(), tokens, self.limit))
        for layer in range(layers):
            self.missing = max(self.missing, self.weights + self.cache + gathered + taken - CAPACITY)
            self.usage(gathered + taken)
            self.cache += keeps // layers
            held = gathered if layer < layers - 1 else 0
            self.release(self.watch.look(self.usage(held), held))
        self.spare = self.watch.end_pass(self.usage())


@pytest.fixture
def gpu() -> Gpu:
    gpu = Gpu()
    gpu.run_pass(1000, 4 * GIB)
    gpu.weights = CAPACITY - gpu.watch.headroom_nbytes
    return gpu


def test_as_much_stays_free_as_the_largest_pass_took_and_a_little_more(gpu: Gpu) -> None:
    assert gpu.watch.headroom_nbytes == 5 * GIB


def test_a_small_pass_leaves_more_than_it_took() -> None:
    gpu = Gpu()
    gpu.run_pass(10, 1000)
    assert gpu.watch.headroom_nbytes == LEAST_HEADROOM_NBYTES


def test_passes_like_the_first_leave_the_weights_alone(gpu: Gpu) -> None:
    for _ in range(20):
        gpu.run_pass(1000, 4 * GIB)
        gpu.run_pass(1, 2**20)
    assert gpu.left == 0
    assert gpu.missing == 0


@given(st.integers(1, 20))
def test_weights_leave_before_a_longer_prompt_needs_their_memory(factor: int) -> None:
    gpu = Gpu()
    gpu.run_pass(1000, 4 * GIB)
    gpu.weights = CAPACITY - gpu.watch.headroom_nbytes
    gpu.run_pass(1000 * factor, 4 * GIB * factor)
    assert gpu.missing == 0
    assert (gpu.left > 0) == (factor > 1)


def test_weights_make_way_for_a_growing_cache(gpu: Gpu) -> None:
    for _ in range(50):
        gpu.run_pass(8, 2**20, keeps=GIB // 4)
    assert gpu.missing == 0
    assert 8 * GIB < gpu.left < 18 * GIB


def test_what_left_may_come_back_after_quiet_passes_and_then_waits_longer(gpu: Gpu) -> None:
    gpu.cache = 4 * GIB
    gpu.run_pass(1, 2**20)
    assert gpu.left == 4 * GIB
    gpu.cache = 0
    quiet = 0
    while not gpu.spare:
        gpu.run_pass(1, 2**20)
        quiet += 1
        assert quiet <= FIRST_PATIENCE + 1
    assert gpu.spare == 4 * GIB
    gpu.weights += gpu.spare
    gpu.watch.came_back()
    gpu.cache = 4 * GIB
    gpu.run_pass(1, 2**20)
    gpu.cache = 0
    for _ in range(FIRST_PATIENCE + 1):
        gpu.run_pass(1, 2**20)
        assert gpu.spare == 0
    for _ in range(FIRST_PATIENCE):
        gpu.run_pass(1, 2**20)
        if gpu.spare:
            break
    assert gpu.spare == 4 * GIB


def test_a_pass_of_unknown_size_is_taken_for_the_largest(gpu: Gpu) -> None:
    gpu.run_pass(0, 4 * GIB)
    assert gpu.left == 0
    assert gpu.missing == 0


def test_gathered_weights_are_not_expected_to_grow_with_the_tokens() -> None:
    gpu = Gpu()
    gpu.limit = 2 * GIB
    gpu.run_pass(1024, 2**20)  # DeepSpeed gathers ahead from the second pass on
    gpu.weights = 8 * GIB
    for _ in range(10):
        gpu.run_pass(8, 2 * 2**20, gathered=2 * GIB)  # a hair above the prompt
        gpu.run_pass(1024, 2**20, gathered=2 * GIB)
    assert gpu.left == 0
    gpu.weights = CAPACITY - 4 * GIB
    gpu.run_pass(1024, 2**20, gathered=2 * GIB)
    assert gpu.left == 0


@given(st.integers(0, 2**19), st.integers(0, 4 * GIB), st.integers(1, 4096), st.integers(1, 20))
def test_there_is_always_room_for_gathered_weights_and_for_tokens(
    per_token: int, gathered: int, first: int, factor: int
) -> None:
    gpu = Gpu()
    gpu.limit = gathered
    gpu.run_pass(first, per_token * first)
    gpu.weights = CAPACITY - gpu.watch.headroom_nbytes
    for tokens in (first, 1, first * factor, 1, first):
        gpu.run_pass(tokens, per_token * tokens, gathered=gathered)
        assert gpu.missing == 0
    assert gpu.left == 0 or factor > 1


def test_gathering_weights_does_not_drive_others_out() -> None:
    gpu = Gpu()
    gpu.limit = 4 * GIB
    gpu.run_pass(1000, GIB)
    gpu.weights = CAPACITY - gpu.watch.headroom_nbytes
    for _ in range(20):
        gpu.run_pass(1000, GIB, gathered=4 * GIB)
        gpu.run_pass(1, 2**20, gathered=4 * GIB)
    assert gpu.left == 0


def test_less_stays_free_where_nothing_has_to_be_gathered() -> None:
    gpu = Gpu()
    gpu.limit = 4 * GIB
    gpu.run_pass(1000, 4 * GIB)
    assert gpu.watch.headroom_nbytes == 10 * GIB
    assert gpu.watch.headroom_beside(0) == 5 * GIB


def test_looking_takes_a_hundredth_of_the_time(gpu: Gpu) -> None:
    gpu.watch.begin_pass(gpu.usage(), 1000, 0)
    assert gpu.watch.pause_s(1e-6) == LOOK_EVERY_S
    assert gpu.watch.pause_s(100e-6) == pytest.approx(100e-6 / LOOK_SHARE)
    assert gpu.watch.pause_s(0.5) == LONGEST_PAUSE_S


@pytest.mark.parametrize("tokens", [0, 1001])
def test_a_pass_of_another_size_is_looked_at_all_the_time(gpu: Gpu, tokens: int) -> None:
    gpu.weights = 0
    gpu.watch.begin_pass(gpu.usage(), tokens, 0)
    assert gpu.watch.pause_s(100e-6) == LOOK_EVERY_S


def test_with_ample_memory_a_pass_of_known_size_is_looked_at_twice(gpu: Gpu) -> None:
    pauses = []
    for gpu.weights in (CAPACITY - 19 * GIB, CAPACITY - 20 * GIB):
        gpu.watch.begin_pass(gpu.usage(), 1, 0)
        pauses.append(gpu.watch.pause_s(100e-6))
        gpu.watch.end_pass(gpu.usage())
        assert gpu.watch.pause_s(100e-6) == LOOK_EVERY_S, "outside a pass"
    assert pauses == [pytest.approx(0.01), AMPLE_PAUSE_S]


@given(st.integers(0, 300))
def test_the_order_has_every_number_once(n: int) -> None:
    assert sorted(spread_order(n)) == list(range(n))


@given(st.integers(1, 300), st.data())
def test_any_prefix_lies_nearly_evenly_apart(n: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, n))
    prefix = sorted(spread_order(n)[:length])
    gaps = [after - before for before, after in zip(prefix, [*prefix[1:], n], strict=True)]
    assert prefix[0] == 0
    assert max(gaps) <= 4 * n / length


WEIGHTS = st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=40)


@given(WEIGHTS, st.integers(0, 1000))
def test_it_fits_and_no_chosen_weight_is_chosen_twice(weights: list[tuple[int, bool]], budget: int) -> None:
    nbytes, stored = [each for each, _ in weights], [each for _, each in weights]
    chosen = choose_weights(nbytes, stored, budget)
    assert len(set(chosen)) == len(chosen)
    assert sum(nbytes[index] for index in chosen) <= budget
    left = budget - sum(nbytes[index] for index in chosen)
    assert all(nbytes[index] > left for index in range(len(nbytes)) if index not in chosen)


@given(WEIGHTS)
def test_with_room_for_all_those_on_nvme_come_first(weights: list[tuple[int, bool]]) -> None:
    nbytes, stored = [each for each, _ in weights], [each for _, each in weights]
    chosen = choose_weights(nbytes, stored, sum(nbytes))
    assert sorted(chosen) == list(range(len(weights)))
    assert [stored[index] for index in chosen] == sorted(stored, reverse=True)


def test_half_of_equal_weights_are_every_second_one() -> None:
    assert sorted(choose_weights([10] * 8, [False] * 8, 40)) == [0, 2, 4, 6]
