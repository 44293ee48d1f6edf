# SPDX-License-Identifier: Apache-2.0
"""The update of those chunks of optimizer state that live in device memory: an
:class:`~tencache_ds.tiers.update.InPlaceKernel`.

Where a chunk's gradients and weights live there too, nothing is copied: all such chunks of a sub-group are updated in
one or two launches on the compute device's own stream. Of the others, gradients in host memory are copied to the device
and new weights back, chunk by chunk on streams beside it: 2 to 4 bytes per parameter in either direction, where the
host's update of the same chunk moves 28 over its memory bus.

Adam on optimizer state in device memory, and a step along the gradient where there are no moments: the table of its
places, and the kernels that update it.

A table says which elements of which tensors belong together. It is the same in every step until something changes its
place, so that a step costs one or two launches per sub-group, however many weights and chunks there are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch

from tencache_ds.errors import ConfigError, MemoryLimitError
from tencache_ds.layout import N_LANES
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.planning.adam_scalars import AdamScalars, DescentScalars
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.fused_adam import TYPES
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import EXP_AVG, EXP_AVG_SQ, MASTER
from tencache_ds.tiers.update import Pieces, SubGroupStep, WeightWriter

Launch = Callable[[AdamScalars | DescentScalars], None]
"""Updates the runs it was prepared for, which have moments or have none, on the current stream; returns before that is
done."""

Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Runs, and of each block its run and its first element there, on the device."""

VECTOR_NBYTES = 16
N_WARPS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie next to each other in every tensor.

    Attributes:
        master: to ``weight``: addresses of the first element's master weight, moments (0: there are none), gradient
            (0: it is zero) and weight (0: no rounded weight needed).
        numel: how many.
        n_tail: number of elements at the end that are the scalar tail of DeepSpeed's loop over the sub-group.
    """

    master: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    weight: int
    numel: int
    n_tail: int = 0


class TritonAdam:
    """The kernels for state in the memory of one device: :mod:`tencache_ds.ops.gpu_adam` on CUDA. Used by one thread.

    Args:
        device: where state, gradients and weights are.
        tail_contracted: whether DeepSpeed's op was compiled by a compiler that contracts its scalar tail.

    Raises:
        ConfigError: Triton is not available.
    """

    def __init__(self, device: torch.device, *, tail_contracted: bool) -> None:
        try:
            from tencache_ds.ops import gpu_adam
        except ImportError as error:
            raise ConfigError(f"Triton, which comes with torch's CUDA builds, cannot be imported ({error})") from error
        self._op = gpu_adam
        self._device = device
        self._tail_contracted = tail_contracted
        self._codes = {
            torch.float32: gpu_adam.FLOAT32.value,
            torch.bfloat16: gpu_adam.BFLOAT16.value,
            torch.float16: gpu_adam.FLOAT16.value,
        }

    def prepare(self, runs: Sequence[Run], gradient: torch.dtype, weight: torch.dtype) -> Launch:
        """Builds the updater of ``runs`` for every step. The caller keeps their tensors alive as long.

        Args:
            runs: in device memory; all of them have moments, or none.
            gradient: dtype of the gradients.
            weight: dtype of the weights.
        """
        whole: list[Run] = []
        partial: list[Run] = []
        for run in runs:
            numel = self._in_whole_blocks(run)
            if numel:
                whole.append(replace(run, numel=numel, n_tail=0))
            if numel < run.numel:
                partial.append(_from(run, numel, gradient, weight))
        tables = [(table, is_whole) for table, is_whole in ((whole, True), (partial, False)) if table]
        kind = self._adam if runs[0].exp_avg else self._descent
        launches = [
            kind(
                self._on_device(table),
                GRADIENT=self._codes[gradient],
                WEIGHT=self._codes[weight],
                WHOLE=is_whole,
                BLOCK=self._op.BLOCK_NUMEL,
                num_warps=N_WARPS,
                enable_fp_fusion=False,
            )
            for table, is_whole in tables
        ]

        def launch(scalars: Any) -> None:
            with torch.cuda.device(self._device):
                for each in launches:
                    each(scalars)

        return launch

    def _in_whole_blocks(self, run: Run) -> int:
        moments = (run.exp_avg, run.exp_avg_sq) if run.exp_avg else ()
        addresses = (run.master, *moments, run.gradient, run.weight)
        if any(address == 0 or address % VECTOR_NBYTES for address in addresses):
            return 0
        return (run.numel - run.n_tail) // self._op.BLOCK_NUMEL * self._op.BLOCK_NUMEL

    def _on_device(self, runs: Sequence[Run]) -> Table:
        fields = np.array([(*astuple(run)[:6], run.numel - run.n_tail) for run in runs], dtype=np.int64)
        n_blocks = -(-fields[:, 5] // self._op.BLOCK_NUMEL)
        block_run = np.repeat(np.arange(len(runs), dtype=np.int32), n_blocks)
        first_block = np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
        block_start = (np.arange(len(block_run), dtype=np.int64) - first_block) * self._op.BLOCK_NUMEL
        arrays = (fields, block_run, block_start)
        of_runs, of_blocks, starts = (torch.from_numpy(array).to(self._device) for array in arrays)
        return of_runs, of_blocks, starts

    def _adam(self, table: Table, **constants: Any) -> Launch:
        kernel, grid = self._op.adam_runs, (len(table[1]),)

        def launch(scalars: Any) -> None:
            kernel[grid](
                *table,
                scalars.scale,
                scalars.beta1,
                scalars.one_minus_beta1,
                scalars.beta2,
                scalars.one_minus_beta2,
                scalars.bias_correction2,
                scalars.eps,
                scalars.step_size,
                scalars.decay,
                DECAY=int(scalars.weight_decay),
                TAIL_CONTRACTED=self._tail_contracted,
                **constants,
            )

        return launch

    def _descent(self, table: Table, **constants: Any) -> Launch:
        kernel, grid = self._op.descent_runs, (len(table[1]),)

        def launch(scalars: Any) -> None:
            kernel[grid](*table, scalars.scale, scalars.retained, scalars.step, **constants)

        return launch


def _from(run: Run, first: int, gradient: torch.dtype, weight: torch.dtype) -> Run:
    """The elements of a run from ``first`` on."""

    def advanced(address: int, nbytes: int) -> int:
        return address + first * nbytes if address else 0

    return Run(
        advanced(run.master, 4),
        advanced(run.exp_avg, 4),
        advanced(run.exp_avg_sq, 4),
        advanced(run.gradient, gradient.itemsize),
        advanced(run.weight, weight.itemsize),
        run.numel - first,
        run.n_tail,
    )


Places = tuple[int, int, tuple[int, ...]]
Staged = tuple[torch.Tensor, torch.Tensor]
"""Part of a buffer, and the tensor elsewhere that it stands for."""


@dataclass(slots=True)
class _Prepared:
    """A sub-group's launch, for as long as nothing changes its place.

    Attributes:
        places: versions of the places of state and gradients, and the addresses of weights: the launch has those of
            all three.
        launch: updates the chunks; None where there are none.
        chunks: the chunks it updates.
    """

    places: Places
    launch: Launch | None
    chunks: list[Chunk]


class _Lane:
    """A stream of the device, and memory for gradients and weights on their way.

    Args:
        memory: of the device.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._stream = torch.cuda.Stream(memory.device) if memory.device.type == "cuda" else None
        self._buffers: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def issuing(self, since: torch.cuda.Event | None) -> Iterator[None]:
        """Within the block work is issued to the stream, behind an event of another one."""
        if self._stream is None:
            yield
            return
        if since is not None:
            self._stream.wait_event(since)
        with torch.cuda.stream(self._stream):
            yield

    def buffer(self, purpose: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory for a purpose, 1-D, which the lane's next chunk uses again; within :meth:`issuing`."""
        nbytes = numel * dtype.itemsize
        if purpose not in self._buffers or self._buffers[purpose].numel() < nbytes:
            self._buffers.pop(purpose, None)
            self._buffers[purpose] = self._memory.allocate(nbytes)
        return self._buffers[purpose][:nbytes].view(dtype)

    def event(self) -> torch.cuda.Event | None:
        """Behind everything issued so far; None where that is done."""
        return _record_event(self._stream)


class _DeviceJob:
    """A chunk whose update was issued: an :class:`~tencache_ds.tiers.update.UpdateJob`.

    Args:
        event: behind it.
        tensors: kept until it has ended.
    """

    match = True
    digest = b""

    def __init__(self, event: torch.cuda.Event | None, tensors: Any) -> None:
        self._event = event
        self._tensors = tensors
        self._end_ns = 0

    @property
    def end_ns(self) -> int:
        """See :attr:`UpdateJob.end_ns`: when that was noticed."""
        if not self._end_ns and (self._event is None or self._event.query()):
            self._end_ns = time.perf_counter_ns()
        return self._end_ns

    def wait(self, timeout_s: float) -> bool:
        """See :meth:`UpdateJob.wait`. However long the device takes."""
        if self._event is not None:
            self._event.synchronize()
        self._end_ns = self._end_ns or time.perf_counter_ns()
        return True

    def publish(self) -> None:
        """See :meth:`UpdateJob.publish`. The kernel wrote to all of them."""


class DeviceUpdate:
    """Used by one thread at a time.

    Args:
        adam: the kernel.
        width: elements per vector of DeepSpeed's CPU Adam: a sub-group's remainder is its scalar tail.
        memory: of the device.
        tier: master weights and moments.
        gradients: the accumulated gradients.
        writer: the weights.
    """

    def __init__(
        self,
        adam: TritonAdam,
        width: int,
        memory: DeviceMemory,
        tier: OptimizerStateTier,
        gradients: GradientTier,
        writer: WeightWriter,
    ) -> None:
        self._adam = adam
        self._width = width
        self._memory = memory
        self._tier = tier
        self._gradients = gradients
        self._writer = writer
        self._prepared: dict[int, _Prepared] = {}
        self._since: torch.cuda.Event | None = None
        self._lanes: list[_Lane] = []
        self._turn = 0
        self._launches: dict[tuple[int, int], tuple[Any, Launch]] = {}  # of single chunks, with their addresses

    # All chunks at once

    def start(self, step: SubGroupStep) -> frozenset[int]:
        """See :meth:`InPlaceKernel.start`."""
        if self._memory.device.type == "cuda":
            self._since = _record_event(torch.cuda.current_stream(self._memory.device))
        while True:
            prepared = self._prepared_for(step)  # allocates, for which chunks may have to leave
            with self._tier.holding_device():
                if prepared.places != self._places(step.sub_group):
                    continue
                if prepared.launch is not None:
                    prepared.launch(step.scalars)
                    self._writer.order_gathers()
                return frozenset(chunk.index for chunk in prepared.chunks)

    def _places(self, sub_group: int) -> Places:
        return (self._tier.version, self._gradients.version, self._writer.addresses(sub_group))

    def _prepared_for(self, step: SubGroupStep) -> _Prepared:
        self._tier.collect()
        places = self._places(step.sub_group)
        if self._gradients.any_replaced:
            return self._prepare(step.sub_group, step.start, places)  # for this step only
        prepared = self._prepared.get(step.sub_group)
        if prepared is None or prepared.places != places:
            prepared = self._prepared[step.sub_group] = self._prepare(step.sub_group, step.start, places)
        return prepared

    def _prepare(self, sub_group: int, start: int, places: Places) -> _Prepared:
        prepared = _Prepared(places, None, [])
        runs: list[Run] = []
        weight_dtype = None
        for chunk in self._tier.chunks(sub_group):
            if not self._tier.on_device(chunk) or self._writer.stored(chunk):
                continue
            gradients = self._gradients.pieces(start + chunk.start, chunk.numel)
            weights = self._writer.open(chunk)
            self._writer.close(chunk)
            dtype = _common_dtype(weights)
            if gradients is None or dtype is None or not self._all_there((*gradients, *weights)):
                continue
            weight_dtype = dtype
            runs += self._runs(chunk, gradients, weights)
            prepared.chunks.append(chunk)
        if weight_dtype is not None:
            prepared.launch = self._adam.prepare(runs, self._gradients.dtype, weight_dtype)
        return prepared

    def _all_there(self, pieces: Pieces) -> bool:
        return all(self._memory.holds(tensor) for _, tensor in pieces)

    def _runs(self, chunk: Chunk, gradients: Pieces, weights: Pieces) -> list[Run]:
        end, numel = chunk.start + chunk.numel, self._tier.numel(chunk.sub_group)
        n_tail = numel % self._width if end == numel else 0
        return list(_runs(self._tier.device_views(chunk), gradients, weights, chunk.numel, n_tail))

    # Chunk by chunk

    def start_chunk(self, step: SubGroupStep, chunk: Chunk, weights: Pieces) -> _DeviceJob | None:
        """See :meth:`InPlaceKernel.start_chunk`."""
        weight_dtype = _common_dtype(weights)
        if weight_dtype is None:
            return None
        gradients = self._gradients_of(step, chunk)
        lane = self._next_lane()
        with lane.issuing(self._since):
            try:
                here, staged_gradients = self._staged(gradients, lane, "gradients")
                targets, staged_weights = self._staged(weights, lane, "weights")
            except MemoryLimitError:
                return None
            while True:
                address = self._address_of(chunk)
                if address is None:
                    return None
                launch = self._launch_of(chunk, address, here, targets)  # allocates, for which chunks may have to leave
                with self._tier.holding_device(chunk):
                    if self._address_of(chunk) != address:
                        continue
                    for part, gradient in staged_gradients:
                        part.copy_(gradient, non_blocking=True)
                    launch(step.scalars)
                    for part, weight in staged_weights:
                        weight.copy_(part, non_blocking=True)
                return _DeviceJob(lane.event(), (gradients, weights))

    def _address_of(self, chunk: Chunk) -> int | None:
        """Of a chunk's state; None where it is not there any more."""
        return self._tier.device_views(chunk)[MASTER].data_ptr() if self._tier.on_device(chunk) else None

    def _gradients_of(self, step: SubGroupStep, chunk: Chunk) -> Pieces:
        """Where a chunk's gradients are: in as few tensors as possible, of one dtype."""
        start = step.start + chunk.start
        whole = self._gradients.view(start, chunk.numel)
        if whole is not None:
            return [(0, whole)]
        pieces = self._gradients.pieces(start, chunk.numel)
        return [(0, self._gradients.in_fp32(start, chunk.numel))] if pieces is None else pieces

    def _next_lane(self) -> _Lane:
        if not self._lanes:
            self._lanes = [_Lane(self._memory) for _ in range(N_LANES)]
        self._turn = (self._turn + 1) % N_LANES
        return self._lanes[self._turn]

    def _staged(self, pieces: Pieces, lane: _Lane, purpose: str) -> tuple[Pieces, list[Staged]]:
        """The pieces with a part of a lane's buffer in the place of each that is elsewhere, and those."""
        if self._all_there(pieces):
            return pieces, []
        first, last = pieces[-1]
        buffer = lane.buffer(purpose, first + last.numel(), last.dtype)
        here, staged = [], []
        for first, tensor in pieces:
            part = tensor
            if not self._memory.holds(tensor):
                part = buffer[first : first + tensor.numel()]
                staged.append((part, tensor))
            here.append((first, part))
        return here, staged

    def _launch_of(self, chunk: Chunk, address: int, gradients: Pieces, weights: Pieces) -> Launch:
        """A chunk's; prepared anew when something has another address."""
        tensors = [(first, tensor.data_ptr(), tensor.numel(), tensor.dtype) for first, tensor in (*gradients, *weights)]
        known = self._launches.get((chunk.sub_group, chunk.index))
        if known is not None and known[0] == (address, tensors):
            return known[1]
        launch = self._adam.prepare(self._runs(chunk, gradients, weights), gradients[0][1].dtype, weights[0][1].dtype)
        self._launches[chunk.sub_group, chunk.index] = (address, tensors), launch
        return launch


def _record_event(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """An event behind everything issued to a stream; to wait for it takes no processor."""
    if stream is None:
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def _common_dtype(weights: Pieces) -> torch.dtype | None:
    """That of the weights; None where they have several, or one that the kernel does not know."""
    dtypes = {weight.dtype for _, weight in weights}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= TYPES.keys() else None


def _runs(views: dict[str, torch.Tensor], gradients: Pieces, weights: Pieces, numel: int, n_tail: int) -> Iterator[Run]:
    """A chunk cut wherever its gradient or its weight ends and another tensor begins."""
    ends = {first + each.numel() for first, each in (*gradients, *weights)} | {first for first, _ in weights}
    cuts = sorted({0, numel} | ends)
    for first, end in zip(cuts, cuts[1:], strict=False):
        yield Run(
            _address(views[MASTER], first),
            _address(views.get(EXP_AVG), first),
            _address(views.get(EXP_AVG_SQ), first),
            gradient=_address_among(gradients, first),
            weight=_address_among(weights, first),
            numel=end - first,
            n_tail=max(0, end - max(first, numel - n_tail)),
        )


def _address(tensor: torch.Tensor | None, element: int) -> int:
    """Address of an element; 0 without a tensor."""
    return 0 if tensor is None else tensor.data_ptr() + element * tensor.element_size()


def _address_among(pieces: Pieces, element: int) -> int:
    """Address of an element in the tensor that holds it; 0 where none does."""
    for first, tensor in pieces:
        if first <= element < first + tensor.numel():
            return _address(tensor, element - first)
    return 0
