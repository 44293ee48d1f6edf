# SPDX-License-Identifier: Apache-2.0
"""An update in the background: who waits for what, and what an error does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tencache_ds.errors import StorageError, TenCacheError, VoidStepError
from tencache_ds.io import Operation
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.runtime.step_guard import Part, StepGuard
from tencache_ds.tiers import update
from tencache_ds.tiers.update import BackgroundUpdate, ChunkedUpdate, UpdateGate
from tests.runtime.test_step_guard import Alone
from tests.tiers.test_update import N_CHUNKS, RESIDENT, STORED, Bench, Job, Kernel, check, step

pytestmark = pytest.mark.timeout(60)

WEIGHT_OF_CHUNK = (0, 0, 1, 1, 2, 2, 2)
"""Weights that no chunk shares."""


def keys_of(chunk) -> tuple[int, ...]:
    return (WEIGHT_OF_CHUNK[chunk.index],)


class HeldKernel(Kernel):
    """Its first chunks are updated, the others when a test says so; ``entered`` when it comes to the first of them."""

    def __init__(self, n_at_once: int) -> None:
        super().__init__()
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self.n_at_once = n_at_once

    def start(self, state, gradient, weights, step, digest):
        if len(self.numbers) == self.n_at_once:
            self.entered.set()
            assert self.may_go_on.wait(30)
        return super().start(state, gradient, weights, step, digest)


class Background:
    def __init__(self, folder, places, kernel: Kernel) -> None:
        self.bench, self.kernel, self.counters = Bench(folder, places), kernel, Counters()
        update = ChunkedUpdate(self.bench.tier, self.bench.gradients, self.bench.weights, [kernel])
        self.guard = StepGuard(Alone())
        self.gate = UpdateGate(self.counters, self.guard)
        self.update = BackgroundUpdate(update, self.gate, self.guard, keys_of, self.counters)

    def begin(self) -> None:
        chunks = self.bench.tier.chunks(0)
        with self.guard.step():
            self.guard.begin_change()
            self.bench.tier.begin_pass(chunks)
            self.update.begin([(step(), chunks)])

    def load(self) -> None:
        self.update.abandon()
        with self.guard.loading():
            self.guard.replaced(Part.TRAINED)

    def close(self) -> None:
        self.update.close()
        self.bench.close()


@pytest.mark.parametrize("places", [STORED, RESIDENT])
def test_a_weight_is_there_when_its_own_chunks_are(tmp_path, places, monkeypatch):
    monkeypatch.setattr(update, "JOBS_AHEAD", 3)
    background = Background(tmp_path, places, HeldKernel(5))
    background.begin()
    assert background.update.running
    assert background.kernel.entered.wait(30)
    background.gate.wait_for([0])
    background.gate.wait_for([77])  # a weight of another model
    waited = []
    thread = threading.Thread(target=lambda: (background.gate.wait_for([0, 2]), waited.append(True)))
    thread.start()
    time.sleep(0.05)
    assert not waited
    background.kernel.may_go_on.set()
    thread.join(30)
    assert waited
    background.update.finish()
    background.update.finish()
    assert not background.update.running
    background.gate.wait_for([0, 1, 2])
    check(background.bench, *range(N_CHUNKS))
    assert background.counters.total().stall_seconds[Stall.UPDATE.value] >= 0.04
    background.close()


def test_one_step_ends_before_the_next_begins(tmp_path):
    background = Background(tmp_path, RESIDENT, HeldKernel(2))
    background.begin()
    assert background.kernel.entered.wait(30)
    threading.Timer(0.05, background.kernel.may_go_on.set).start()
    background.begin()
    assert len(background.kernel.numbers) >= N_CHUNKS
    background.update.finish()
    assert len(background.kernel.numbers) == 2 * N_CHUNKS
    background.close()


def test_something_else_runs_behind_an_update_and_is_not_waited_for(tmp_path):
    background = Background(tmp_path, RESIDENT, HeldKernel(2))
    background.begin()
    assert background.kernel.entered.wait(30)
    updated = []
    background.update.run_in_background(lambda: updated.append(len(background.kernel.numbers)))
    assert not updated
    assert background.update.busy(0.01)
    background.kernel.may_go_on.set()
    assert not background.update.busy(30)
    background.update.finish()
    assert not background.update.busy(30)
    assert updated == [N_CHUNKS]
    background.close()


def test_waits_of_the_update_are_not_those_of_the_training(tmp_path):
    background = Background(tmp_path, STORED, Kernel())
    background.begin()
    background.update.finish()
    background.bench.tier.drain()
    assert background.bench.storage.counters is not background.counters
    before = background.counters.total().background_seconds
    assert before > 0
    with background.counters.in_background(0), background.counters.stall(Stall.BUFFER):
        time.sleep(0.01)
    total = background.counters.total()
    assert total.stall_seconds[Stall.BUFFER.value] == 0
    assert total.background_stall_seconds[Stall.BUFFER.value] >= 0.01
    assert total.background_seconds - before >= 0.01
    with background.counters.stall(Stall.BUFFER):
        time.sleep(0.01)
    assert background.counters.total().stall_seconds[Stall.BUFFER.value] >= 0.01
    background.close()


def test_who_waits_for_an_update_that_fails_gets_its_error(tmp_path):
    background = Background(tmp_path, STORED, HeldKernel(1))
    background.begin()
    assert background.kernel.entered.wait(30)
    background.bench.storage.backend.fails = lambda operation, tag: operation is Operation.READ
    threading.Timer(0.05, background.kernel.may_go_on.set).start()
    background.gate.wait_for([7])
    with pytest.raises(VoidStepError, match="StorageError") as raised:
        background.gate.wait_for([2])
    assert isinstance(raised.value.__cause__, StorageError)
    for _ in range(2):
        with pytest.raises(VoidStepError, match="StorageError"):
            background.update.finish()
    with pytest.raises(VoidStepError):
        background.begin()
    background.load()
    background.update.finish()
    background.gate.wait_for([0, 1, 2])
    background.bench.storage.backend.fails = lambda operation, tag: False
    background.bench.tier.begin_pass(())
    background.close()


def test_any_other_error_is_the_cause_of_one_of_ours(tmp_path):
    kernel = Kernel(fails_at=1)
    background = Background(tmp_path, RESIDENT, kernel)
    background.begin()
    with pytest.raises(VoidStepError, match="the kernel failed"):
        background.gate.wait_for([2])
    with pytest.raises(VoidStepError, match="the kernel failed"):
        background.update.finish()
    background.close()


def test_closing_waits_for_what_is_under_way_and_is_idempotent(tmp_path):
    background = Background(tmp_path, RESIDENT, HeldKernel(3))
    background.begin()
    assert background.kernel.entered.wait(30)
    threading.Timer(0.05, background.kernel.may_go_on.set).start()
    background.update.close()
    background.update.close()
    check(background.bench, *range(N_CHUNKS))
    background.bench.close()


def test_a_job_that_hangs_is_an_error_for_those_who_wait(tmp_path, monkeypatch):
    kernel = Kernel()
    kernel.hangs = True
    monkeypatch.setattr(Job, "wait", lambda self, timeout_s: False)
    background = Background(tmp_path, RESIDENT, kernel)
    background.begin()
    with pytest.raises(TenCacheError, match="no CPU time"):
        background.gate.wait_for([0])
    with pytest.raises(TenCacheError, match="no CPU time"):
        background.update.finish()
    background.close()


# Weights in GPU memory

SLEEP_CYCLES = 100_000_000
"""Of a GPU: some 50 ms."""

ONE_CHUNK = [(None, [SimpleNamespace(index=0)])]


class CopyingUpdate:
    """Stands in for a ``ChunkedUpdate`` whose one chunk ends with a copy to the device.

    Args:
        copy: issues it to the current stream.
    """

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy

    def run(self, work: Any, finished: Callable[[Any], None]) -> None:
        self._copy()
        finished(work[0][1][0])


@contextlib.contextmanager
def updating_on(stream: Any, copy: Callable[[], None]) -> Iterator[tuple[Any, BackgroundUpdate, UpdateGate]]:
    """Gives what begins an update of weight 0, the update, and its gate."""
    guard, counters = StepGuard(Alone()), Counters()
    gate = UpdateGate(counters, guard)
    update = BackgroundUpdate(CopyingUpdate(copy), gate, guard, keys_of, counters, stream)  # type: ignore[arg-type]

    def begin() -> None:
        with guard.step():
            guard.begin_change()
            update.begin(ONE_CHUNK)  # type: ignore[arg-type]

    try:
        yield begin, update, gate
    finally:
        update.close()


class Event:
    """Stands in for an event of the device."""

    def __init__(self, log: list[str]) -> None:
        self.device, self.log = 0, log

    def record(self, stream: Stream) -> None:
        self.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.log.append("the host waits")


class Stream:
    """Stands in for a stream of the device."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.device, self.name, self.log = 0, name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the event")


def test_copies_to_a_device_are_ordered_by_streams(monkeypatch):
    log: list[str] = []
    training, updating, here = Stream("training", log), Stream("updating", log), threading.local()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        here.stream = stream
        yield
        here.stream = training

    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(log))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(here, "stream", training))
    copied, looked = threading.Event(), threading.Event()

    def copy() -> None:
        log.append(f"copy on {here.stream.name}")

    with updating_on(updating, copy) as (begin, update, gate):
        finished = update._finished

        def held(chunk: Any) -> None:
            finished(chunk)
            copied.set()
            assert looked.wait(30)

        update._finished = held  # type: ignore[method-assign]
        gate.wait_for([0])
        assert not log
        begin()
        assert copied.wait(30)
        for _ in range(2):  # another reader may be on another stream
            gate.wait_for([0])
        looked.set()
        update.finish()
        gate.wait_for([0])
    assert log == [
        "updating waits for training",
        "copy on updating",
        "event on updating",
        *["training waits for the event"] * 2,
        "event on updating",
        "the host waits",
    ]


def test_copies_are_over_before_a_load_writes_weights(monkeypatch):
    log: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: Event(log))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("training", log))

    def fail() -> None:
        raise RuntimeError("made up")

    with updating_on(Stream("updating", log), fail) as (begin, update, gate):
        begin()
        with pytest.raises(VoidStepError, match="made up"):
            gate.wait_for([0])
        update.abandon()
        assert log[-1] == "the host waits"
        gate.wait_for([0])


@pytest.mark.gpu
def test_kernels_of_the_last_pass_see_old_weights_and_those_of_the_next_one_new_weights():
    weight, values = torch.zeros(2**20, device="cuda"), [torch.full((2**20,), float(n)).pin_memory() for n in (1, 2)]
    steps = iter(values)

    def copy_late() -> None:
        torch.cuda._sleep(SLEEP_CYCLES)
        weight.copy_(next(steps), non_blocking=True)

    with updating_on(torch.cuda.Stream(), copy_late) as (begin, update, gate):
        torch.cuda._sleep(1)  # kernels are loaded when they are first used, which waits for the device
        assert bool((weight.clone() == 0).all())
        torch.cuda._sleep(4 * SLEEP_CYCLES)  # longer than the update alone
        old = weight.clone()
        begin()
        gate.wait_for([0])
        new = weight.clone()
        assert not torch.cuda.current_stream().query(), "the host waits for the update, not for the device"
        assert bool((old == 0).all())
        assert bool((new == 1).all())
        begin()
        update.finish()
        with torch.cuda.stream(torch.cuda.Stream()):  # of a reader that has waited for the end of the step
            assert bool((weight.clone() == 2).all())
