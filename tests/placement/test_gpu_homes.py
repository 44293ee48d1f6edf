# SPDX-License-Identifier: Apache-2.0
"""What goes to GPU memory after the recorded step, and what leaves it when training needs the memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import MemoryLimitError
from tencache_ds.memory.arena import HostArena, HostTensors, Locking
from tencache_ds.observability.counters import Counters, StepRecord
from tencache_ds.placement.gpu_homes import GpuHomes
from tencache_ds.placement.memory_watch import FIRST_PATIENCE
from tencache_ds.placement.moves import GpuMoves, Shard, StateMoves
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.profiling.waits import FetchRecorder, MoveCost, StreamClock
from tencache_ds.tiers.gradients import GradientSegment, GradientTier
from tests.tiers.ordinary_device import OrdinaryDevice
from tests.tiers.test_device_places import CHUNK_NBYTES, NUMELS, Bench

pytestmark = pytest.mark.timeout(60)

UNIT = CHUNK_NBYTES
"""Unit of memory here: a chunk of state. All weights together take 0.84 of it."""

WEIGHTS = {0: 8192, 1: NUMELS[0] * 2 - 8192, 2: NUMELS[1] * 2}
"""Bytes of bf16 shards: two of the first sub-group, one of the second."""

OBSERVED_STEPS = 2
"""After the first one."""


class Memory(OrdinaryDevice):
    """A device whose figures a test sets. Where training and what is there need more memory than it has, it takes loans
    back."""

    def __init__(self, units: float, lends: bool) -> None:
        self.lends = lends
        self.capacity = int(units * UNIT)
        self.here = 0
        self.training = 0  # bytes that training uses
        self.peak = 0
        self.n_flushes = 0
        self.refuses = False

    def record(self) -> None:
        self.peak = 0

    def use(self, units: float) -> None:
        self.training = int(units * UNIT)
        while self.lends and self.here + self.training > self.capacity and self.take_back(1):
            self.here -= UNIT
        self.peak = max(self.peak, self.here + self.training)

    def usage(self) -> GpuUsage:
        allocated = self.here + self.training
        return GpuUsage(max(self.capacity - allocated, 0), 0, allocated, max(self.peak, allocated), self.n_flushes)

    def allocate(self, nbytes: int) -> torch.Tensor:
        if self.refuses:
            raise MemoryLimitError("not now")
        self.here += nbytes
        return torch.zeros(nbytes, dtype=torch.uint8)


class Weights:
    def __init__(self) -> None:
        self.there: dict[int, torch.Tensor] = {}
        self.without_host: set[int] = set()

    def shards(self) -> list[Shard]:
        return [Shard(key, nbytes) for key, nbytes in WEIGHTS.items()]

    def to_device(self, key: int, memory: torch.Tensor) -> None:
        self.there[key] = memory

    def to_host(self, key: int) -> None:
        del self.there[key]
        self.without_host.discard(key)

    def belongs_to_host(self, key: int) -> bool:
        return key != 2

    def host_nbytes_of(self, keys: Iterable[int]) -> int:
        return sum(WEIGHTS[key] for key in keys if key in self.without_host)

    def free_unused(self) -> int:
        freed = {key for key in self.there if self.belongs_to_host(key)} - self.without_host
        self.without_host |= freed
        return sum(WEIGHTS[key] for key in freed)


class Accounts:
    host_left_nbytes = 0

    def __init__(self) -> None:
        self.host_nbytes = 0
        self.weight_nbytes = self.gradient_nbytes = 0

    def count_host(self, nbytes: int) -> None:
        self.host_nbytes += nbytes

    def note_gpu(self, *, weight_nbytes: int, gradient_nbytes: int, momentum_nbytes: int) -> None:
        self.weight_nbytes, self.gradient_nbytes = weight_nbytes, gradient_nbytes


class Saved:
    """What layers save: four blocks of a unit each, on NVMe unless they stay; each waits so many seconds there."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.stay = set(range(len(seconds)))
        self.measuring = False

    @property
    def moves_some(self) -> bool:
        return len(self.stay) < len(self.seconds)

    def measure(self, clock: StreamClock) -> None:
        self.measuring, self.stay = True, set()

    def measured(self) -> dict[int, MoveCost]:
        if not self.measuring:
            return {}
        return {place: MoveCost(UNIT, UNIT, seconds, False) for place, seconds in enumerate(self.seconds)}

    def follow(self, leaving: Iterable[int]) -> None:
        self.measuring, self.stay = False, set(range(len(self.seconds))) - set(leaving)


class Life:
    """A training of three weights in two sub-groups, whose steps take two seconds unless said otherwise."""

    seconds = 2.0
    update_seconds = 1e-9
    hidden_share = 0.0
    forward_seconds = 0.0
    background_seconds = 0.0
    waited_seconds = 0.0
    without_fetches = False
    fetch_seconds = 0.0
    release_seconds = 0.0
    host_room_nbytes = 5 * UNIT

    def __init__(
        self, folder: Path, units: float, saved: Saved | None = None, *, lends: bool = False, **options: object
    ) -> None:
        self.memory, self.saved = Memory(units, lends), saved
        self.bench = Bench(folder, device=self.memory)
        self.weights, self.accounts = Weights(), Accounts()
        segments, start = [], 0
        for key, nbytes in WEIGHTS.items():
            segments.append(GradientSegment(key, start, nbytes // 2))
            start += nbytes // 2
        memory = HostTensors(HostArena(None, Locking.NONE), "gradients", self.accounts.count_host)
        groups = [segments[:2], segments[2:]]
        self.gradients = GradientTier(groups, torch.bfloat16, memory, self.bench.storage.counters)
        self.said: list[str] = []
        self.predicted: list[float | None] = []
        self.moved: set[int] = set()
        self.waits_for_update: list[int] = []
        self.recorder: FetchRecorder | None = None
        self.moves = GpuMoves(
            self.memory,
            StateMoves(
                self.bench.tier,
                2,
                self.accounts,
                open_store=lambda: True,
                before=lambda: self.waits_for_update.append(1),
                moved=lambda sub_group: None,
            ),
            self.gradients,
            [[(0, 4096), (1, NUMELS[0] - 4096)], [(2, NUMELS[1])]],
            self.weights,
            self.accounts,
            moved_gradient=self.gradient_moved,
        )
        self.homes = GpuHomes(
            TenCacheConfig(**options),
            self.memory,
            self.bench.tier,
            2,
            self.weights.shards,
            self.moves,
            host_left_nbytes=lambda: self.accounts.host_left_nbytes,
            host_room_nbytes=lambda: self.host_room_nbytes,
            hidden_share=lambda: self.hidden_share,
            without_fetches=self.without_fetches,
            update_waits=lambda: self.waited_seconds,
            agree=lambda topic, value, decide: decide([value]),
            record_fetches=self.record_fetches,
            say=self.say,
            activations=saved,
        )

    def gradient_moved(self, key: int, tensor: torch.Tensor) -> None:
        assert self.waits_for_update, "an update may read it"
        self.moved.add(key)

    def record_fetches(self, recorder: FetchRecorder | None) -> None:
        self.recorder = recorder

    def say(self, placement: str, predicted_seconds: float | None) -> None:
        self.said.append(placement)
        self.predicted.append(predicted_seconds)

    @property
    def record(self) -> StepRecord:
        record = Counters().step_done(0)
        return dataclasses.replace(record, seconds=self.seconds, background_seconds=self.background_seconds)

    def step(self, tokens: float) -> int:
        """One step whose layers take a unit each for ``tokens`` of 1, and the loss two. Returns how many chunks are
        there behind it."""
        self.memory.here = sum(self._here())  # what was released is free
        self.memory.use(0)
        self.homes.begin_pass()
        for layer in range(5):
            self.memory.use(self.taken(layer) * tokens)
            if layer < len(WEIGHTS):
                self.compute(layer)
        self.memory.use((self.taken(4) + 2) * tokens)
        self.homes._t_forward_s -= self.forward_seconds
        self.homes.begin_backward()
        for layer in reversed(range(5)):
            self.memory.use(self.taken(layer) * tokens)
        self.memory.use(0)
        self.homes.step_done(self.record, self.record, self.update_seconds)
        return self.chunks()

    def compute(self, layer: int) -> None:
        """A layer with weights: the host's time for them."""
        recorder, weights = self.recorder, {layer: WEIGHTS[layer]}
        if recorder is not None:
            recorder.before_fetch(waits=True)
        time.sleep(self.fetch_seconds)
        if recorder is not None:
            recorder.after_fetch(weights, weights)
            recorder.begin_hook()
        time.sleep(self.release_seconds)
        if recorder is not None:
            recorder.after_release(weights)

    def taken(self, layer: int) -> int:
        return layer if self.saved is None else len([place for place in self.saved.stay if place < layer])

    def _here(self) -> Iterator[int]:
        yield self.bench.tier.device_nbytes
        yield sum(map(len, self.weights.there.values())) + self.gradients.device_nbytes

    def chunks(self) -> int:
        return sum(self.bench.tier.places(index).count(Place.GPU) for index in (0, 1))


@pytest.fixture
def life(tmp_path, monkeypatch):
    monkeypatch.setattr("tencache_ds.placement.gpu_policy.LEAST_HEADROOM_NBYTES", 1)
    monkeypatch.setattr("tencache_ds.placement.step_observer.MOST_STEPS", 1)
    created = []

    def make(units: float, **options: object) -> Life:
        created.append(Life(tmp_path, units, **options))
        return created[-1]

    yield make
    for each in created:
        each.homes.close()
        each.bench.check()
        each.bench.close()


def begin(training: Life) -> int:
    """The first steps, in which it is decided what goes there and recorded what training needs; returns how many chunks
    are there then."""
    assert training.step(1) == 0, "where not everything fits, a second step says what it costs"
    return [training.step(1) for _ in range(OBSERVED_STEPS)][-1]


def test_with_room_for_everything_everything_goes_there_and_stays(life):
    training = life(100)
    assert training.step(1) == 6
    assert set(training.weights.there) == {0, 1, 2} == training.moved
    assert training.accounts.weight_nbytes == sum(WEIGHTS.values()) == training.accounts.gradient_nbytes
    for _ in range(3):
        assert training.step(1) == 6
    assert len(training.said) == 1


def test_a_plan_that_moves_nothing_waits_for_no_update(life):
    training = life(8)
    assert begin(training) == 0
    assert training.homes.settled
    assert training.waits_for_update == []


def test_gradients_that_go_there_without_weights_wait_for_the_update(life):
    training = life(100)
    training.step(1)
    training.homes.hand_back(weights=False)
    training.moved.clear()
    training.waits_for_update.clear()
    training.homes.take_again()
    assert training.moved == {0, 1, 2}


def test_room_stays_free_for_a_step_twice_as_large(life):
    # Six units at the peak, six stay free; of the other six, weights take one, and gradients of five chunks another.
    training = life(18)
    assert begin(training) == 5
    assert training.step(1.5) == 5


def test_a_step_that_leaves_too_little_makes_state_leave(life):
    training = life(18)
    begin(training)
    assert training.step(1) == 5
    assert training.step(1.6) < 5
    left = training.chunks()
    assert training.step(1.6) == left, "the headroom is there again"
    assert training.step(3) == 0
    training.step(1)
    assert training.gradients.device_nbytes == training.accounts.gradient_nbytes == 0, "nor is its gradient there"


def test_state_that_leaves_within_an_allocation_takes_what_stays_free_of_the_rest(life):
    # Of eight units beside the peak, six would stay free. Weights and gradients are to take no more than two.
    training = life(14, lends=True)
    assert training.step(1) == training.step(1) == 6
    training.step(1.4)
    assert training.chunks() < 6
    assert training.memory.peak <= training.memory.capacity


def test_state_takes_no_more_than_has_a_place_elsewhere(life):
    training = life(14, lends=True)
    training.host_room_nbytes = 2 * UNIT - training.bench.tier.resident_nbytes  # what leaves it has room there
    assert 0 < begin(training) < 6


def test_what_left_comes_back_when_training_has_not_needed_the_memory_for_long(life):
    training = life(18, lends=True)
    assert training.step(1) == 6
    training.step(2.2)
    left = training.chunks()
    assert left < 6
    for _ in range(FIRST_PATIENCE - 1):
        assert training.step(1) == left
    assert training.step(1) == 6
    assert "for some time" in training.said[-1]
    # Needed again: the next time takes twice as long.
    training.step(2.2)
    assert training.chunks() == left
    for _ in range(2 * FIRST_PATIENCE - 1):
        assert training.step(1) == left
    assert training.step(1) == 6


def test_what_an_allocation_took_back_is_in_host_memory_and_comes_back_later(life, caplog):
    training = life(100, lends=True)
    assert training.step(1) == 6
    assert training.memory.host_room_nbytes == 5 * UNIT
    training.homes.begin_pass()
    training.memory.take_back(2)
    training.homes.step_done(training.record, training.record, 1e-9)
    assert training.chunks() == 4
    assert training.accounts.host_nbytes >= training.bench.tier.resident_nbytes > 0
    assert "training needed GPU memory in this step" in caplog.text
    assert training.moves.state_nbytes == training.bench.tier.device_nbytes > 0
    training.accounts.host_left_nbytes = -UNIT
    training.homes.begin_pass()
    training.memory.take_back(1)
    training.homes.step_done(training.record, training.record, 1e-9)
    places = [place for index in (0, 1) for place in training.bench.tier.places(index)]
    assert Place.NVME in places, "what host memory has no room for"
    training.bench.check()


def test_state_that_the_device_cannot_update_never_goes_there(life, monkeypatch):
    training = life(18, lends=True)
    monkeypatch.setattr(training.bench.tier, "dtype", lambda sub_group, kind: torch.bfloat16)
    for _ in range(2 * FIRST_PATIENCE + OBSERVED_STEPS):
        assert training.step(1) == 0
    assert set(training.weights.there) == {0, 1, 2}


def test_while_steps_stay_large_nothing_comes_back(life):
    training = life(18, lends=True)
    training.step(1)
    training.step(2.2)
    left = training.chunks()
    for _ in range(3 * FIRST_PATIENCE):
        training.step(2.2)
        assert training.chunks() <= left


def test_a_skipped_step_is_not_what_a_plan_is_made_from(life):
    training = life(17)
    training.update_seconds = 0.0
    for _ in range(4):
        assert training.step(1) == 0
    training.seconds, training.update_seconds = 3.0, 1.0
    assert training.step(1) == 0, "no update goes on beside it"
    assert training.step(1) == 5
    assert training.predicted == [pytest.approx(3.0 - 1.0 * 5 / 6, abs=0.1)]


def test_a_plan_is_made_from_a_typical_step(life, monkeypatch):
    monkeypatch.setattr("tencache_ds.placement.step_observer.MOST_STEPS", 5)
    training = life(17)
    for seconds, update_seconds in (
        (9.0, 4.0),
        (5.0, 3.0),
        (0.75, 0.3),
        (0.7, 0.45),
        (0.55, 0.25),
        (0.95, 0.3),
        (0.75, 0.3),
    ):
        assert training.chunks() == 0
        training.seconds, training.update_seconds = seconds, update_seconds
        training.step(1)
    assert training.chunks() == 5
    assert training.predicted == [pytest.approx(0.45 + 0.3 / 6, abs=0.05)]
    assert "instead of 0.75 s" in training.said[-1]


def test_what_was_recorded_in_a_long_step_costs_less_in_a_typical_one(life, monkeypatch):
    monkeypatch.setattr(Life, "without_fetches", True)
    monkeypatch.setattr("tencache_ds.placement.step_observer.MOST_STEPS", 3)
    training = life(18)
    training.fetch_seconds, training.release_seconds = 0.02, 0.01
    for seconds in (9.0, 5.0, 1.0, 1.0, 2.0):
        training.seconds = seconds
        training.step(1)
    assert training.predicted == [pytest.approx(1.0 - 0.09 / 2, abs=0.03)]


def test_an_update_that_takes_long_comes_before_weights(life):
    training = life(17)
    training.update_seconds = 1.0
    assert begin(training) == 5
    assert training.predicted == [pytest.approx(2.0 - 1.0 * 5 / 6, abs=0.1)]
    assert "a step should take" in training.said[-1]


def test_activations_leave_where_state_saves_more_time(life):
    assert begin(life(12)) == 0, "nothing is free beside what may be needed"
    training = life(12, saved=Saved(0.0, 0.0, 0.0, 0.0))
    training.update_seconds = 1.0
    assert begin(training) == 6
    assert len(training.saved.stay) <= 1, "the two sub-groups leave less than two units of the eight"
    assert training.predicted == [pytest.approx(1.0, abs=0.01)]
    for _ in range(5):
        assert training.step(1) == 6


def test_activations_that_backward_waits_for_stay_before_state(life):
    training = life(12, saved=Saved(0.5, 0.5, 0.0, 0.5))
    training.seconds, training.update_seconds = 3.0, 1.0
    assert begin(training) == 5, "not all six"
    assert training.saved.stay == {0, 1, 3}
    # The waits of one and a half seconds are gone, and most of the update's one.
    assert training.predicted == [pytest.approx(3.0 - 1.5 - 5 / 6, abs=0.2)]
    for _ in range(5):
        training.memory.record()
        assert training.step(1) == 5
        assert training.memory.peak <= training.memory.capacity - 2 * UNIT, "the headroom is there"


def test_where_activations_fit_beside_everything_they_stay(life):
    training = life(100, saved=Saved(0.0, 0.0, 0.0, 0.0))
    assert training.step(1) == 6
    assert len(training.saved.stay) == 4
    # Not with as much headroom as a pass takes that keeps them.
    training = life(18, saved=Saved(0.0, 0.0, 0.0, 0.0))
    training.update_seconds = 1.0
    begin(training)
    assert training.chunks() == 6
    assert len(training.saved.stay) == 4


def test_what_moves_because_it_does_not_fit_is_no_reason_to_take_its_memory(life):
    saved = Saved(0.5, 0.5, 0.5, 0.5)
    saved.stay = set()
    training = life(14, saved=saved)
    assert training.step(1) == 0, "everything else would fit"
    training.update_seconds = 0.1
    for _ in range(OBSERVED_STEPS):
        training.step(1)
    assert len(saved.stay) == 4


def test_a_limit_for_weights_and_state_is_no_reason_to_move_activations(life):
    training = life(100, saved=Saved(0.0, 0.0, 0.0, 0.0), gpu_memory=3 * UNIT)
    training.update_seconds = 1.0
    for _ in range(OBSERVED_STEPS + 2):
        training.step(1)
        assert len(training.saved.stay) == 4
    assert 0 < training.chunks() < 6


def test_what_the_next_forward_pass_hides_of_the_update_is_predicted(life):
    training = life(17)
    training.update_seconds, training.hidden_share, training.forward_seconds = 1.2, 0.5, 10.0
    assert begin(training) == 5
    assert training.predicted == [pytest.approx(2.0 - 1.2 + 0.2 - 0.5 * 0.2, abs=0.05)]


def test_a_short_forward_pass_hides_no_more_than_itself(life):
    training = life(17)
    training.update_seconds, training.hidden_share, training.forward_seconds = 1.2, 0.5, 0.03
    begin(training)
    assert training.predicted == [pytest.approx(2.0 - 1.2 + 0.2 - 0.03, abs=0.05)]


def test_a_step_takes_as_long_as_its_update(life):
    training = life(17)
    training.seconds, training.update_seconds = 1.25, 1.2
    training.hidden_share, training.forward_seconds = 1.0, 10.0
    assert begin(training) == 5
    assert training.predicted == [pytest.approx(0.2, abs=0.05)]


@pytest.mark.parametrize("without_fetches", [True, False])
def test_the_time_of_hooks_that_are_no_longer_called_is_predicted(life, monkeypatch, without_fetches):
    monkeypatch.setattr(Life, "without_fetches", without_fetches)
    training = life(18)
    training.fetch_seconds, training.release_seconds, training.update_seconds = 0.1, 0.05, 0.6
    assert begin(training) == 5 + (not without_fetches)
    assert (set(training.weights.there) == {0, 1, 2}) is without_fetches
    saved = 0.6 * 5 / 6 + 0.45 if without_fetches else 0.6
    assert training.predicted == [pytest.approx(2.0 - saved, abs=0.1)]


def test_memory_that_is_found_only_by_flushing_is_given_back(life):
    training = life(18)
    begin(training)
    training.memory.n_flushes += 1
    assert training.step(1) < 5
    left = training.chunks()
    assert training.step(1) == left


def test_where_state_has_nowhere_to_go_training_goes_on(life, monkeypatch, caplog):
    training = life(18)
    begin(training)

    def refuse(nbytes: int) -> None:
        raise MemoryLimitError("the host is full")

    monkeypatch.setattr(training.moves, "release_state", refuse)
    assert training.step(2.2) == training.step(2.2) == 5
    assert [record for record in caplog.records if "the host is full" in record.getMessage()][1:] == []
    assert "the host is full" in caplog.text


def test_weights_leave_last_and_only_those_that_can_without_the_others(life):
    training = life(18)
    begin(training)
    training.memory.capacity = int(3.5 * UNIT)
    assert training.step(0.1) == 0
    assert set(training.weights.there) == {2}
    assert training.accounts.weight_nbytes == WEIGHTS[2]


def test_weights_that_left_come_back_before_state_does(life):
    training = life(18)
    begin(training)
    training.memory.capacity = int(3.5 * UNIT)
    training.step(0.1)
    assert set(training.weights.there) == {2}
    training.memory.capacity = 18 * UNIT
    training.memory.refuses = True
    for _ in range(2 * FIRST_PATIENCE + 2):
        training.step(1)
    assert set(training.weights.there) == {2}, "there is no memory after all"
    training.memory.refuses = False
    for _ in range(4 * FIRST_PATIENCE + 2):
        training.step(1)
    assert set(training.weights.there) == {0, 1, 2}
    assert training.accounts.weight_nbytes == sum(WEIGHTS.values())


def test_host_memory_is_freed_when_state_is_on_nvme_and_needed_again_when_weights_leave(life):
    training = life(18)
    training.moves.relocate({1: (Place.NVME,) * len(training.bench.tier.chunks(1))})
    begin(training)
    gradients = training.gradients
    assert training.weights.without_host == {0, 1}
    assert gradients.unused_host_nbytes == 0
    assert all(gradients.on_device(key) for key in (0, 1)), "the first sub-group is there"
    taken = training.accounts.host_nbytes
    training.memory.capacity = int(3.5 * UNIT)
    training.step(0.1)
    assert set(training.weights.there) == {2}
    assert training.weights.without_host == set()
    assert not gradients.device_nbytes
    assert training.accounts.host_nbytes > taken
    training.step(1)


def test_without_host_memory_weights_stay_and_training_goes_on(life, caplog):
    training = life(18)
    begin(training)

    def refuse(key: int) -> None:
        raise MemoryLimitError("the host is full")

    training.weights.to_host = refuse
    training.memory.capacity = int(3.5 * UNIT)
    assert training.step(0.1) == 0
    assert set(training.weights.there) == {0, 1, 2}
    training.step(0.1)
    assert caplog.text.count("fit nowhere else: the host is full") == 1
    del training.weights.to_host


def test_without_memory_for_all_weights_none_moves(life):
    training = life(100)
    training.memory.refuses = True
    assert training.step(1) == 0
    assert training.weights.there == {}
    training.memory.refuses = False
    assert training.step(1) == 0, "it is decided once"


def test_a_budget_of_the_user_is_kept(life, monkeypatch):
    monkeypatch.setattr(Life, "without_fetches", True)
    weights = sum(-(-nbytes // 512) * 512 for nbytes in WEIGHTS.values())
    training = life(100, gpu_memory=weights + CHUNK_NBYTES + 4096 * 2)
    training.fetch_seconds, training.update_seconds = 0.1, 0.06
    assert begin(training) == 1
    assert set(training.weights.there) == {0, 1, 2}
    assert training.moved == {0}
    training = life(100, gpu_memory=weights + CHUNK_NBYTES + 4096 * 2)
    training.update_seconds = 0.06
    assert begin(training) == 2, "weights that nothing waits for leave the memory to state"
    assert training.moves.nbytes <= weights + CHUNK_NBYTES + 4096 * 2


@pytest.mark.parametrize("lends", [True, False])
def test_what_is_handed_back_on_request_stays_out_until_it_is_asked_for_again(life, lends):
    training = life(100, lends=lends)
    assert training.step(1) == 6
    before = training.moves.nbytes
    assert training.homes.hand_back() == before > 0
    assert training.moves.nbytes == training.chunks() == 0
    assert training.homes.hand_back() == 0
    for _ in range(2 * FIRST_PATIENCE):
        assert training.step(1) == 0
    training.homes.take_again()
    assert training.moves.nbytes == before
    assert training.accounts.weight_nbytes == sum(WEIGHTS.values())
    training.homes.take_again()
    assert training.step(1) == 6


def test_state_or_weights_alone_are_handed_back(life):
    training = life(100)
    training.step(1)
    training.homes.hand_back(weights=False)
    assert (training.chunks(), len(training.weights.there)) == (0, 3)
    training.homes.hand_back(state=False)
    assert (training.chunks(), len(training.weights.there)) == (0, 0)
    training.homes.take_again()
    assert (training.chunks(), len(training.weights.there)) == (6, 3)


def test_what_no_longer_has_room_when_it_is_asked_for_again_stays_out(life, caplog):
    training = life(100)
    training.step(1)
    training.homes.hand_back()
    training.memory.refuses = True
    training.homes.take_again()
    assert (training.chunks(), len(training.weights.there)) == (0, 0)
    assert "no weight moves to GPU memory" in caplog.text
    training.memory.refuses = False
    training.step(1)


def test_nothing_is_planned_while_memory_is_handed_back(life):
    training = life(100)
    training.homes.hand_back()
    assert training.step(1) == training.step(1) == 0
    training.homes.take_again()
    assert training.step(1) == 6


def test_a_forward_pass_is_as_long_as_without_waits_for_an_update(life):
    training = life(17)
    training.homes.begin_pass()
    training.waited_seconds = 0.5
    training.homes._t_forward_s -= 0.75
    training.homes.begin_backward()
    assert training.homes._forward_seconds == pytest.approx(0.25, abs=0.05)


def test_an_update_that_is_hidden_is_part_of_no_step_and_known_all_the_same(life):
    training = life(17)
    training.update_seconds, training.background_seconds = 0.1, 1.1
    training.hidden_share, training.forward_seconds = 0.5, 10.0
    assert begin(training) == 5
    assert training.predicted == [pytest.approx(2.0 - 0.1 + 0.2 - 0.5 * 0.2, abs=0.05)]
