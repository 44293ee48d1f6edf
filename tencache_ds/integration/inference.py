# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed engines without optimizer, for evaluation and generation: staging buffers for weights on NVMe, and as many
weights in GPU memory as forward passes leave room for.

DeepSpeed makes a bare ``DeepSpeedZeRoOffload`` for them. See [Note: weights that stay gathered] in
:mod:`tencache_ds.integration.model_weights`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.config import TenCacheConfig
from tencache_ds.host_path import SuspendedHooks, finish_after_forward, install
from tencache_ds.integration import known_engines, stage3_building
from tencache_ds.integration.agreement import agree_on_weights, agreed
from tencache_ds.integration.coordinator import PassListener, TenCacheCoordinator
from tencache_ds.integration.engine_building import session_for
from tencache_ds.integration.hooked_modules import is_free, uncompiled
from tencache_ds.integration.known_engines import engines_for
from tencache_ds.integration.model_weights import GatheredWeights
from tencache_ds.integration.release import end_passes, finish_gathers, release_model
from tencache_ds.integration.reporting import announce
from tencache_ds.integration.stage3_building import outside_needs
from tencache_ds.memory.device_memory import DeviceMemory
from tencache_ds.placement.inference_homes import InferenceHomes
from tencache_ds.placement.moves import WeightMoves
from tencache_ds.runtime.session import Session


class InferenceWeights(GatheredWeights):
    """Weights that move between, and those not in use within, forward passes.

    Args:
        module: the model.
        coordinator: of its fetches.
    """

    def __init__(self, module: torch.nn.Module, coordinator: TenCacheCoordinator) -> None:
        # What DeepSpeed keeps gathered is in GPU memory already.
        every: Iterable[Any] = module.parameters()
        params = [param for param in every if not param.ds_persist]
        super().__init__(params, may_stay=coordinator.host_path.hooks)
        self._coordinator = coordinator
        self._full_nbytes = {param.ds_id: param.ds_numel * param.element_size() for param in params}
        self._element_nbytes = [param.element_size() for param in params] or [0]
        self._passing = -1, 0  # a version of the places, and the bytes that are gathered in each pass then
        self._fixed_nbytes = sum(self._full_nbytes.values())  # of those that would be so in any case
        if self.stay_gathered:
            self._fixed_nbytes -= sum(self._full_nbytes[shard.key] for shard in self.shards())

    def stays(self, param: Any) -> bool:
        """Also what DeepSpeed keeps gathered: no optimizer changes it."""
        return param.ds_persist or super().stays(param)

    def belongs_to_host(self, key: int) -> bool:
        """See :meth:`MovableWeights.belongs_to_host`."""
        return self._single or super().belongs_to_host(key)

    def most_gathered_nbytes(self, all_there: bool) -> int:
        """The most that DeepSpeed holds of weights that it gathers in each pass.

        Args:
            all_there: with all weights in GPU memory that can be there, instead of with those that are.
        """
        if self._passing[0] != self.version:
            passing = [key for key, param in self._params.items() if not self.stays(param)]
            self._passing = self.version, sum(self._full_nbytes[key] for key in passing)
        # A weight larger than DeepSpeed's limit is gathered all the same.
        limit_nbytes = self._coordinator.most_gathered_numel * max(self._element_nbytes)
        limit_nbytes = max(limit_nbytes, *self._full_nbytes.values(), 0)
        return min(self._fixed_nbytes if all_there else self._passing[1], limit_nbytes)

    def gathered_nbytes(self) -> int:
        """Bytes of weights that have been gathered in this pass and not released: DeepSpeed's own count."""
        return self._coordinator.gathered_numel * min(self._element_nbytes)

    def idle(self, key: int) -> bool:
        """Whether no module, gather or user has the weight now."""
        param = self._params[key]
        return is_free(param) and (param.ds_status is ZeroParamStatus.NOT_AVAILABLE or self.stays(param))


def complete(offload: Any, engine: Any, options: TenCacheConfig) -> None:
    """Gives DeepSpeed's ``offload`` of a model without optimizer a session (``offload.tencache``) and an end. Nothing
    happens where there is nothing to do: no weight on NVMe, and no GPU memory for the others.

    Args:
        offload: what DeepSpeed has made.
        engine: the ``DeepSpeedEngine``.
        options: of its config.

    Raises:
        ConfigError, StorageError, MemoryLimitError: staging buffers cannot be built.
    """
    module, coordinator = offload.module, offload.get_param_coordinator()
    engines = engines_for(module)
    memory = stage3_building.open_memory(options)
    weights = InferenceWeights(module, coordinator)
    used = agreed("whether GPU memory is used", memory is not None and bool(weights.shards()), all)
    if not engines and not used:
        return
    session = session_for(engines, engine._config, options)
    try:
        agree_on_weights(session.all(), module)
        session.build_staging([])
        homes = None
        if used and memory is not None:
            this = weakref.ref(engine)
            homes = _build_homes(session, memory, weights, coordinator, lambda: known_engines.beside(this()))
        section, shards = engine._config.zero_config.offload_param, weights.shards() if homes is not None else ()
        pinned = session.surroundings.on_cuda and section is not None and section.pin_memory
        session.plan_peak(
            outside_needs(module, options, pinned=pinned, movable=shards, memory=memory if homes is not None else None)
        )
    except BaseException:
        session.close()
        offload.destroy()
        raise
    offload.tencache, offload.gpu_homes = session, homes
    end_host_path = install(coordinator.host_path, offload, trains=False)
    suspended: SuspendedHooks | None = None
    if homes is not None:
        if weights.stay_gathered:
            suspended = SuspendedHooks(offload, weights, homes.relieve, trains=False)
        coordinator.follow(_InferencePasses(homes, suspended))
    hooks = _follow_passes(module, session, homes, suspended)
    hooks.append(finish_after_forward(module, coordinator.finish_gathers))
    stock_destroy = offload.destroy

    def destroy() -> None:
        if session.closed:
            return
        with contextlib.ExitStack() as stack:  # every step runs, whatever an earlier one raises
            stack.callback(release_model, module)
            stack.callback(session.close)
            stack.callback(stock_destroy)
            stack.callback(end_host_path)
            if homes is not None:
                stack.callback(homes.close)
            for hook in hooks:
                stack.callback(hook.remove)
            if suspended is not None:
                stack.callback(suspended.close)
            stack.callback(end_passes, module)
            stack.callback(finish_gathers, module, session.keep_memory)

    offload.destroy = destroy


class _InferencePasses(PassListener):
    def __init__(self, homes: InferenceHomes, suspended: SuspendedHooks | None) -> None:
        self._homes = homes
        self._suspended = suspended

    def backward_begins(self) -> None:
        if self._suspended is not None:
            self._suspended.begin_backward()

    def fetched(self, module: Any, forward: bool) -> None:
        self._homes.relieve()


def _build_homes(
    session: Session,
    memory: DeviceMemory,
    weights: InferenceWeights,
    coordinator: TenCacheCoordinator,
    beside_others: Callable[[], bool],
) -> InferenceHomes:
    moves = WeightMoves(memory, weights)

    def say(placement: str) -> None:
        session.note_placement(placement, None)
        announce(f"TenCache: {placement}", session.options)

    def note() -> None:
        session.note_gpu(weight_nbytes=moves.nbytes, gradient_nbytes=0, momentum_nbytes=0)

    return InferenceHomes(
        session.options,
        memory,
        weights.shards,
        moves,
        before_moves=coordinator.hide_unused,
        after_moves=note,
        idle=weights.idle,
        most_gathered_nbytes=weights.most_gathered_nbytes,
        gathered_nbytes=weights.gathered_nbytes,
        returns_alone=weights.belongs_to_host,
        beside_others=beside_others,
        agree=agreed,
        say=say,
    )


def _follow_passes(
    module: torch.nn.Module, session: Session, homes: InferenceHomes | None, suspended: SuspendedHooks | None
) -> list[Any]:
    """Hooks around each forward pass of the whole model."""

    def begin(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if homes is not None:
            homes.begin_pass(_tokens(module, args, kwargs))

    def end(*_: Any) -> None:
        session.pass_done()
        if homes is not None:
            homes.pass_done()
        if suspended is not None and homes is not None and homes.planned and not suspended.up_to_date:
            suspended.suspend()

    return [
        module.register_forward_pre_hook(uncompiled(begin), with_kwargs=True, prepend=True),
        module.register_forward_hook(uncompiled(end)),
    ]


def _tokens(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements of the main input, all sequences together: by its name in transformers, else the first tensor."""
    main = kwargs.get(getattr(module, "main_input_name", ""))
    for value in (main, kwargs.get("inputs_embeds"), *args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.shape[:2].numel()
    return 0
