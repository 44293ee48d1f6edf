# SPDX-License-Identifier: Apache-2.0
"""Updates of chunks in host memory: :class:`~tencache_ds.tiers.update.UpdateKernel`, in one pass on the team's threads,
or by an optimizer's own arithmetic.

The latter lies between passes of torch's: up-cast and unscale the gradient, update
master weights and state, round into the weights. Such a pass leaves cores to the lanes that move its data.

An OpenMP region waits for its slowest thread. With a thread on every core, that is the one whose core a lane copies on:
on 16 cores with storage that costs CPU time (tmpfs), a pass over a chunk took four to thirty times as long with all
cores as with half of them (docs/benchmarks).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from threadpoolctl import ThreadpoolController

from tencache_ds.tensors import Scratch, empty
from tencache_ds.tiers.fused_adam import FusedAdam, Job
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER
from tencache_ds.tiers.update import Pieces, SubGroupStep, WeightWriter, publish, round_into


class _PinnedBuffers:
    """Pinned memory in which weights of device memory get their new values. torch's cache of such memory pinned new one
    for nearly every chunk, which takes 6 ms: an update of 0.25 s took twice as long. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._free: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()

    def take(self, nbytes: int) -> torch.Tensor:
        """One of at least that size (uint8): the one given back first, if the device is done with it."""
        if self._free and self._free[0][1].query():
            buffer, _ = self._free.popleft()
            if buffer.numel() >= nbytes:
                return buffer
        return empty(nbytes, torch.uint8, pinned=True)

    def give_back(self, buffer: torch.Tensor) -> None:
        """It can be used again when the current stream gets to this point."""
        event = torch.cuda.Event()
        event.record()
        self._free.append((buffer, event))


@dataclass(frozen=True, slots=True)
class _FusedJob:
    """A chunk whose update is queued or under way.

    Attributes:
        job: its update.
        gradient: kept, because the job has only its address.
        copy_rounded: copies the new values of weights in device memory there, on the current stream. Once.
    """

    job: Job
    gradient: torch.Tensor
    copy_rounded: Callable[[], None]

    @property
    def end_ns(self) -> int:
        """See :attr:`UpdateJob.end_ns`."""
        return self.job.end_ns

    @property
    def match(self) -> bool:
        """See :attr:`UpdateJob.match`."""
        return self.job.match

    @property
    def digest(self) -> bytes:
        """See :attr:`UpdateJob.digest`."""
        return self.job.digest

    def wait(self, timeout_s: float) -> bool:
        """See :meth:`UpdateJob.wait`."""
        return self.job.wait(timeout_s)

    def publish(self) -> None:
        """See :meth:`UpdateJob.publish`."""
        self.copy_rounded()


class FusedUpdate:
    """Takes state in single precision with weights of one dtype.

    Args:
        adam: the arithmetic and its team.
    """

    asynchronous = True

    def __init__(self, adam: FusedAdam) -> None:
        self._adam = adam
        self._buffers = _PinnedBuffers()

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Pieces) -> bool:
        """See :meth:`UpdateKernel.takes`."""
        return self._adam.takes(state, gradient, (weight for _, weight in weights))

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Pieces,
        step: SubGroupStep,
        digest: bytes,
    ) -> _FusedJob:
        """See :meth:`UpdateKernel.start`."""
        targets, copy_rounded = self._in_host_memory(weights)
        return _FusedJob(self._adam.start(state, gradient, targets, step.scalars, digest), gradient, copy_rounded)

    def _in_host_memory(self, weights: Pieces) -> tuple[Pieces, Callable[[], None]]:
        """Where the new values of weights go; and what copies those of weights in device memory there."""
        nbytes = sum(weight.nbytes for _, weight in weights if weight.device.type != "cpu")
        if not nbytes:
            return weights, _nothing
        buffer, start = self._buffers.take(nbytes), 0
        targets, rounded = [], []
        for first, weight in weights:
            target = weight
            if weight.device.type != "cpu":
                target = buffer[start : start + weight.nbytes].view(weight.dtype)
                start += weight.nbytes
                rounded.append((weight, target))
            targets.append((first, target))

        def copy_rounded() -> None:
            for weight, value in rounded:
                weight.copy_(value, non_blocking=True)
            self._buffers.give_back(buffer)

        return targets, copy_rounded


def _nothing() -> None: ...


SMALLEST_SHARED_CORES = 4
"""Below this a core is worth more to the arithmetic than to the lanes, which mostly wait for the disk."""


def cores_for_arithmetic(threads: int, cores: int, *, streamed: bool) -> int:
    """Threads to use for arithmetic.

    Args:
        threads: OpenMP threads this process would use.
        cores: cores of the host that this rank may use.
        streamed: lanes move the data meanwhile.
    """
    share = min(threads, cores)
    return share // 2 if streamed and share >= SMALLEST_SHARED_CORES else share


class CpuShare:
    """Limits the OpenMP threads of the calling thread: torch's and those of DeepSpeed's CPU optimizers."""

    def __init__(self) -> None:
        self._controller: ThreadpoolController | None = None

    @contextmanager
    def limited(self, threads: int) -> Iterator[None]:
        """At most ``threads`` OpenMP threads within the block; restores the previous number."""
        if self._controller is None:  # looked up late: DeepSpeed's ops bring their own OpenMP library
            self._controller = ThreadpoolController().select(user_api="openmp")
        with self._controller.limit(limits=threads):
            yield


class ArithmeticCores:
    """Limits arithmetic on a sub-group to this rank's cores, with some left to the I/O lanes while chunks are streamed.

    Args:
        cores: of the host that this rank may use.
        streamed: whether lanes move a sub-group's state meanwhile.
    """

    def __init__(self, cores: int, streamed: Callable[[int], bool]) -> None:
        self._cores = cores
        self._streamed = streamed
        self._share = CpuShare()

    def limited(self, sub_group: int) -> AbstractContextManager[None]:
        """See :meth:`CpuShare.limited`."""
        streamed = self._streamed(sub_group)
        return self._share.limited(cores_for_arithmetic(torch.get_num_threads(), self._cores, streamed=streamed))


class ChunkOp(Protocol):
    """An optimizer on a run of elements, from outside. Used by the training thread."""

    def load(self) -> None:
        """Loads its dependencies, if necessary."""

    def __call__(self, step: SubGroupStep, state: Mapping[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Updates master weights and moments in place; all 1-D host tensors, the gradient unscaled."""


class UnfusedUpdate:
    """An :class:`~tencache_ds.tiers.update.UpdateKernel` that takes every chunk.

    Args:
        op: the arithmetic.
        cores: limits the threads of each pass.
        scratch: for the up-cast gradient.
    """

    asynchronous = False

    def __init__(self, op: ChunkOp, cores: ArithmeticCores, scratch: Scratch) -> None:
        self._op = op
        self._cores = cores
        self._scratch = scratch

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Pieces) -> bool:
        """See :meth:`UpdateKernel.takes`."""
        return True

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Pieces,
        step: SubGroupStep,
        digest: bytes,
    ) -> None:
        """See :meth:`UpdateKernel.start`."""
        self._op.load()  # with the OpenMP library that is limited below
        with self._cores.limited(step.sub_group):
            master = state[MASTER]
            unscaled = self._scratch.take(master.numel(), master.dtype).copy_(gradient)
            _multiply(unscaled, step.scale)
            self._op(step, state, unscaled)
            round_into(weights, master)


class WholeUpdate:
    """Any optimizer, through its own ``step()``, with a sub-group's whole state in host memory for as long. Used by the
    training thread.

    Args:
        tier: where master weights and states live.
        gradients: the accumulated gradients.
        writer: where the model's weights get their new values.
        cores: limits the threads of each pass.
        scratch: for gradients.
    """

    def __init__(
        self,
        tier: OptimizerStateTier,
        gradients: GradientTier,
        writer: WeightWriter,
        cores: ArithmeticCores,
        scratch: Scratch,
    ) -> None:
        self._tier = tier
        self._gradients = gradients
        self._writer = writer
        self._cores = cores
        self._scratch = scratch

    def run(
        self,
        sub_group: int,
        start: int,
        scale: Any,
        state: AbstractContextManager[torch.Tensor],
        step: Callable[[], None],
    ) -> None:
        """Updates a sub-group.

        Args:
            sub_group: which one.
            start: its first element in the gradient buffer.
            scale: factor applied to gradients: a float or a 0-dim tensor.
            state: gives the parameter that the optimizer updates: 1-D, the sub-group's master weights; takes them, and
                the states that belong to it, back at its end.
            step: has the optimizer update that parameter from its ``grad``.
        """
        with self._cores.limited(sub_group):
            with state as parameter:
                parameter.grad = self._gradient(sub_group, start, parameter)
                _multiply(parameter.grad, scale)
                step()
                master = parameter.data
            for chunk in self._tier.chunks(sub_group):
                publish(self._writer, chunk, master[chunk.start : chunk.start + chunk.numel])

    def _gradient(self, sub_group: int, start: int, like: torch.Tensor) -> torch.Tensor:
        """The sub-group's gradient in the master weights' dtype; the accumulation buffer itself where that has it."""
        view = self._gradients.view(start, like.numel())
        if view is not None and view.dtype == like.dtype:
            return view  # not read once the step is done
        whole = self._tier.whole(sub_group)
        gradient = self._scratch.take(like.numel(), like.dtype) if whole else torch.empty_like(like)
        self._gradients.fill(gradient, start)
        return gradient


def _multiply(gradient: torch.Tensor, scale: Any) -> None:
    if not (isinstance(scale, float) and scale == 1.0):
        gradient.mul_(scale)
