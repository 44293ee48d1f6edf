# SPDX-License-Identifier: Apache-2.0
"""Updates with an optimizer's own arithmetic, between passes of torch's: up-cast and unscale the gradient, update
master weights and state, round into the weights. Such a pass leaves cores to the lanes that move its data.

An OpenMP region waits for its slowest thread. With a thread on every core, that is the one whose core a lane copies on:
on 16 cores with storage that costs CPU time (tmpfs), a pass over a chunk took four to thirty times as long with all
cores as with half of them (docs/benchmarks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from threadpoolctl import ThreadpoolController

from tencache_ds.tensors import empty
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.kinds import MASTER
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.update import Pieces, SubGroupStep, WeightWriter, publish, round_into

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


class Scratch:
    """Ordinary host memory for one gradient at a time."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D tensor, valid until the next call; its contents are undefined."""
        if self._memory is None or self._memory.numel() < numel or self._memory.dtype != dtype:
            self._memory = empty(numel, dtype)
        return self._memory[:numel]


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
