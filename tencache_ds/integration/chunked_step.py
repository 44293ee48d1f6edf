# SPDX-License-Identifier: Apache-2.0
"""An optimizer step by chunks: first those whose weights may be used without a wait when it returns, then the others,
during the next forward pass.

A partitioned weight is not used before DeepSpeed gathers it, and every gather passes :func:`wait_for_updates`; for a
weight that stays gathered in GPU memory its modules wait. Its gradient is not overwritten before
:meth:`ChunkedStep.wait_for_gradients`. Everything else that reads or changes weights, gradients or state calls
:meth:`ChunkedStep.finish` first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.hooked_modules import uncompiled
from tencache_ds.integration.model_weights import ModelWeights
from tencache_ds.integration.watched_tensors import WatchedStates, updated, watch_update
from tencache_ds.planning.chunks import Chunk
from tencache_ds.runtime.session import Session
from tencache_ds.runtime.step_guard import StepGuard
from tencache_ds.tiers.fused_adam import TYPES
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.update import BackgroundUpdate, ChunkedUpdate, SubGroupStep, UpdateGate, Work

logger = logging.getLogger("DeepSpeed.tencache")

_GATE_ATTRIBUTE = "tencache_update_gate"
_GUARD_ATTRIBUTE = "tencache_step_guard"


@uncompiled
def wait_for_updates(params: Sequence[Any]) -> None:
    """Returns when parameters that are about to be gathered, or shown, have their new values; on a device, when its
    current stream comes to this point.

    Raises:
        TenCacheError: their update failed.
        VoidStepError: the last step has left them with values of two steps.
    """
    refuse_void_weights(params)
    by_gate: dict[UpdateGate, list[int]] = {}
    for param in params:
        gate = getattr(param, _GATE_ATTRIBUTE, None)
        if gate is not None:
            by_gate.setdefault(gate, []).append(param.ds_id)
    for gate, keys in by_gate.items():
        gate.wait_for(keys)
    if by_gate:
        updated(params)


def refuse_void_weights(params: Iterable[Any]) -> None:
    """Called where weights are about to be used that may be gathered already.

    Raises:
        VoidStepError: the last step has left them with values of two steps.
    """
    for guard in {guard for param in params if (guard := getattr(param, _GUARD_ATTRIBUTE, None)) is not None}:
        guard.check()


@contextlib.contextmanager
def guarding_weights(params: Sequence[Any], guard: StepGuard) -> Iterator[None]:
    """Around the building of an engine: from now on its guard knows whether these parameters may be used. A void step
    of an earlier engine is not in the way, and stays void; an engine that cannot be built leaves the guards as they
    were."""
    formers = [getattr(param, _GUARD_ATTRIBUTE, None) for param in params]
    for param in params:
        setattr(param, _GUARD_ATTRIBUTE, guard)
    try:
        yield
    except BaseException:
        for param, former in zip(params, formers, strict=True):
            if former is None:
                delattr(param, _GUARD_ATTRIBUTE)
            else:
                setattr(param, _GUARD_ATTRIBUTE, former)
        raise
    for former in {former for former in formers if former is not None}:
        guard.inherit(former)


def unguard_weights(params: Sequence[Any], guard: StepGuard) -> None:
    """Their engine ends: a void step stays with its weights, which may get another engine."""
    for param in params:
        if not guard.void and param.__dict__.get(_GUARD_ATTRIBUTE) is guard:
            delattr(param, _GUARD_ATTRIBUTE)


def wait_for_state_dict(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
    """A hook of ``state_dict()``, which shows weights that are gathered. A function, which ``copy.deepcopy(model)``
    does not copy."""
    params: list[Any] = list(module.parameters())
    refuse_void_weights(params[:1])  # all weights of a model have one guard
    wait_for_updates([param for param in params if getattr(param, "ds_status", None) is ZeroParamStatus.AVAILABLE])


def hook_stepping(engine_class: Any) -> None:
    """Makes a step of engines with TenCache's optimizer whole or void up to its last count: see [Note: whole or void]
    in :mod:`tencache_ds.runtime.step_guard`."""
    stock_step, stock_model_step = engine_class.step, engine_class._take_model_step

    @functools.wraps(stock_step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = getattr(self.optimizer, "step_guard", None)
        if guard is not None and not self.is_gradient_accumulation_boundary():
            guard.check()  # a micro-step that updates nothing
        return stock_step(self, *args, **kwargs)

    @functools.wraps(stock_model_step)
    def _take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard = getattr(self.optimizer, "step_guard", None)
        with contextlib.nullcontext() if guard is None else guard.step():
            return stock_model_step(self, *args, **kwargs)

    engine_class.step, engine_class._take_model_step = step, _take_model_step


class ChunkedStep:
    """The optimizer steps of one DeepSpeed engine, as far as they are by chunks. Used by the training thread.

    Args:
        optimizer: the torch optimizer that DeepSpeed wraps.
        groups: the parameters of each sub-group.
        session: counts, and ends the step that is under way when it is closed.
        state: the optimizer's state.
        gradients: the accumulated gradients.
        weights: the model's weights.
        update: of chunks.
        guard: knows whether the last step is void.
        overlaps: dtypes of the chunks' kinds of state whose update may continue after a step has returned.
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Sequence[Sequence[Any]],
        session: Session,
        state: OptimizerStateTier,
        gradients: GradientTier,
        weights: ModelWeights,
        update: ChunkedUpdate,
        guard: StepGuard,
        *,
        overlaps: Sequence[Mapping[str, torch.dtype]],
    ) -> None:
        self._optimizer = optimizer
        self._groups = groups
        self._state = state
        self._gradients = gradients
        self._weights = weights
        self._update = update
        self._background: BackgroundUpdate | None = None
        self._later: Sequence[Sequence[Chunk]] = [() for _ in groups]  # of each sub-group, in this step
        self._work: list[tuple[SubGroupStep, Sequence[Chunk]]] = []
        self._may_wait: tuple[Any, Sequence[Sequence[Chunk]]] | None = None
        self._order: dict[Chunk, tuple[int, int]] = {}
        """Of chunks that may wait: ascends as the model defines their weights, which is how the next forward pass needs
        them in general. Groups of parameters have another order: Muon's are sorted by size, with embeddings last."""
        self.gate: UpdateGate | None = None
        """Of the weights; None where no step continues."""
        self._overlaps = overlaps
        if overlaps:
            self.gate = UpdateGate(session.counters, guard)
            stream = get_accelerator().Stream() if session.surroundings.on_cuda else None
            self._background = BackgroundUpdate(update, self.gate, guard, weights.keys_of, session.counters, stream)
            session.overlap(self._background)
            for param in itertools.chain.from_iterable(groups):
                setattr(param, _GATE_ATTRIBUTE, self.gate)

    # A step

    def begin(self) -> None:
        """A step begins: starts the pass over the state."""
        self._work = []
        self._state.collect()
        chunks = self._all_chunks()
        # A gradient that was replaced is not in the buffer any more when the next backward pass begins.
        overlaps = self._background is not None and not self._gradients.any_replaced
        self._later = self._chunks_that_may_wait(chunks) if overlaps else [() for _ in chunks]
        if not any(self._later):
            self._state.begin_pass(itertools.chain.from_iterable(chunks))
            return
        later = set(itertools.chain.from_iterable(self._later))
        now = [chunk for chunk in itertools.chain.from_iterable(chunks) if chunk not in later]
        self._state.begin_pass([*now, *sorted(itertools.chain.from_iterable(self._later), key=self._order.__getitem__)])

    def update(self, step: SubGroupStep) -> None:
        """Updates a sub-group; after the last one, the chunks that may wait are updated in the background.

        Raises:
            StorageError: a read failed, or an earlier write.
        """
        in_place = self._update.start_in_place(step)
        later = [chunk for chunk in self._later[step.sub_group] if chunk.index not in in_place]
        elsewhere = in_place | {chunk.index for chunk in later}
        chunks = self._state.chunks(step.sub_group)
        self._update.run([(step, [chunk for chunk in chunks if chunk.index not in elsewhere])])
        if later:
            self._work.append((step, later))
        if self._background is not None and self._work and step.sub_group == len(self._groups) - 1:
            work, self._work = self._in_order_of_model(self._work), []
            if not isinstance(self._optimizer.state, WatchedStates):  # loading a state dict replaces it
                self._optimizer.state = WatchedStates(self._optimizer.state, self.finish)
            self._watch_shards(work)
            self._background.begin(work)

    def run_in_background(self, job: Callable[[], None]) -> None:
        """Runs what reads the state and raises no error: where steps overlap training, on their thread, and until it
        has ended :meth:`finish` waits for it."""
        if self._background is None:
            job()
        else:
            self._background.run_in_background(job)

    def finish(self) -> None:
        """Returns when nothing is under way. Any thread may call it.

        Raises:
            VoidStepError: the last step has failed half-way.
        """
        if self._background is not None:
            self._background.finish()

    def abandon(self) -> None:
        """A checkpoint is about to be loaded: nobody waits for the values of the last step any more."""
        if self._background is not None:
            self._background.abandon()

    def wait_for_gradients(self, params: Iterable[Any]) -> None:
        """Returns when the gradients of the last step are not needed any more; any thread.

        Raises:
            TenCacheError: the update failed.
        """
        if self.gate is not None:
            self.gate.wait_for(param.ds_id for param in params)

    def close(self) -> None:
        """Finishes the current step; after that, nothing waits for this engine's steps. Idempotent."""
        for param in itertools.chain.from_iterable(self._groups):
            param.__dict__.pop(_GATE_ATTRIBUTE, None)
        if self._background is None:
            return
        try:
            self._background.finish()
        except TenCacheError:
            logger.exception("the last optimizer step did not end")
        self._background.close()
        updated(itertools.chain.from_iterable(self._groups))
        if isinstance(self._optimizer.state, WatchedStates):
            self._optimizer.state = self._optimizer.state.plain()

    def hidden_share(self) -> float:
        """The share of the update outside device memory that overlaps the next forward pass."""
        if self._background is None:
            return 0.0
        chunks = self._all_chunks()
        later, total = (
            sum(chunk.numel for group in groups for chunk in group if not self._state.on_device(chunk))
            for groups in (self._chunks_that_may_wait(chunks), chunks)
        )
        return later / total if total else 0.0

    # Mechanics

    def _in_order_of_model(self, work: Work) -> Work:
        """The same chunks in the order of :attr:`_order`."""
        each = [(step, chunk) for step, chunks in work for chunk in chunks]
        each.sort(key=lambda pair: self._order[pair[1]])
        runs = (list(run) for _, run in itertools.groupby(each, key=lambda pair: pair[0].sub_group))
        return [(run[0][0], [chunk for _, chunk in run]) for run in runs]

    def _watch_shards(self, work: Work) -> None:
        """Watches the shards of the weights that are about to be updated in the background."""
        keys = {key for _, chunks in work for chunk in chunks for key in self._weights.keys_of(chunk)}
        params = (param for param in itertools.chain.from_iterable(self._groups) if param.ds_id in keys)
        watch_update(params, wait_for_updates)

    def _all_chunks(self) -> list[tuple[Chunk, ...]]:
        return [self._state.chunks(index) for index in range(len(self._groups))]

    def _chunks_that_may_wait(self, chunks: Sequence[Sequence[Chunk]]) -> Sequence[Sequence[Chunk]]:
        """Chunks, by sub-group, that threads of their own update, and whose weights nobody uses without a wait."""
        in_use = self._weights.in_use()
        key = (in_use, self._state.version)
        if self._may_wait is None or self._may_wait[0] != key:
            candidates = []
            for index, group in enumerate(chunks):
                dtypes = {kind: self._state.dtype(index, kind) for kind in self._state.kinds(index)}
                weights = {param.ds_tensor.dtype for param in self._groups[index]}
                fits = dtypes in self._overlaps and weights <= TYPES.keys()
                candidates.append(
                    [chunk for chunk in group if fits and in_use.isdisjoint(self._weights.keys_of(chunk))]
                )
            self._may_wait = key, candidates
            self._order = {
                chunk: (min(self._weights.keys_of(chunk), default=0), chunk.index)  # of padding alone: none
                for chunk in itertools.chain.from_iterable(candidates)
            }
        return self._may_wait[1]
