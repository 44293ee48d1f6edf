# SPDX-License-Identifier: Apache-2.0
"""State and weights that change their place, with ordinary memory for a device's; and the update of state there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import MemoryLimitError, StorageError, TenCacheError
from tencache_ds.io import Operation
from tencache_ds.layout import round_up
from tencache_ds.memory import HostArena, Locking
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement.places import GpuUsage, Place
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.device_update import DeviceUpdate
from tencache_ds.tiers.gradients import GradientSegment
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER, SubGroupSpec
from tencache_ds.tiers.update import SubGroupStep
from tencache_ds.tiers.weight_homes import ResidentMemory
from tencache_ds.tiers.weights import WeightTier
from tests.tiers.conftest import TIMEOUT_S, Storage, numbers
from tests.tiers.ordinary_device import OrdinaryDevice
from tests.tiers.ordinary_gradients import gradient_tier

pytestmark = pytest.mark.timeout(120)

KINDS = ((MASTER, torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
CHUNK_NBYTES = 4096 * 12
NUMELS = (3 * 4096 + 100, 2 * 4096)
N_CHUNKS = (4, 2)


class Device(OrdinaryDevice):
    """Ordinary memory with a limit in bytes."""

    def __init__(self, nbytes: int = 2**30) -> None:
        self.left_nbytes = nbytes
        self.given: list[torch.Tensor] = []

    def usage(self) -> GpuUsage:
        return GpuUsage(self.left_nbytes, 0, 0, 0)

    def allocated_nbytes(self) -> int:
        return 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.left_nbytes:
            raise MemoryLimitError(f"{nbytes} bytes are not there")
        self.left_nbytes -= nbytes
        memory = torch.full((nbytes,), 0xCB, dtype=torch.uint8)
        self.given.append(memory)
        return memory

    def _storages(self) -> set[int]:
        return {memory.untyped_storage().data_ptr() for memory in self.given}

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Zeros in device memory."""
        return self.allocate(numel * dtype.itemsize).view(dtype).zero_()


class Bench:
    """A tier of two sub-groups with known contents."""

    def __init__(self, folder: Path, *, whole: bool = False, device: DeviceMemory | None = None) -> None:
        self.storage = Storage(folder, (SizeClass(CHUNK_NBYTES, 3),))
        self.device = Device() if device is None else device
        places = [None if whole else (Place.NVME,) * count for count in N_CHUNKS]
        self.tier = OptimizerStateTier(
            [SubGroupSpec(numel, KINDS, each) for numel, each in zip(NUMELS, places, strict=True)],
            store=None if whole else self.storage.store,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=TIMEOUT_S,
            device=self.device,
        )
        self.dense = [
            {kind: numbers(numel, dtype, 10 * index + i) for i, (kind, dtype) in enumerate(KINDS)}
            for index, numel in enumerate(NUMELS)
        ]
        for index, values in enumerate(self.dense):
            self.tier.write(index, values)

    def check(self) -> None:
        for index, values in enumerate(self.dense):
            for kind, value in values.items():
                assert torch.equal(self.tier.read(index, kind), value), (index, kind)

    def change(self, by: float) -> None:
        """Changes every chunk as an update would."""
        self.tier.begin_update()
        for index, values in enumerate(self.dense):
            for chunk in self.tier.chunks(index):
                with self.tier.using(chunk) as used:
                    for view in used.views.values():
                        view.add_(by)
            for value in values.values():
                value.add_(by)

    def close(self) -> None:
        self.storage.backend.open_gates()
        self.tier.drain()
        self.tier.close()
        self.storage.close()


@pytest.fixture
def bench(tmp_path):
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from(list(Place))] * 6), min_size=1, max_size=4), st.booleans())
def test_state_keeps_its_values_wherever_it_moves(rounds, whole):
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), whole=whole)
        try:
            for number, places in enumerate(rounds):
                if whole:  # there is no store
                    places = [Place.HOST if place is Place.NVME else place for place in places]
                wanted = {0: places[:4], 1: places[4:]}
                version = bench.tier.version
                before = [bench.tier.places(index) for index in (0, 1)]
                bench.tier.relocate(wanted)
                assert [bench.tier.places(index) for index in (0, 1)] == [tuple(places[:4]), tuple(places[4:])]
                assert (bench.tier.version > version) or before == [tuple(places[:4]), tuple(places[4:])]
                bench.check()
                bench.change(number + 1)
                bench.check()
            for index, count in ((0, 4), (1, 2)):
                result = bench.tier.places(index)
                assert len(result) == count
                for chunk, place in zip(bench.tier.chunks(index), result, strict=True):
                    assert bench.tier.on_device(chunk) is (place is Place.GPU)
        finally:
            bench.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 7)] * 4), min_size=1, max_size=4))
def test_state_keeps_its_values_when_its_memory_is_taken_back_at_any_time(rounds):
    """Before it is read, while a copy of it is changed, and by several allocations in one update."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            for before, position, within, after in rounds:
                bench.tier.relocate({0: (Place.GPU,) * 4, 1: (Place.GPU,) * 2})
                bench.device.take_back(before)
                bench.check()
                taken = 0

                def change(view: torch.Tensor, number: int, *, at: int = position, count: int = within) -> None:
                    nonlocal taken
                    view.add_(1)
                    if number == at:
                        taken += bench.device.take_back(count)

                numbered = iter(range(10**6))
                bench.tier.begin_update()
                for index, values in enumerate(bench.dense):
                    for chunk in bench.tier.chunks(index):
                        number = next(numbered)
                        with bench.tier.using(chunk) as used:
                            for view in used.views.values():
                                change(view, number)
                    for value in values.values():
                        value.add_(1)
                bench.device.take_back(after)
                bench.tier.collect()
                there = [place for index in (0, 1) for place in bench.tier.places(index)]
                n_left = max(max(6 - before, 0) - taken - after, 0)
                assert there == [Place.GPU] * n_left + [Place.HOST] * (6 - n_left), "the last ones leave first"
                bench.check()
        finally:
            bench.close()


def test_nothing_is_taken_back_while_it_moves(bench):
    """Nor is memory lost: what was taken back is host memory, and free again when the chunk leaves that."""
    taken = []
    write = bench.device.write

    def wanting(target: torch.Tensor, source: torch.Tensor) -> None:
        taken.append(bench.device.take_back(6))
        write(target, source)

    bench.device.write = wanting
    bench.tier.relocate({0: (Place.GPU,) * 4})
    assert taken == [0] * 4
    assert bench.device.take_back(3) == 3
    bench.tier.relocate({0: (Place.GPU, Place.GPU, Place.NVME, Place.HOST)})
    assert bench.tier.places(0) == (Place.GPU, Place.GPU, Place.NVME, Place.HOST)
    assert bench.tier.resident_nbytes == round_up(bench.tier.chunks(0)[3].nbytes)
    bench.check()


def test_a_copy_of_device_state_is_no_change_of_it(bench):
    bench.tier.relocate({1: (Place.GPU, Place.GPU)})
    chunk = bench.tier.chunks(1)[0]
    used = bench.tier.take(chunk)
    used.views[MASTER].zero_()
    bench.tier.drop(used)
    used = bench.tier.take(chunk)
    used.views[MASTER].zero_()
    bench.tier.put(used, changed=False)
    bench.check()


def test_without_memory_state_stays_where_it_is(bench):
    bench.device.left_nbytes = 2 * CHUNK_NBYTES
    with pytest.raises(MemoryLimitError):
        bench.tier.relocate({0: (Place.GPU,) * 4})
    assert bench.tier.places(0) == (Place.GPU, Place.GPU, Place.NVME, Place.NVME)
    bench.check()
    bench.change(1)
    bench.check()


def test_without_memory_a_whole_sub_group_stays_whole(tmp_path):
    bench = Bench(tmp_path, whole=True)
    try:
        bench.device.left_nbytes = CHUNK_NBYTES
        with pytest.raises(MemoryLimitError):
            bench.tier.relocate({0: (Place.GPU, Place.HOST, Place.GPU, Place.HOST)})
        assert bench.tier.whole(0)
        bench.check()
        bench.change(1)
        bench.check()
    finally:
        bench.close()


def test_a_whole_sub_group_is_cut_without_a_second_copy_of_it(tmp_path):
    chunk_nbytes, n_chunks = 4 * 2**20 * 3, 12
    numel = n_chunks * chunk_nbytes // 12
    storage, process, seen = Storage(tmp_path, (SizeClass(chunk_nbytes, 1),)), psutil.Process(), []

    class Watched(Device):
        def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
            super().write(target, source)
            seen.append(process.memory_info().rss)

    tier = OptimizerStateTier(
        [SubGroupSpec(numel, KINDS, None)], store=None, pool=lambda: storage.pool, counters=storage.counters,
        chunk_nbytes=chunk_nbytes, timeout_s=TIMEOUT_S, device=Watched(),
    )  # fmt: skip
    values = {kind: numbers(numel, dtype, number) for number, (kind, dtype) in enumerate(KINDS)}
    tier.write(0, values)
    before = process.memory_info().rss
    tier.relocate({0: (Place.HOST, Place.GPU) * (n_chunks // 2)})
    assert len(seen) == 3 * n_chunks // 2
    assert max(seen) - before < 3 * chunk_nbytes
    for kind, value in values.items():
        assert torch.equal(tier.read(0, kind), value)
    tier.close()
    storage.close()


def test_tensors_of_the_optimizer_are_left_as_they_are(tmp_path):
    bench = Bench(tmp_path, whole=True)
    try:
        foreign = {kind: value.clone() for kind, value in bench.dense[0].items()}
        bench.tier.keep(0, foreign)
        bench.tier.relocate({0: (Place.GPU, Place.HOST, Place.GPU, Place.HOST)})
        assert all(torch.equal(foreign[kind], value) for kind, value in bench.dense[0].items())
        bench.check()
    finally:
        bench.close()


def test_a_chunk_that_cannot_be_written_stays_in_memory(bench):
    bench.tier.relocate({0: (Place.GPU, Place.HOST, Place.NVME, Place.NVME)})
    bench.storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    for places in ((Place.NVME, Place.HOST, Place.NVME, Place.NVME), (Place.GPU, *(Place.NVME,) * 3)):
        with pytest.raises(StorageError, match="injected"):
            bench.tier.relocate({0: places})
    bench.storage.backend.fails = lambda operation, tag: False
    assert bench.tier.places(0) == (Place.GPU, Place.HOST, Place.NVME, Place.NVME)
    bench.check()


def test_what_cannot_be_done_is_said(bench, tmp_path):
    without = OptimizerStateTier(
        [SubGroupSpec(100, KINDS, None)],
        store=None,
        pool=lambda: bench.storage.pool,
        counters=bench.storage.counters,
        chunk_nbytes=CHUNK_NBYTES,
        timeout_s=TIMEOUT_S,
    )
    with pytest.raises(TenCacheError, match="there is none"):
        without.relocate({0: (Place.GPU,)})
    without.close()
    (tmp_path / "whole").mkdir()
    whole = Bench(tmp_path / "whole", whole=True)
    with pytest.raises(TenCacheError, match="there is no store"):
        whole.tier.relocate({0: (Place.NVME,) * 4})
    whole.check()
    whole.close()


class Adam:
    """Adds the gradient to the master weights and copies them into the weights, one address at a time."""

    def __init__(self, memory) -> None:
        self._memory = memory

    def prepare(self, runs, gradient, weight):
        def launch(scalars) -> None:
            for run in runs:
                assert run.numel > 0
                master = self._memory(run.master, run.numel, torch.float32)
                if run.gradient:
                    master += self._memory(run.gradient, run.numel, gradient).float()
                self._memory(run.exp_avg, run.numel, torch.float32).fill_(run.n_tail)
                if run.weight:
                    self._memory(run.weight, run.numel, weight).copy_(master)

        return launch


def at_address(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    import ctypes

    buffer = (ctypes.c_char * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=numel)


class Weights:
    """A writer of weights whose lengths have nothing to do with those of chunks."""

    def __init__(self, numels: tuple[int, ...], device: Device | None = None) -> None:
        self.numels = numels
        self.stored_chunks: set[int] = set()
        self.tensors = [
            torch.zeros(numel, dtype=torch.bfloat16) if device is None else device.tensor(numel, torch.bfloat16)
            for numel in numels
        ]
        self.n_ordered = 0

    def open(self, chunk):
        result, start = [], 0
        for tensor in self.tensors:
            low, high = max(start, chunk.start), min(start + tensor.numel(), chunk.start + chunk.numel)
            if low < high:
                result.append((low - chunk.start, tensor[low - start : high - start]))
            start += tensor.numel()
        return result

    def close(self, chunk) -> None: ...

    def holds_buffers(self, sub_group: int) -> bool:
        return False

    def stored(self, chunk) -> bool:
        return chunk.index in self.stored_chunks

    def order_gathers(self) -> None:
        self.n_ordered += 1

    def addresses(self, sub_group: int) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self.tensors)


class Update:
    """An update of the first sub-group of a bench, whose four weights end within its chunks.

    Args:
        bench: whose.
        on_device: the weights, and the gradients, that are there.
    """

    lengths = (100, 5000, 3000, NUMELS[0] - 8100)

    def __init__(self, bench: Bench, weights: Iterable[int] = (), gradients: Iterable[int] = ()) -> None:
        self.bench, device = bench, bench.device
        segments, start = [], 7  # another sub-group's gradients come before
        for key, length in enumerate(self.lengths):
            segments.append(GradientSegment(key, start, length))
            start += length
        self.gradients = gradient_tier([segments], torch.bfloat16, bench.storage.counters)
        for key in gradients:
            self.gradients.move(key, device.tensor(self.lengths[key], torch.bfloat16))
        self.weights = Weights(self.lengths)
        for key in weights:
            self.weights.tensors[key] = device.tensor(self.lengths[key], torch.bfloat16)
        self.update = DeviceUpdate(Adam(at_address), 16, device, bench.tier, self.gradients, self.weights)
        self.step = SubGroupStep(0, 7, 1, 1.0, {}, None)

    def accumulate(self, seed: int) -> torch.Tensor:
        values = [numbers(length, torch.bfloat16, seed + key) for key, length in enumerate(self.lengths)]
        for key, value in enumerate(values):
            self.gradients.accumulate(key, value, first=True)
        return torch.cat(values)

    def start_chunk(self, index: int) -> Any:
        chunk = self.bench.tier.chunks(0)[index]
        return self.update.start_chunk(self.step, chunk, self.weights.open(chunk))

    def check(self, gradient: torch.Tensor, updated: Iterable[int]) -> None:
        """After an update of these chunks with this gradient."""
        n_tail, written, dense = NUMELS[0] % 16, torch.cat(self.weights.tensors), self.bench.dense[0]
        for index in updated:
            chunk = self.bench.tier.chunks(0)[index]
            part = slice(chunk.start, chunk.start + chunk.numel)
            dense[MASTER][part] += gradient[part].float()
            dense["exp_avg"][part] = float(n_tail if index == 3 else 0)
            assert torch.equal(written[part], dense[MASTER][part].bfloat16())
        self.bench.check()


def test_an_update_reaches_every_element_of_every_chunk_whose_gradients_and_weights_are_there(bench):
    everything = range(4)
    update = Update(bench, weights=everything, gradients=everything)
    bench.tier.relocate({0: (Place.GPU, Place.NVME, Place.GPU, Place.GPU)})
    for seed in (100, 200):
        gradient = update.accumulate(seed)
        assert update.update.start(update.step) == {0, 2, 3}
        update.check(gradient, (0, 2, 3))
        update.gradients.end_step()
    chunk = bench.tier.chunks(0)[1]
    assert not torch.cat(update.weights.tensors)[chunk.start : chunk.start + chunk.numel].any()
    # A gradient at full precision is updated by itself (weight 3 reaches from chunk 1 to the end), and the places
    # change under the update.
    update.accumulate(300)
    update.gradients.replace(3, torch.ones(update.lengths[3]))
    assert update.update.start(update.step) == {0}
    bench.tier.relocate({0: (Place.HOST, Place.HOST, Place.HOST, Place.GPU)})
    update.gradients.end_step()
    update.accumulate(400)
    assert update.update.start(update.step) == {3}
    update.gradients.end_step()
    # Nor is a chunk updated with the others whose weights are on NVMe, or whose gradients or weights are elsewhere.
    update.weights.stored_chunks = {3}
    bench.tier.relocate({0: (Place.HOST, Place.HOST, Place.GPU, Place.GPU)})
    update.accumulate(500)
    assert update.update.start(update.step) == {2}
    update.gradients.move(3, None)
    assert update.update.start(update.step) == set()
    assert update.update.start(SubGroupStep(1, 7 + NUMELS[0], 1, 1.0, {}, None)) == set()


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)), st.booleans(), st.integers(0, 3))
def test_a_chunk_is_updated_wherever_its_gradients_and_weights_are(weights, gradients, replaced, moving):
    """And wherever they are in the next step."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        try:
            update = Update(bench, weights, gradients)
            bench.tier.relocate({0: (Place.GPU,) * 4})
            for seed in (100, 200):
                gradient = update.accumulate(seed)
                if replaced:
                    gradient = gradient.float()
                    value = numbers(update.lengths[3], torch.float32, seed)
                    gradient[-update.lengths[3] :] = value
                    update.gradients.replace(3, value)
                together = update.update.start(update.step)
                for index in set(range(4)) - together:
                    job = update.start_chunk(index)
                    assert job.wait(TIMEOUT_S)
                    assert job.end_ns
                    assert job.match
                update.check(gradient, range(4))
                update.gradients.end_step()
                update.weights.tensors[moving] = bench.device.tensor(update.lengths[moving], torch.bfloat16)
                update.gradients.move(moving, None)
        finally:
            bench.close()


def test_a_chunk_that_has_left_is_left_to_the_host(bench):
    update = Update(bench)
    bench.tier.relocate({0: (Place.GPU,) * 4})
    update.accumulate(100)
    assert update.update.start(update.step) == set()
    left, bench.device.left_nbytes = bench.device.left_nbytes, 0
    assert update.start_chunk(0) is None, "without memory for its gradient"
    bench.device.left_nbytes = left
    bench.device.take_back(3)
    assert [update.start_chunk(index) is None for index in range(4)] == [False, True, True, True]
    update.weights.tensors[3] = torch.zeros(update.lengths[3], dtype=torch.float32)
    bench.tier.relocate({0: (Place.GPU,) * 4})
    assert update.start_chunk(1) is None, "with weights of two dtypes"


def test_weights_that_moved_alone_are_updated_where_they_are(bench):
    lengths = (5000, NUMELS[1] - 5000)
    segments = [GradientSegment(key, start, length) for key, start, length in ((0, 0, 5000), (1, 5000, lengths[1]))]
    gradients = gradient_tier([segments], torch.bfloat16, bench.storage.counters)
    weights = Weights(lengths, bench.device)
    for key, length in enumerate(lengths):
        gradients.move(key, bench.device.tensor(length, torch.bfloat16))
    update = DeviceUpdate(Adam(at_address), 16, bench.device, bench.tier, gradients, weights)
    bench.tier.relocate({1: (Place.GPU,) * 2})

    def step() -> None:
        for key, length in enumerate(lengths):
            gradients.accumulate(key, torch.ones(length, dtype=torch.bfloat16), first=True)
        assert update.start(SubGroupStep(1, 0, 1, 1.0, {}, None)) == {0, 1}
        bench.dense[1][MASTER] += 1
        gradients.end_step()

    step()
    former = weights.tensors[1]
    before, weights.tensors[1] = former.clone(), bench.device.tensor(lengths[1], torch.bfloat16)
    step()
    assert weights.n_ordered == 2
    assert torch.equal(torch.cat(weights.tensors), bench.dense[1][MASTER].bfloat16())
    assert torch.equal(former, before)


def test_weights_go_to_a_device_and_come_back(tmp_path):
    storage = Storage(tmp_path, (SizeClass(8192, 2),))
    arenas = HostArena(None, Locking.NONE), HostArena(None, Locking.NONE)
    weights = WeightTier(
        store=lambda: storage.store,
        resident=ResidentMemory(arenas[0]),
        transient_arena=arenas[1],
        resident_budget_nbytes=lambda: 4096,
        counters=storage.counters,
        timeout_s=TIMEOUT_S,
    )
    values = {key: numbers(2048, torch.bfloat16, key) for key in range(3)}
    for key, value in values.items():
        weights.register(key, f"weight {key}", 2048, torch.bfloat16, always_resident=False).copy_(value)
        weights.store_initial(key)
    weights.use_pool(storage.pool)
    assert [weights.homes.is_resident(key) for key in range(3)] == [True, False, False]
    weights.read_ahead([1])
    memory = {key: torch.empty(2048, dtype=torch.bfloat16) for key in (0, 1)}
    for key in (0, 1):
        weights.to_device(key, memory[key])
        assert weights.homes.on_device(key)
        assert torch.equal(memory[key], values[key])
        assert weights.expose([key])[0] is memory[key]
        weights.give_back(key)
    assert [weights.homes.of(key).returns_to for key in (0, 1)] == [Place.HOST, Place.NVME]
    assert len(weights.homes.stored_nbytes()) == 1
    for key in (0, 1):  # an update, where they are now
        values[key] = values[key] + 1
        weights.begin_update(key).copy_(values[key])
        weights.finish_update(key)
        assert torch.equal(weights.read(key), values[key])
    weights.expose([2])
    with pytest.raises(TenCacheError, match="it is exposed"):
        weights.to_device(2, memory[0])
    weights.give_back(2)
    storage.backend.fails = lambda operation, tag: operation is Operation.WRITE
    with pytest.raises(StorageError):
        weights.to_host(1)
    assert weights.homes.on_device(1)
    storage.backend.fails = lambda operation, tag: False
    assert weights.to_host(0) is not None
    assert weights.to_host(1) is None
    assert weights._weights[1].only_stored
    for key, value in values.items():
        assert torch.equal(weights.read(key), value)
    weights.close()
    storage.close()
    for arena in arenas:
        arena.close()
