# SPDX-License-Identifier: Apache-2.0
"""Adam in one pass: gradient, master weight, moments and 16-bit weight of a chunk, each touched once. And what is left
of an optimizer that has done the rest on gradients.

DeepSpeed's sequence is four passes (up-cast, unscale, Adam, round into the weights), each ended by a barrier of an
OpenMP team. Where ranks or other programs share the cores, every barrier waits for a thread that has none: two ranks
with a thread per core each took ten times as long as one. The team here has no barrier: see ``ops/csrc/update/team.h``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tencache_ds.errors import TenCacheError
from tencache_ds.planning.adam_scalars import AdamScalars
from tencache_ds.planning.chunks import SCALE_NUMEL
from tencache_ds.tiers.sub_group import (
    ADAM_IN_8_BITS,
    ADAM_IN_FP32,
    EXP_AVG,
    EXP_AVG_SQ,
    FIRST,
    FIRST_SCALE,
    MARKS,
    MASTER,
    MASTERS_ALONE,
    REMAINDER,
    SCALES_OF_8_BITS,
    SECOND,
    SECOND_SCALE,
    Pieces,
)

CHUNK_TIMEOUT_S = 600.0
"""A chunk is copied, split or joined in milliseconds; where it takes this long, nothing else gets on either."""

TYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Dtypes of gradients and weights that the op knows."""


class Job(Protocol):
    """An update under way."""

    @property
    def done(self) -> bool: ...

    @property
    def end_ns(self) -> int:
        """When it ended, by ``time.perf_counter_ns()``; 0 until then."""

    @property
    def match(self) -> bool:
        """Once it has ended: whether split master weights were split over the expected weights. Where not, the chunk is
        partly updated."""

    @property
    def digest(self) -> bytes:
        """Once it has ended: :meth:`FusedAdam.digest` of the weights that the master weights are split over now."""

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within this number of seconds; other Python threads run meanwhile."""


class FusedAdam:
    """Updates runs of elements on its own threads. Used by one thread.

    Args:
        n_threads: size of the team; a core each.

    Raises:
        ConfigError: the op cannot be built; names the missing part.
        TenCacheError: this processor lacks the vector instructions.
    """

    def __init__(self, n_threads: int) -> None:
        from tencache_ds.ops.tencache_update import load_tencache_update

        self._op = load_tencache_update()
        self.instructions, self._width = self._op.adam_variant()
        if not self._width:
            raise TenCacheError("this processor has neither AVX2 with FMA nor NEON")
        self._team = self._op.Team(n_threads)
        self._scalars: tuple[Any, Any] | None = None  # of the last job, and what the op makes of them

    @property
    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each kind of state that it updates."""
        return ADAM_IN_FP32

    @property
    def states(self) -> tuple[Mapping[str, torch.dtype], ...]:
        """Dtype of each kind of state of the chunks that it updates."""
        return (self.state_dtypes,)

    @property
    def width(self) -> int:
        """Elements per vector: the remainder modulo this is a sub-group's scalar tail."""
        return int(self._width)

    @property
    def tail_contracted(self) -> bool:
        """Whether that tail is contracted as GCC does it."""
        return bool(self._op.TAIL_CONTRACTED)

    @property
    def n_threads(self) -> int:
        """Size of the team."""
        return int(self._team.n_threads)

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Iterable[torch.Tensor]) -> bool:
        """Whether a chunk's state has its dtypes, and gradient and weights are of one dtype each that fits. Master
        weights that are split go with bfloat16 weights in host memory."""
        weights, split = list(weights), REMAINDER in state
        dtypes = {weight.dtype for weight in weights}
        if split:
            weights_fit = dtypes == {torch.bfloat16} and all(weight.device.type == "cpu" for weight in weights)
        else:
            weights_fit = len(dtypes) == 1 and dtypes <= TYPES.keys()
        needed = {kind: dtype for kind, dtype in self.state_dtypes.items() if not (split and kind == MASTER)}
        kinds_fit = {kind: view.dtype for kind, view in state.items()}.items() >= needed.items()
        return kinds_fit and weights_fit and gradient.dtype in TYPES

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Sequence[tuple[int, torch.Tensor]],
        scalars: AdamScalars,
        expected: bytes = b"",
    ) -> Job:
        """Begins the update of one chunk that it :meth:`takes`; returns before it is done.

        Args:
            state: master weights and moments, fp32, 1-D, of one length; updated in place. Or, in the place of master
                weights, their remainders: then ``weights`` cover all elements and hold the old values.
            gradient: 1-D of that length, in host memory.
            weights: ``(first element, tensor)`` of the weights that the chunk's elements belong to, 1-D in host memory,
                ascending; they get the rounded master weights. Elements that none covers are rounded nowhere.
            scalars: of the step.
            expected: :meth:`digest` of the weights that master weights were split over; empty: not compared.

        Returns:
            A job that must end before any of the tensors is used or released.
        """
        split = REMAINDER in state
        arrays = (*(state[kind] for kind in (REMAINDER if split else MASTER, EXP_AVG, EXP_AVG_SQ)), gradient)
        job: Job = self._team.adam(
            _runs(arrays, gradient.numel(), weights), *self._inputs(gradient, weights, scalars), split, expected
        )
        return job

    def _inputs(
        self, gradient: torch.Tensor, weights: Sequence[tuple[int, torch.Tensor]], scalars: AdamScalars
    ) -> tuple[str, str, int, Any]:
        """Types of the gradient and the weights, elements of the scalar tail, and the op's scalars."""
        # Where a sub-group ends, DeepSpeed's vector loop leaves a remainder to a scalar one, which rounds differently.
        # All other chunks are multiples of every vector's width.
        n_tail = gradient.numel() % self._width
        return TYPES[gradient.dtype], TYPES[weights[0][1].dtype], n_tail, self._as_op(scalars, self._op.AdamScalars)

    def _as_op(self, scalars: Any, kind: Any) -> Any:
        """The op's object of these scalars, which all chunks of a step share."""
        if self._scalars is None or self._scalars[0] is not scalars:
            self._scalars = scalars, kind(**dataclasses.asdict(scalars))
        return self._scalars[1]

    # Split master weights: integer arithmetic on their bits. ``whole`` and ``parts`` have a 1-D tensor per kind,
    # contiguous and in host memory: those of a chunk, and those of its split layout. ``weight`` is a bfloat16 tensor of
    # as many elements.

    def splits_exactly(
        self, whole: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor], weight: torch.Tensor
    ) -> bool:
        """Whether the master weights can be rebuilt; changes nothing."""
        return bool(self._team.splits_exactly(*self._masters(whole, parts, weight, whole)))

    def split(self, whole: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor], weight: torch.Tensor) -> Job:
        """Begins to fill the remainders, and to mark elements in the moments of ``parts`` or beside them."""
        job: Job = self._team.split(*self._masters(whole, parts, weight, parts))
        return job

    def join(self, whole: Mapping[str, torch.Tensor], parts: Mapping[str, torch.Tensor], weight: torch.Tensor) -> Job:
        """Begins to fill the master weights, and to take the marks from the moments of ``whole``."""
        job: Job = self._team.join(*self._masters(whole, parts, weight, whole))
        return job

    @staticmethod
    def _masters(
        whole: Mapping[str, torch.Tensor],
        parts: Mapping[str, torch.Tensor],
        weight: torch.Tensor,
        marked: Mapping[str, torch.Tensor],
    ) -> tuple[list[tuple[int, ...]], str, int]:
        """Arguments of the op: addresses, instructions, marks. Without marks, elements are marked in the signs of
        ``marked``."""
        marks = parts[MARKS].data_ptr() if MARKS in parts else 0
        squares = 0 if marks else marked[EXP_AVG_SQ].data_ptr()
        addresses = (array.data_ptr() for array in (whole[MASTER], parts[REMAINDER], weight))
        return [(*addresses, squares, weight.numel())], "", marks

    def digest(self, weights: Pieces) -> bytes:
        """A hash of the weights' bits, in parts; waits for it."""
        return bytes(self._team.digest([(weight.data_ptr(), weight.numel()) for _, weight in weights]))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes within host memory; both tensors are contiguous and of as many bytes.

        Raises:
            TenCacheError: it takes too long.
        """
        job: Job = self._team.copy(target.data_ptr(), source.data_ptr(), source.nbytes)
        if not job.wait(CHUNK_TIMEOUT_S):
            raise TenCacheError(
                f"a copy of {source.nbytes} bytes in host memory was not done after {CHUNK_TIMEOUT_S} s"
            )

    def close(self) -> None:
        """Waits for running jobs and ends the threads. Idempotent."""
        self._team.close()


class AdamAndDescent(FusedAdam):
    """Adam, and for chunks without moments a step along the gradient: what is left of Muon."""

    @property
    def states(self) -> tuple[Mapping[str, torch.dtype], ...]:
        """See :attr:`FusedAdam.states`."""
        return (*super().states, MASTERS_ALONE)

    def takes(self, state: Mapping[str, torch.Tensor], gradient: torch.Tensor, weights: Iterable[torch.Tensor]) -> bool:
        """See :meth:`FusedAdam.takes`."""
        if {kind: view.dtype for kind, view in state.items()} != MASTERS_ALONE:
            return super().takes(state, gradient, weights)
        dtypes = {weight.dtype for weight in weights}
        return len(dtypes) == 1 and dtypes | {gradient.dtype} <= TYPES.keys()

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Sequence[tuple[int, torch.Tensor]],
        scalars: Any,
        expected: bytes = b"",
        variant: str = "",
    ) -> Job:
        """See :meth:`FusedAdam.start`.

        Args:
            state: see there; or fp32 master weights alone.
            gradient: see there.
            weights: see there.
            scalars: of master weights alone, :class:`DescentScalars`.
            expected: see there.
            variant: instructions of a step along the gradient, for tests; empty for the widest of this processor.
        """
        if state.keys() != MASTERS_ALONE.keys():
            return super().start(state, gradient, weights, scalars, expected)
        master = state[MASTER]
        runs = _runs((master, master, master, gradient), gradient.numel(), weights)
        types = TYPES[gradient.dtype], TYPES[weights[0][1].dtype]
        job: Job = self._team.descent(runs, *types, self._as_op(scalars, self._op.DescentScalars), variant)
        return job


class BlockwiseAdam(FusedAdam):
    """Adam with bitsandbytes' 8-bit moments, in one pass and on threads of its own: 15 times as fast as its CPU kernel
    (one thread, AVX-512).

    Args:
        n_threads: size of the team; a core each.
        first: map of the first moment: 256 values, and the codes of 65536 equidistant values from -1 to 1.
        second: that of the second moment.
        square_root: addresses of the function by which torch computes square roots, and of the one that sets its
            threads; zeros for the nearest value.

    Raises:
        ConfigError, TenCacheError: see :class:`FusedAdam`.
    """

    def __init__(
        self,
        n_threads: int,
        first: tuple[list[float], bytes],
        second: tuple[list[float], bytes],
        square_root: tuple[int, int],
    ) -> None:
        super().__init__(n_threads)
        self._maps = self._op.BlockwiseMaps(*first, *second, *square_root)

    @property
    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """See :attr:`FusedAdam.state_dtypes`."""
        return ADAM_IN_8_BITS | SCALES_OF_8_BITS

    def start(
        self,
        state: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        weights: Sequence[tuple[int, torch.Tensor]],
        scalars: Any,
        expected: bytes = b"",
        variant: str = "",
    ) -> Job:
        """See :meth:`FusedAdam.start`.

        Args:
            state: fp32 master weights and uint8 moments, 1-D, of one length, and the moments' fp32 scales; the chunk
                begins where a scale does. Or, in the place of master weights, their remainders and marks: then
                ``weights`` cover all elements and hold the old values.
            gradient: see there.
            weights: see there.
            scalars: :class:`BlockwiseScalars`.
            expected: see there.
            variant: instructions, for tests; empty for the widest of this processor.
        """
        numel = gradient.numel()
        if state[FIRST_SCALE].numel() != -(-numel // SCALE_NUMEL):
            raise TenCacheError(f"{numel} elements with {state[FIRST_SCALE].numel()} scales cannot be updated")
        split = REMAINDER in state
        kinds = (REMAINDER if split else MASTER, FIRST, FIRST_SCALE, SECOND, SECOND_SCALE)
        arrays = (*(state[kind] for kind in kinds), gradient)
        job: Job = self._team.blockwise_adam(
            [array.data_ptr() for array in arrays],
            numel,
            [(start, weight.data_ptr(), weight.numel()) for start, weight in weights],
            TYPES[gradient.dtype],
            TYPES[weights[0][1].dtype],
            self._as_op(scalars, self._op.BlockwiseScalars),
            self._maps,
            state[MARKS].data_ptr() if split else 0,
            expected,
            variant,
        )
        return job


def _runs(
    arrays: Sequence[torch.Tensor], numel: int, weights: Sequence[tuple[int, torch.Tensor]]
) -> list[tuple[int, ...]]:
    """Addresses of all elements, in runs of one weight or none: of each array, of the weight, and their number."""
    position, runs = 0, []
    for start, weight in weights:
        if start > position:
            runs.append(_run(arrays, position, start - position, None))
        runs.append(_run(arrays, start, weight.numel(), weight))
        position = start + weight.numel()
    if position < numel:
        runs.append(_run(arrays, position, numel - position, None))
    return runs


def _run(arrays: Sequence[torch.Tensor], start: int, numel: int, weight: torch.Tensor | None) -> tuple[int, ...]:
    addresses = (array.data_ptr() + start * array.element_size() for array in arrays)
    return (*addresses, 0 if weight is None else weight.data_ptr(), numel)
