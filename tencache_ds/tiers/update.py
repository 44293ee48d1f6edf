# SPDX-License-Identifier: Apache-2.0
"""The optimizer step of sub-groups as a stream of chunks over kernels, which may continue behind the next forward pass.

Chunks in device memory are updated there: all at once where their gradients and weights are there too, otherwise one
after another beside the rest. That passes through host memory; while a kernel updates one, the next is awaited.

[Note: background] When DeepSpeed calls the optimizer, the gradient norm is known, and so are all other inputs of the
step; the remaining work is arithmetic and transfers. They follow the order in which the forward pass needs the weights,
and each weight is awaited by its own users at an :class:`~tencache_ds.tiers.update.UpdateGate`. The numbers are those
of a step that ends first.

[Note: gate] Blocks readers of a weight until its update is published, and no longer.

A weight's gradient is read by the same chunks, so the same gate keeps the next backward pass from overwriting it.

[Note: weights in GPU memory] Their new values are copied there on a stream of the update's own. It first waits for the
stream of the training as it is when the update begins: kernels of the last backward pass may still read the old values.
Whoever passes the gate has the current stream wait for the copies that have been issued by then. The thread that
updates waits for all of them before it ends, so nothing is left on the stream when :meth:`BackgroundUpdate.finish`
returns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.observability import spans
from tencache_ds.observability.counters import Counters, Stall
from tencache_ds.observability.spans import Category, span
from tencache_ds.planning.chunks import Chunk
from tencache_ds.runtime.step_guard import StepGuard
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.split_master import changed_unnoticed
from tencache_ds.tiers.sub_group import ChunkInUse

JOBS_AHEAD = 6
"""Chunks that may be queued behind the one under way where that holds no staging buffer: a team of threads never waits
for Python then."""

JOBS_LEFT = 2
"""When the queue is full, all but this many are awaited at once: each time this thread wakes up, the training thread
has to hand over the interpreter."""

STAGED_JOBS_AHEAD = 3
"""The same for chunks that hold staging buffers. A thread of the team that has no core for a moment, because an I/O
lane has it, delays its own block; with one chunk under way at a time, all others would wait for it."""

BUFFERS_OF_UPDATE = 0.25
"""At most this share of the staging buffers is queued: the others are for reads and writes."""

STARTED_ON_DEVICE = 2
"""Chunks in device memory that are started behind each one in host memory: it takes the thread a third of a millisecond
each, in which the host's kernel has something to do."""

AHEAD_ON_DEVICE = 16
"""Chunks that may be under way there. A stream takes a thousand operations before it makes the thread wait."""

JOB_TIMEOUT_S = 3600.0
"""A chunk takes milliseconds; where it takes this long, nothing else gets on either."""

Pieces = Sequence[tuple[int, torch.Tensor]]
"""``(first element in the chunk, 1-D tensor)``, ascending."""


@dataclass(frozen=True, slots=True)
class SubGroupStep:
    """One optimizer step of one sub-group.

    Attributes:
        sub_group: which one.
        start: its first element in the gradient buffer.
        number: of the step, from 1.
        scale: factor applied to gradients: a float or a 0-dim tensor.
        hyper: the hyper-parameters, an entry of ``optimizer.param_groups``.
        scalars: derived from all of the above: those of :mod:`tencache_ds.planning.adam_scalars` for its kernel.
        pow_step: the step from which on Adam's powers of the betas are multiplied.
    """

    sub_group: int
    start: int
    number: int
    scale: Any
    hyper: Mapping[str, Any]
    scalars: Any
    pow_step: int = 0


class WeightWriter(Protocol):
    """The model's weights, as an update of optimizer chunks sees them. Used by one thread."""

    def open(self, chunk: Chunk) -> Sequence[tuple[int, torch.Tensor]]:
        """Where the rounded master weights of a chunk go.

        Returns:
            ``(first element in the chunk, tensor)`` of each weight that the chunk has elements of, ascending; the
            tensors are 1-D, in the model's dtype, in host or device memory. :meth:`close` has to follow.
        """

    def close(self, chunk: Chunk) -> None:
        """The values are there, or on their way: in device memory when the current stream comes to this point. Whatever
        gathers them waits for that."""

    def order_gathers(self) -> None:
        """Whatever gathers weights in device memory from now on waits for what the current stream has been given."""

    def addresses(self, sub_group: int) -> tuple[int, ...]:
        """Where each weight of a sub-group lies now; 0 of one without memory of its own."""

    def stored(self, chunk: Chunk) -> bool:
        """Whether a weight that the chunk has elements of is on NVMe."""

    def holds_buffers(self, sub_group: int) -> bool:
        """Whether weights of a sub-group are open in staging buffers, of which there are few."""


class UpdateJob(Protocol):
    """The update of a chunk, under way. It keeps the tensors that it was given for as long as it needs them.

    Attributes:
        end_ns: when it ended, by ``time.perf_counter_ns()``; 0 until then.
        match: once it has ended, whether the weights were those of the digest.
        digest: then, that of the weights over which master weights are split now; empty for whole master weights.
    """

    @property
    def end_ns(self) -> int: ...

    @property
    def match(self) -> bool: ...

    @property
    def digest(self) -> bytes: ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within this number of seconds."""

    def publish(self) -> None:
        """Once it has ended: rounds into those weights that the kernel could not write to itself."""


class UpdateKernel(Protocol):
    """Updates chunks whose state is in host memory. Used by the training thread.

    Attributes:
        asynchronous: whether :meth:`start` returns before the chunk is updated. Otherwise it works on the calling
            thread, and nothing else is under way meanwhile.
    """

    @property
    def asynchronous(self) -> bool: ...

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Pieces) -> bool:
        """Whether it can update a chunk with these tensors; they are those of :meth:`start`."""

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Pieces,
        step: SubGroupStep,
        digest: bytes,
    ) -> UpdateJob | None:
        """Begins to update a chunk.

        Args:
            state: 1-D host tensor per kind of state, all of the chunk's length; updated in place.
            gradient: 1-D host tensor of that length, as it was accumulated; not changed.
            weights: of which the chunk has elements, in the model's dtype, in host or device memory; they get the
                rounded master weights.
            step: of the chunk's sub-group.
            digest: of the weights that its master weights are split over; empty for whole ones.

        Returns:
            The running job; None if it is done.
        """


class InPlaceKernel(Protocol):
    """Updates chunks where they live outside host memory. Used by one thread at a time."""

    def start(self, step: SubGroupStep) -> frozenset[int]:
        """A step of a sub-group begins: updates the chunks whose gradients and weights are there too. Later work on the
        current stream sees them updated. By the training thread.

        Returns:
            The indices of the chunks that are updated; those whose gradient was replaced at a higher precision are not.
        """

    def start_chunk(self, step: SubGroupStep, chunk: Chunk, weights: Pieces) -> UpdateJob | None:
        """Begins to update another chunk, whatever the place of its gradients and weights. Any thread, after
        :meth:`start`.

        Args:
            step: of its sub-group.
            chunk: which one.
            weights: see :meth:`UpdateKernel.start`.

        Returns:
            The running job; None of a chunk that has left device memory, or with weights of several dtypes, or where
            there is no device memory for gradients and weights on their way.
        """


Work = Sequence[tuple[SubGroupStep, Sequence[Chunk]]]
"""Chunks of sub-groups, in the order in which they are updated."""


@dataclass(frozen=True, slots=True)
class _Begun:
    """A chunk whose update is queued or under way."""

    used: ChunkInUse
    job: UpdateJob
    t_begin_ns: int


class ChunkedUpdate:
    """Streams the chunks of a sub-group over kernels. Used by one thread at a time.

    Args:
        tier: where master weights and moments live.
        gradients: the accumulated gradients.
        writer: where the model's weights get their new values.
        kernels: for state in host memory; a chunk goes to the first one that takes it.
        in_place: for chunks that live elsewhere; those it leaves are updated in a copy in host memory.
    """

    def __init__(
        self,
        tier: OptimizerStateTier,
        gradients: GradientTier,
        writer: WeightWriter,
        kernels: Sequence[UpdateKernel],
        in_place: InPlaceKernel | None = None,
    ) -> None:
        self._tier = tier
        self._gradients = gradients
        self._writer = writer
        self._kernels = tuple(kernels)
        self._in_place = in_place
        self._t_last_end_ns = 0  # of a chunk's update; kernels take one chunk after another

    def start_in_place(self, step: SubGroupStep) -> frozenset[int]:
        """Begins to update the chunks of a sub-group that stay where they are, outside host memory; returns their
        indices."""
        if self._in_place is None:
            return frozenset()
        with span(Category.UPDATE, "update::in_place", f"sub-group {step.sub_group}"):
            return self._in_place.start(step)

    def run(self, work: Work, finished: Callable[[Chunk], None] = lambda chunk: None) -> None:
        """Updates chunks; writes to NVMe may be under way afterwards.

        Args:
            work: chunks in the order of the pass over the tier that has begun.
            finished: called for each when its weights have their values.

        Raises:
            StorageError: a read failed, or an earlier write.
            TenCacheError: no kernel takes a chunk.
        """
        waiting = deque(
            (step, chunk)
            for step, chunks in work
            if not self._writer.holds_buffers(step.sub_group)
            for chunk in chunks
            if self._tier.on_device(chunk)
        )
        later = {chunk for _, chunk in waiting}
        begun: deque[_Begun] = deque()
        beside: deque[_Begun] = deque()
        try:
            for step, chunks in work:
                for chunk in chunks:
                    if chunk in later:
                        continue
                    self._begin(step, chunk, begun, beside, finished)
                    for _ in range(min(STARTED_ON_DEVICE, len(waiting))):
                        self._begin(*waiting.popleft(), begun, beside, finished)
                while begun:  # a few at a time: weights of the first ones may be waited for
                    self._finish_oldest(begun, finished, left=max(len(begun) - JOBS_AHEAD, 0))
            while waiting:
                self._begin(*waiting.popleft(), begun, beside, finished)
            while begun or beside:
                self._finish(begun or beside, finished)
        except BaseException:
            self._abandon([*begun, *beside])
            raise

    def _begin(
        self,
        step: SubGroupStep,
        chunk: Chunk,
        begun: deque[_Begun],
        beside: deque[_Begun],
        finished: Callable[[Chunk], None],
    ) -> None:
        """Begins the update of a chunk behind those that were begun, or, in device memory, ``beside`` them."""
        # Where weights are on NVMe, they hold staging buffers as well: two chunks at a time could wait for each other.
        alone = self._writer.holds_buffers(step.sub_group)
        while beside and (alone or beside[0].job.end_ns or len(beside) >= AHEAD_ON_DEVICE):
            self._finish(beside, finished)
        if self._in_place is not None and self._tier.on_device(chunk):
            if alone:
                self._finish_oldest(begun, finished)
            with span(Category.UPDATE, "update::start", name_of(chunk), chunk.nbytes):
                beside_job = self._in_place.start_chunk(step, chunk, self._writer.open(chunk))
            if beside_job is not None:
                beside.append(_Begun(ChunkInUse(chunk, {}), beside_job, time.perf_counter_ns()))
                return
        ahead, staged_ahead = (0, 0) if alone else (JOBS_AHEAD, self._staged_ahead())
        self._give_back_ended(begun, finished, waits=not self._tier.ready(chunk))
        used = self._tier.take(chunk, split=True)
        try:
            most, left = (staged_ahead, staged_ahead) if used.staged else (ahead, min(JOBS_LEFT, ahead))
            if len(begun) > most:
                self._finish_oldest(begun, finished, left=left)
            job = self._start(used, step, begun, finished)
        except BaseException:
            self._tier.drop(used)
            raise
        if job is None:
            self._tier.put(used)
            finished(chunk)
        else:
            begun.append(_Begun(used, job, time.perf_counter_ns()))

    def _staged_ahead(self) -> int:
        return min(STAGED_JOBS_AHEAD, int(BUFFERS_OF_UPDATE * self._tier.n_buffers))

    def _give_back_ended(self, begun: deque[_Begun], finished: Callable[[Chunk], None], *, waits: bool) -> None:
        """Writes chunks with staging buffers as soon as they are updated; all of them before this thread waits for a
        read, for which there may be no buffer before that."""
        while begun and begun[0].used.staged and (waits or begun[0].job.end_ns):
            self._finish(begun, finished)

    def _start(
        self, used: ChunkInUse, step: SubGroupStep, begun: deque[_Begun], finished: Callable[[Chunk], None]
    ) -> UpdateJob | None:
        """Begins the update of a chunk behind those that were begun; None where it is done."""
        chunk = used.chunk
        gradient = self._gradients.view(step.start + chunk.start, chunk.numel)
        if gradient is None:
            gradient = self._gradients.in_fp32(step.start + chunk.start, chunk.numel)
        weights = self._writer.open(chunk)
        for kernel in self._kernels:
            if not kernel.takes(used.views, gradient, weights):
                continue
            if not kernel.asynchronous:
                self._finish_oldest(begun, finished)
            with span(Category.UPDATE, "update::start", name_of(chunk), chunk.nbytes):
                job = kernel.start(used.views, gradient, weights, step, used.digest)
            if job is None:
                self._writer.close(chunk)
            return job
        dtypes = {kind: view.dtype for kind, view in used.views.items()}
        raise TenCacheError(f"no kernel updates chunk {chunk.sub_group}.{chunk.index} with state of {dtypes}")

    def _finish_oldest(self, begun: deque[_Begun], finished: Callable[[Chunk], None], left: int = 0) -> None:
        """Finishes all but the last ``left``."""
        if len(begun) > left:
            last = begun[len(begun) - left - 1]
            with span(Category.UPDATE, "update::wait", name_of(last.used.chunk), last.used.chunk.nbytes):
                last.job.wait(JOB_TIMEOUT_S)  # the others end before it, or almost
        while len(begun) > left:
            self._finish(begun, finished)

    def _finish(self, begun: deque[_Begun], finished: Callable[[Chunk], None]) -> None:
        """Finishes the oldest; until it has ended it stays among them, for :meth:`_abandon` after an interrupt."""
        ended, entry = begun[0].job.wait(JOB_TIMEOUT_S), begun.popleft()
        if not ended:
            raise TenCacheError(
                f"the update of chunk {entry.used.chunk.sub_group}.{entry.used.chunk.index} was not done after "
                f"{JOB_TIMEOUT_S:.0f} s: the optimizer threads get no CPU time"
            )
        self._record(entry)
        chunk = entry.used.chunk
        error = self._failure(entry)
        if error is not None:
            self._tier.drop(entry.used)
            raise error
        try:
            with span(Category.COPY, "copy::weights", name_of(chunk)):
                entry.job.publish()
            self._writer.close(chunk)
        except BaseException:
            with contextlib.suppress(StorageError):
                self._tier.put(entry.used)
            raise
        self._tier.put(entry.used)
        finished(chunk)

    def _record(self, entry: _Begun) -> None:
        """Adds a chunk's update to a trace, from when the one before was over."""
        recorder, chunk, t_end_ns = spans.recorder(), entry.used.chunk, entry.job.end_ns
        if recorder is not None:
            t_start_ns = min(max(entry.t_begin_ns, self._t_last_end_ns), t_end_ns)
            recorder.add(
                Category.UPDATE, "tencache::update::chunk", "update", t_start_ns, t_end_ns, name_of(chunk), chunk.nbytes
            )
        self._t_last_end_ns = t_end_ns

    def _abandon(self, begun: Iterable[_Begun]) -> None:
        """After an error: the memory must not be released while a kernel still writes to it."""
        for entry in begun:
            if not entry.job.wait(JOB_TIMEOUT_S) or self._failure(entry) is not None:
                self._tier.drop(entry.used)
                continue
            with contextlib.suppress(StorageError):
                self._tier.put(entry.used)

    @staticmethod
    def _failure(entry: _Begun) -> TenCacheError | None:
        """Why an update that has ended is void: the weights are not those it expected. If it is not, the chunk gets the
        digest of the new ones."""
        if not entry.job.match:
            return changed_unnoticed(entry.used.chunk)
        entry.used.digest = entry.job.digest
        return None


def name_of(chunk: Chunk) -> str:
    """A chunk as messages and traces call it."""
    return f"optimizer chunk {chunk.sub_group}.{chunk.index}"


def publish(writer: WeightWriter, chunk: Chunk, master: torch.Tensor) -> None:
    """Rounds a chunk's master weights (1-D) to the model's dtype and puts them where the weights live."""
    round_into(writer.open(chunk), master)
    writer.close(chunk)


def round_into(weights: Pieces, master: torch.Tensor) -> None:
    """Rounds a chunk's master weights (1-D) into the weights that it has elements of."""
    for first, weight in weights:
        weight.copy_(master[first : first + weight.numel()])


# Behind the next forward pass


TIMEOUT_S = 3600.0
"""An update of a chunk takes milliseconds; where a weight takes this long, nothing else gets on either."""

_NAMED = 2


class UpdateGate:
    """Opened by the thread that updates, awaited by any other.

    Args:
        counters: where waits are counted.
        guard: knows why an update has failed.
    """

    def __init__(self, counters: Counters, guard: StepGuard) -> None:
        self._counters = counters
        self._guard = guard
        self._changed = threading.Condition()
        self._chunks_left: Counter[int] = Counter()  # of each weight that is not up to date
        self._copied: torch.cuda.Event | None = None  # behind the copies to the device that were issued last
        self._failed = False

    def close(self, chunks: Iterable[Iterable[int]]) -> None:
        """An update is about to begin.

        Args:
            chunks: of each chunk the weights (keys) that it has elements of.
        """
        with self._changed:
            self._failed = False
            self._chunks_left = Counter(key for keys in chunks for key in keys)

    def updated(self, keys: Iterable[int], copied: torch.cuda.Event | None = None) -> None:
        """A chunk with elements of these weights has its new values, and its gradient is not needed any more.

        Args:
            keys: the weights.
            copied: an event behind the copies to the device so far, for those of them that are there.
        """
        with self._changed:
            self._copied = copied
            opened = False
            for key in keys:
                self._chunks_left[key] -= 1
                if not self._chunks_left[key]:
                    del self._chunks_left[key]
                    opened = True
            if opened:
                self._changed.notify_all()

    def copies_ended(self) -> None:
        """The device has all new values that were sent to it: streams need not wait any more."""
        self._copied = None

    def failed(self) -> None:
        """The update ended early, and the step is void: who waits for a weight that is left gets an error."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait_for(self, keys: Iterable[int]) -> None:
        """Returns when weights have their new values; at once if no update is under way. In the memory of a device
        they have them when its current stream comes to this point.

        Raises:
            VoidStepError: the update failed.
            TenCacheError: it takes too long.
        """
        if self._chunks_left:
            self._wait_for(keys)
        copied = self._copied
        if copied is not None:
            torch.cuda.current_stream(copied.device).wait_event(copied)

    def _wait_for(self, keys: Iterable[int]) -> None:
        with self._changed:
            wanted = [key for key in keys if key in self._chunks_left]
            if not wanted:
                return
            with self._counters.stall(Stall.UPDATE, _named(wanted)):
                ended = self._changed.wait_for(
                    lambda: self._failed or not any(key in self._chunks_left for key in wanted), TIMEOUT_S
                )
            if self._failed:
                self._guard.check()
            if not ended:
                raise TenCacheError(f"the optimizer step did not reach a weight within {TIMEOUT_S:.0f} s")


def _named(keys: Sequence[int]) -> str:
    """Weights, for traces; of many the first few."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(f"weight id {key}" for key in keys[:_NAMED]) + more


class BackgroundUpdate:
    """Runs one update at a time on a separate thread. Used by the training thread, except for :meth:`finish`.

    Args:
        update: of chunks, with exclusive use of their tiers while it runs.
        gate: opened weight by weight.
        guard: knows that the step is void if this update fails.
        keys_of: the weights (keys) that a chunk has elements of.
        counters: waits of the update are not those of the training.
        stream: for copies to weights in device memory, see [Note: weights in GPU memory]; None without such a device.
    """

    def __init__(
        self,
        update: ChunkedUpdate,
        gate: UpdateGate,
        guard: StepGuard,
        keys_of: Callable[[Chunk], Sequence[int]],
        counters: Counters,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._update = update
        self._gate = gate
        self._guard = guard
        self._keys_of = keys_of
        self._counters = counters
        self._stream = stream
        self._lock = threading.Lock()
        self._running: Future[None] | None = None
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tencache-update")

    @property
    def running(self) -> bool:
        """Whether an update was started and not yet waited for."""
        return self._running is not None

    def busy(self, seconds: float) -> bool:
        """Waits at most so long until nothing is under way; returns whether something still is. Any thread may call
        it."""
        running = self._running
        return running is not None and bool(wait([running], seconds).not_done)

    def begin(self, work: Work) -> None:
        """Starts an update; the one before must be finished. Weights keep their old values for what the current stream
        has been given so far."""
        self.finish()
        self._gate.close(self._keys_of(chunk) for _, chunks in work for chunk in chunks)
        self._guard.update_begins()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._running = self._executor.submit(self._run, work, self._counters.n_steps)

    def run_in_background(self, job: Callable[[], None]) -> None:
        """Runs something else with the tiers to itself, which changes nothing and raises no error: behind the update
        that is under way, whether that succeeds or not. No weight waits for it."""
        self._running = self._executor.submit(job)

    def finish(self) -> None:
        """Returns when nothing is under way. Any thread may call it, also without an update.

        Raises:
            VoidStepError: the update failed, or the step did before.
        """
        running = self._running
        if running is not None:
            if not running.done():
                with self._counters.stall(Stall.UPDATE, "the end of the optimizer step"):
                    wait([running])
            with self._lock:
                if self._running is running:
                    self._running = None
        self._guard.check()

    def abandon(self) -> None:
        """Weights and state are about to be replaced: nobody waits for those of the last update any more, which has
        ended, with or without an error."""
        if self._running is not None:
            wait([self._running])
        self._running = None
        self._gate.close(())

    def close(self) -> None:
        """Ends the thread, after the update that it is at. Idempotent."""
        self._executor.shutdown(wait=True)
        self._running = None

    def _run(self, work: Work, n_steps: int) -> None:
        try:
            with torch.no_grad(), self._counters.in_background(n_steps), self._copying():
                self._update.run(work, self._finished)
        except BaseException as error:
            self._guard.update_failed(error)
            self._gate.failed()
            raise
        self._guard.update_ended()

    @contextlib.contextmanager
    def _copying(self) -> Iterator[None]:
        """Within the block work for the device is issued to the update's stream, and is over when it ends, with an
        error too: what a load then writes must not be overwritten."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._issued().synchronize()
                self._gate.copies_ended()

    def _issued(self) -> torch.cuda.Event:
        """An event behind everything issued to the update's stream; to wait for it takes no processor."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def _finished(self, chunk: Chunk) -> None:
        self._gate.updated(self._keys_of(chunk), None if self._stream is None else self._issued())
