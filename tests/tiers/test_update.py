# SPDX-License-Identifier: Apache-2.0
"""The optimizer step as a stream of chunks: which kernel gets which chunk, how far it runs ahead, and what errors
leave behind."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.io import Operation
from tencache_ds.placement.places import Place
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tensors import Scratch
from tencache_ds.tiers import update
from tencache_ds.tiers.gradients import GradientSegment
from tencache_ds.tiers.host_update import ArithmeticCores, FusedUpdate, UnfusedUpdate, WholeUpdate
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER, SubGroupSpec
from tencache_ds.tiers.update import ChunkedUpdate, SubGroupStep, publish
from tests.tiers.conftest import TIMEOUT_S, Storage, numbers
from tests.tiers.ordinary_gradients import gradient_tier
from tests.tiers.test_device_places import Device

pytestmark = pytest.mark.timeout(60)

KINDS = ((MASTER, torch.float32), ("exp_avg", torch.float32), ("exp_avg_sq", torch.float32))
CHUNK_NBYTES = 4096 * 12
N_CHUNKS = 7
NUMEL = (N_CHUNKS - 1) * 4096 + 100
BEFORE = 5
"""Elements of another sub-group, which come first in the gradient buffer."""

STORED, RESIDENT = (Place.NVME,) * N_CHUNKS, (Place.HOST,) * N_CHUNKS


class Weights:
    """A writer with one weight in 16 bits."""

    def __init__(self, *, holds: bool = False) -> None:
        self.values = torch.zeros(NUMEL, dtype=torch.bfloat16)
        self.closed: list[int] = []
        self._holds = holds

    def open(self, chunk):
        return [(0, self.values[chunk.start : chunk.start + chunk.numel])]

    def close(self, chunk) -> None:
        self.closed.append(chunk.index)

    def holds_buffers(self, sub_group: int) -> bool:
        return self._holds


class Bench:
    """A sub-group with known state and gradients, and what an update has made of it so far."""

    def __init__(self, folder: Path, places, *, holds: bool = False, n_buffers: int = 4) -> None:
        self.storage = Storage(folder, (SizeClass(CHUNK_NBYTES, n_buffers),))
        self.device = Device()
        self.tier = OptimizerStateTier(
            [SubGroupSpec(NUMEL, KINDS, places)],
            store=self.storage.store,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=TIMEOUT_S,
            device=self.device,
        )
        self.master = numbers(NUMEL, torch.float32, 1)
        self.tier.write(0, {kind: self.master.clone() for kind, _ in KINDS})
        self.gradient = numbers(NUMEL, torch.bfloat16, 2)
        segments = [GradientSegment(9, 0, BEFORE), GradientSegment(1, BEFORE, NUMEL)]
        self.gradients = gradient_tier([segments], torch.bfloat16, self.storage.counters)
        self.gradients.accumulate(1, self.gradient, first=True)
        self.weights = Weights(holds=holds)

    def update(self, *kernels, in_place=None) -> None:
        self.tier.begin_update()
        update = ChunkedUpdate(self.tier, self.gradients, self.weights, kernels, in_place)
        done = update.start_in_place(step())
        update.run([(step(), [chunk for chunk in self.tier.chunks(0) if chunk.index not in done])])

    def expected(self, *indices: int) -> torch.Tensor:
        """Master weights after an update by :class:`Kernel` of some chunks."""
        master = self.master.clone()
        for index in indices:
            chunk = self.tier.chunks(0)[index]
            part = slice(chunk.start, chunk.start + chunk.numel)
            master[part] += self.gradient[part].float()
        return master

    def close(self) -> None:
        self.storage.backend.open_gates()
        self.tier.drain()
        self.tier.close()
        self.storage.close()


@pytest.fixture
def stored(tmp_path):
    bench = Bench(tmp_path, STORED)
    yield bench
    bench.close()


@pytest.fixture
def resident(tmp_path):
    bench = Bench(tmp_path, RESIDENT)
    yield bench
    bench.close()


def step(scale=1.0) -> SubGroupStep:
    return SubGroupStep(0, BEFORE, 1, scale, {}, None)


class Job:
    """Adds the gradient when it is waited for: what is given back earlier lacks it."""

    def __init__(self, kernel, state, gradient, weights) -> None:
        self._kernel, self._tensors, self._number = kernel, (state, gradient, weights), kernel.numbers[-1]
        self.end_ns = 0
        self.error, self.match, self.digest = None, True, b""

    def wait(self, timeout_s: float) -> bool:
        if self.end_ns:
            return True
        self._kernel.n_under_way -= 1
        self._kernel.waited.append(self._number)
        if self._kernel.hangs:
            return False
        self.end_ns = time.perf_counter_ns()
        state, gradient, weights = self._tensors
        state[MASTER].add_(gradient.float())
        for first, weight in weights:
            weight.copy_(state[MASTER][first : first + weight.numel()])
        return True

    def publish(self) -> None:
        self._kernel.n_published += 1


class Kernel:
    """Notes how many chunks are under way."""

    def __init__(self, *, takes=lambda number: True, asynchronous: bool = True, fails_at: int = -1) -> None:
        self.asynchronous = asynchronous
        self.numbers: list[int] = []
        self.waited: list[int] = []
        self.most_under_way = self.n_under_way = self.n_published = 0
        self.hangs = False
        self._takes, self._fails_at = takes, fails_at
        self._asked = -1

    def takes(self, state, gradient, weights) -> bool:
        self._asked += 1
        return self._takes(self._asked)

    def start(self, state, gradient, weights, step, digest):
        if self._asked == self._fails_at:
            raise RuntimeError("the kernel failed")
        self.numbers.append(self._asked)
        self.n_under_way += 1
        self.most_under_way = max(self.most_under_way, self.n_under_way)
        job = Job(self, state, gradient, weights)
        if self.asynchronous:
            return job
        assert job.wait(0)
        return None


def check(bench: Bench, *indices: int) -> None:
    """The state and the weights are those of an update of some chunks."""
    expected = bench.expected(*indices)
    assert torch.equal(bench.tier.read(0, MASTER), expected)
    for index in indices:
        chunk = bench.tier.chunks(0)[index]
        part = slice(chunk.start, chunk.start + chunk.numel)
        assert torch.equal(bench.weights.values[part], expected[part].bfloat16())


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("places", [STORED, RESIDENT, None, (Place.HOST, Place.NVME) * 3 + (Place.HOST,)])
def test_every_chunk_is_updated_once_and_in_order(tmp_path, places, asynchronous):
    bench, kernel = Bench(tmp_path, places), Kernel(asynchronous=asynchronous)
    bench.update(kernel)
    assert kernel.numbers == bench.weights.closed == list(range(N_CHUNKS))
    assert kernel.n_published == (N_CHUNKS if asynchronous else 0)
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_resident_chunks_queue_behind_the_one_under_way(resident, monkeypatch):
    monkeypatch.setattr(update, "JOBS_AHEAD", 4)
    kernel = Kernel()
    resident.update(kernel)
    assert kernel.most_under_way == 1 + 4


def test_of_several_queued_chunks_the_last_one_is_awaited_first(resident, monkeypatch):
    monkeypatch.setattr(update, "JOBS_AHEAD", 4)
    kernel = Kernel()
    resident.update(kernel)
    # Of five under way two are left; at the end all are awaited. Each time Python sleeps once, until the last one ends.
    assert kernel.waited == [2, 0, 1, 6, 3, 4, 5]
    assert resident.weights.closed == list(range(N_CHUNKS))


@pytest.mark.parametrize(("n_buffers", "holds", "most"), [(3, False, 1), (4, False, 2), (8, False, 3), (8, True, 1)])
def test_a_quarter_of_the_staging_buffers_is_queued(tmp_path, monkeypatch, n_buffers, holds, most):
    bench, kernel = Bench(tmp_path, STORED, holds=holds, n_buffers=n_buffers), Kernel()
    monkeypatch.setattr(OptimizerStateTier, "ready", lambda *_: True)  # however long the reads take
    bench.update(kernel)
    assert kernel.most_under_way == most
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_no_buffer_is_kept_while_a_read_is_awaited(tmp_path, monkeypatch):
    bench, kernel = Bench(tmp_path, STORED, n_buffers=8), Kernel()
    monkeypatch.setattr(OptimizerStateTier, "ready", lambda *_: False)
    bench.update(kernel)
    assert kernel.most_under_way == 1
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_a_chunk_is_ready_when_its_read_has_ended(stored):
    stored.tier.drain()
    stored.storage.backend.gates[Operation.READ].clear()
    stored.tier.begin_update()
    chunk = stored.tier.chunks(0)[0]
    assert not stored.tier.ready(chunk)
    stored.storage.backend.open_gates()
    used = stored.tier.take(chunk)
    stored.tier.put(used, changed=False)
    assert not stored.tier.ready(chunk)  # it would have to be read again


def test_of_weights_with_staging_buffers_those_of_one_chunk_are_open(tmp_path):
    bench, kernel = Bench(tmp_path, RESIDENT, holds=True), Kernel()
    bench.update(kernel)
    assert kernel.most_under_way == 1
    bench.close()


def test_a_chunk_goes_to_the_first_kernel_that_takes_it(resident):
    first, second = Kernel(takes=lambda number: number not in (2, 5)), Kernel(asynchronous=False)
    seen = []
    start = second.start
    second.start = lambda *arguments: (seen.append(first.n_under_way), start(*arguments))[1]
    resident.update(first, second)
    assert len(first.numbers) == N_CHUNKS - 2
    assert len(second.numbers) == 2
    assert seen == [0, 0]  # it has the cores to itself
    assert resident.weights.closed == list(range(N_CHUNKS))
    check(resident, *range(N_CHUNKS))


def test_a_chunk_that_no_kernel_takes_is_an_error(stored):
    with pytest.raises(TenCacheError, match=r"no kernel updates chunk 0\.1"):
        stored.update(Kernel(takes=lambda number: number == 0))
    check(stored, 0)


def test_chunks_updated_in_place_are_not_streamed(resident):
    class InPlace:
        def start(self, step):
            assert (step.sub_group, step.start) == (0, BEFORE)
            return frozenset({0, 3})

    kernel = Kernel()
    resident.update(kernel, in_place=InPlace())
    left = [index for index in range(N_CHUNKS) if index not in (0, 3)]
    assert resident.weights.closed == left
    check(resident, *left)


class OnDevice(Kernel):
    """Updates chunks in device memory one by one; each ends when it was looked at twice."""

    def __init__(self, bench: Bench, *, leaves: int = -1, **options) -> None:
        super().__init__(**options)
        self._bench, self._leaves = bench, leaves

    def start(self, step) -> frozenset[int]:
        return frozenset()

    def start_chunk(self, step, chunk, weights):
        if chunk.index == self._leaves:
            return None
        self._asked = chunk.index
        gradient = self._bench.gradients.view(step.start + chunk.start, chunk.numel)
        job = Kernel.start(self, self._bench.tier.device_views(chunk), gradient, weights, step, b"")
        return Looked(job)


class Looked:
    transfer_ns = 0
    error, match, digest = None, True, b""

    def __init__(self, job: Job) -> None:
        self._job, self._looks = job, 0
        self.wait, self.publish = job.wait, job.publish

    @property
    def end_ns(self) -> int:
        self._looks += 1
        if self._looks == 2:
            self._job.wait(0)
        return self._job.end_ns


MIXED = (Place.GPU, Place.HOST, Place.NVME, Place.GPU, Place.HOST, Place.GPU, Place.GPU)


def test_chunks_in_device_memory_are_updated_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(update, "AHEAD_ON_DEVICE", 2)
    bench = Bench(tmp_path, MIXED)
    kernel, beside = Kernel(), OnDevice(bench)
    bench.update(kernel, in_place=beside)
    assert sorted(bench.weights.closed) == list(range(N_CHUNKS)), "each once"
    assert beside.numbers == [0, 3, 5, 6]
    assert len(kernel.numbers) == 3
    assert beside.most_under_way == 2
    assert [index for index in bench.weights.closed if index in (1, 2, 4)] == [1, 2, 4]
    assert bench.tier.places(0) == MIXED
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_a_host_kernel_has_work_before_the_device_gets_all_of_its_own(tmp_path):
    bench = Bench(tmp_path, (Place.GPU,) * 5 + (Place.HOST,) * 2)
    kernel, beside = Kernel(), OnDevice(bench)
    started = []
    for each, name in ((kernel, "start"), (beside, "start_chunk")):
        real = getattr(each, name)
        setattr(each, name, lambda *args, real=real, each=each: (started.append(each), real(*args))[1])
    bench.update(kernel, in_place=beside)
    assert started[0] is kernel
    assert started[1 : 1 + update.STARTED_ON_DEVICE] == [beside] * update.STARTED_ON_DEVICE
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_where_weights_hold_staging_buffers_all_chunks_keep_their_order(tmp_path):
    bench = Bench(tmp_path, MIXED, holds=True)
    kernel, beside = Kernel(), OnDevice(bench)
    bench.update(kernel, in_place=beside)
    assert bench.weights.closed == list(range(N_CHUNKS))
    assert kernel.most_under_way == beside.most_under_way == 1
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_a_chunk_that_has_left_device_memory_is_updated_in_host_memory(tmp_path):
    bench = Bench(tmp_path, MIXED)
    kernel, beside = Kernel(), OnDevice(bench, leaves=3)
    bench.update(kernel, in_place=beside)
    assert sorted(bench.weights.closed) == list(range(N_CHUNKS))
    assert len(kernel.numbers) == 4
    check(bench, *range(N_CHUNKS))
    bench.close()


@pytest.mark.parametrize("fails", ["beside", "host"])
def test_after_an_error_nothing_is_under_way_on_the_device_either(tmp_path, fails):
    bench = Bench(tmp_path, MIXED)
    kernel = Kernel(fails_at=1 if fails == "host" else -1)
    beside = OnDevice(bench, fails_at=3 if fails == "beside" else -2)
    with pytest.raises(RuntimeError, match="the kernel failed"):
        bench.update(kernel, in_place=beside)
    assert kernel.n_under_way == beside.n_under_way == 0
    bench.close()


def test_a_gradient_in_pieces_is_put_together(resident):
    resident.gradient = torch.full((NUMEL,), 1 + 2.0**-20)
    resident.gradients.replace(1, resident.gradient)
    resident.update(Kernel())
    check(resident, *range(N_CHUNKS))


def test_after_an_error_of_a_kernel_nothing_is_under_way(resident, stored):
    for bench, n_done in ((resident, 4), (stored, 4)):
        kernel = Kernel(fails_at=n_done)
        with pytest.raises(RuntimeError, match="the kernel failed"):
            bench.update(kernel)
        assert kernel.n_under_way == 0
        check(bench, *range(n_done))


def test_after_a_failed_read_buffers_come_back(stored):
    stored.storage.backend.fails = lambda operation, tag: operation is Operation.READ and tag.endswith("0.3")
    with pytest.raises(StorageError, match="injected"):
        stored.update(Kernel())
    stored.storage.backend.fails = lambda operation, tag: False
    check(stored, 0, 1, 2)


def test_a_kernel_that_gets_no_core_is_said(resident):
    kernel = Kernel()
    kernel.hangs = True
    with pytest.raises(TenCacheError, match=r"chunk 0\.0 was not done"):
        resident.update(kernel)


@pytest.mark.parametrize("wrong", [0, 3, N_CHUNKS - 1])
def test_a_chunk_over_other_weights_is_an_error_and_is_not_written(stored, wrong):
    class Unmatched(Kernel):
        def start(self, state, gradient, weights, step, digest):
            job = super().start(state, gradient, weights, step, digest)
            job.match = self.numbers[-1] != wrong
            return job

    with pytest.raises(TenCacheError, match=r"changed without the optimizer"):
        stored.update(Unmatched())
    stored.tier.drain()
    stored.storage.assert_idle()
    part = stored.tier.chunks(0)[wrong]
    master = stored.tier.read(0, MASTER, part.start, part.numel)
    assert torch.equal(master, stored.master[part.start : part.start + part.numel])


def test_the_fused_kernel_keeps_the_gradient_until_the_end():
    class Adam:
        def takes(self, state, gradient, weights) -> bool:
            return [weight.dtype for weight in weights] == [torch.bfloat16]

        def start(self, state, gradient, weights, scalars, expected):
            assert (scalars, expected) == ("scalars", b"before")
            return Team()

    class Team:
        match, digest = False, b"after"

        def wait(self, timeout_s: float) -> bool:
            return timeout_s > 1

    kernel, gradient, weight = FusedUpdate(Adam()), torch.ones(4), torch.zeros(4, dtype=torch.bfloat16)
    assert kernel.takes({}, gradient, [(0, weight)])
    assert not kernel.takes({}, gradient, [(0, weight), (4, weight)])
    job = kernel.start({}, gradient, [(0, weight)], SubGroupStep(0, 0, 1, 1.0, {}, "scalars"), b"before")
    assert (job.match, job.digest) == (False, b"after")
    assert job.gradient is gradient
    assert not job.wait(0.5)
    assert job.wait(2)
    job.publish()


class Op:
    """Adds the gradient to everything."""

    loaded = False

    def load(self) -> None:
        self.loaded = True

    def __call__(self, step, state, gradient) -> None:
        assert self.loaded
        assert gradient.dtype is state[MASTER].dtype
        for each in state.values():
            each.add_(gradient)


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor(0.25)])
def test_the_unfused_kernel_scales_updates_and_rounds(scale):
    kernel = UnfusedUpdate(Op(), ArithmeticCores(1, lambda sub_group: False), Scratch())
    state = {kind: torch.arange(6.0) for kind, _ in KINDS}
    gradient = torch.full((6,), 2.0, dtype=torch.bfloat16)
    weights = [(0, torch.zeros(2, dtype=torch.bfloat16)), (3, torch.zeros(3, dtype=torch.bfloat16))]
    assert kernel.takes(state, gradient, weights)
    assert kernel.start(state, gradient, weights, step(scale), b"") is None
    expected = torch.arange(6.0) + 2 * float(scale)
    assert all(torch.equal(value, expected) for value in state.values())
    assert gradient.tolist() == [2.0] * 6
    assert torch.equal(weights[0][1], expected[:2].bfloat16())
    assert torch.equal(weights[1][1], expected[3:].bfloat16())


def test_scratch_memory_is_the_same_while_it_fits():
    scratch = Scratch()
    first = scratch.take(8, torch.float32)
    assert scratch.take(4, torch.float32).data_ptr() == first.data_ptr()
    assert scratch.take(4, torch.bfloat16).dtype is torch.bfloat16
    assert scratch.take(16, torch.bfloat16).numel() == 16


@pytest.mark.parametrize("places", [STORED, None])
def test_an_optimizer_of_its_own_updates_a_sub_group_as_a_whole(tmp_path, places):
    bench = Bench(tmp_path, places)
    parameter = torch.nn.Parameter(torch.empty(0))

    @contextmanager
    def state():
        values = bench.tier.borrow(0)
        parameter.data = values[MASTER]
        yield parameter
        bench.tier.keep(0, values | {MASTER: parameter.data})

    def apply() -> None:
        parameter.data.add_(parameter.grad)

    limit = ArithmeticCores(1, bench.tier.streamed)
    WholeUpdate(bench.tier, bench.gradients, bench.weights, limit, Scratch()).run(0, BEFORE, 0.5, state(), apply)
    bench.gradient = bench.gradient * 0.5
    assert bench.weights.closed == list(range(N_CHUNKS))
    check(bench, *range(N_CHUNKS))
    bench.close()


def test_a_gradient_of_the_masters_dtype_is_not_copied(tmp_path):
    bench = Bench(tmp_path, None)
    gradients = gradient_tier([[GradientSegment(1, 0, NUMEL)]], torch.float32, bench.storage.counters)
    gradients.accumulate(1, torch.ones(NUMEL), first=True)
    parameter = torch.nn.Parameter(torch.zeros(NUMEL))

    @contextmanager
    def state():
        yield parameter

    def apply() -> None:
        assert parameter.grad.data_ptr() == gradients.segment(1).data_ptr()

    limit = ArithmeticCores(1, bench.tier.streamed)
    WholeUpdate(bench.tier, gradients, bench.weights, limit, Scratch()).run(0, 0, 1.0, state(), apply)
    bench.close()


def test_published_weights_are_rounded_masters(resident):
    chunk = resident.tier.chunks(0)[1]
    publish(resident.weights, chunk, resident.master[:4096])
    assert torch.equal(resident.weights.values[4096:8192], resident.master[:4096].bfloat16())
    assert resident.weights.closed == [1]


def test_a_weight_that_cannot_be_written_leaves_no_buffer_behind(stored):
    close = stored.weights.close

    def failing(chunk) -> None:
        close(chunk)
        if chunk.index == 2:
            raise StorageError("write", "weights", 0, 1, "no space")

    stored.weights.close = failing
    with pytest.raises(StorageError, match="no space"):
        stored.update(Kernel())
    stored.tier.begin_pass(())  # what was read ahead goes back
    stored.tier.drain()
    stored.storage.assert_idle()
    assert stored.weights.closed == [0, 1, 2]
