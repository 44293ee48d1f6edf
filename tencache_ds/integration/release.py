# SPDX-License-Identifier: Apache-2.0
"""What is handed back: GPU memory on request, and references to a model at the end of its engine.

[Note: on request] While another program generates on the card, for example: DeepSpeed's
``engine.offload_states()`` and ``engine.reload_states()``, and :func:`tencache_ds.release_gpu_memory`.

Stock DeepSpeed refuses both where ``offload_param`` is set. Here everything that TenCache keeps in GPU memory leaves
it, and DeepSpeed's own buffer of gradients; weights that the config leaves there (no ``offload_param``) stay. Training
goes on with the same bits, also before the memory is taken again. All ranks call it at the same time, between two
micro-steps, as DeepSpeed asks for.

[Note: references] Weights live as long as their model. An unreferenced model must be freed, so DeepSpeed's own
references to it are removed with its engine.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from types import TracebackType
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.debug import debug_clear_module_and_param_names

from tencache_ds.errors import ConfigError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.hooked_modules import is_free
from tencache_ds.placement.gpu_homes import GpuHomes
from tencache_ds.placement.inference_homes import InferenceHomes

logger = logging.getLogger("DeepSpeed.tencache")

_STATE = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_grads)


class ReleasedMemory:
    """GPU memory of one engine that was handed back; taken again behind a ``with`` block, or by :meth:`take_again`.

    Attributes:
        nbytes: of what has left.
    """

    def __init__(self, engine: Any) -> None:
        if not _has_homes(engine.optimizer):
            raise ValueError(
                'this engine keeps its optimizer state in GPU memory: its config has no "offload_optimizer". '
                'engine.offload_states() moves it where it has no "offload_param" either'
            )
        self._engine = engine
        self.nbytes = _hand_back(engine, None)

    def __enter__(self) -> ReleasedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.take_again()

    def take_again(self) -> None:
        """The engine keeps data in GPU memory again. Idempotent; so is ``engine.reload_states()``."""
        _take_again(self._engine)


def hook_states(engine_class: Any) -> None:
    """Makes ``offload_states`` and ``reload_states`` of engines with TenCache do what they say."""
    stock_offload, stock_reload = engine_class.offload_states, engine_class.reload_states

    @functools.wraps(stock_offload)
    def offload_states(
        self: Any,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not _has_homes(self.optimizer):
            stock_offload(self, include, device, *args, **kwargs)
            return
        if device != OffloadDeviceEnum.cpu:
            raise ConfigError(f'engine.offload_states() moves states to "cpu", not to "{device}"')
        _hand_back(self, include)

    @functools.wraps(stock_reload)
    def reload_states(self: Any, non_blocking: bool = False) -> None:
        if not _has_homes(self.optimizer):
            stock_reload(self, non_blocking)
            return
        _take_again(self)

    engine_class.offload_states, engine_class.reload_states = offload_states, reload_states


def _hand_back(engine: Any, include: Container[OffloadStateTypeEnum] | None) -> int:
    def included(*kinds: OffloadStateTypeEnum) -> bool:
        return include is None or any(kind in include for kind in kinds)

    optimizer, nbytes = engine.optimizer, 0
    homes: GpuHomes | InferenceHomes | None = optimizer.gpu_homes
    if homes is not None:
        nbytes = homes.hand_back(state=included(*_STATE), weights=included(OffloadStateTypeEnum.lp_params))
    if included(OffloadStateTypeEnum.contiguous_grad_buffer) and _trains(optimizer):
        optimizer.lend_buckets()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return nbytes


def _take_again(engine: Any) -> None:
    homes: GpuHomes | InferenceHomes | None = engine.optimizer.gpu_homes
    if homes is not None:
        homes.take_again()


def _has_homes(optimizer: Any) -> bool:
    """Whether TenCache keeps its state or its weights; what DeepSpeed keeps on the device it can move itself."""
    return hasattr(optimizer, "gpu_homes") and (not _trains(optimizer) or optimizer.offload_optimizer)


def _trains(optimizer: Any) -> bool:
    """Whether it is an optimizer; else what DeepSpeed has in its place for a model without one."""
    return hasattr(optimizer, "step_guard")


GATHER_TIMEOUT_S = 60.0
"""Other ranks that are well begin a gather within a step of one another."""


def release_model(module: torch.nn.Module) -> None:
    """Makes DeepSpeed's stack of modules hold the model weakly; nothing happens when it is not on it.

    The entry stays while the model lives: a forward of it without hooks registers external parameters there. Further
    ones, which a forward that was interrupted has left, go.
    """
    stack = parameter_offload.FWD_MODULE_STACK
    below = {id(each) for each in module.modules()}
    entries = [entry for entry in stack if id(entry) not in below]
    if len(entries) < len(stack):
        entries.append(weakref.proxy(module, _remove_from_stack))
    stack[:] = entries


def release_after_failure(engine: Any) -> None:
    """Removes the leftovers of a DeepSpeed engine that could not be built from its model, which may get another engine.

    Args:
        engine: the half-built ``DeepSpeedEngine``.
    """
    for handle in calls.engine_hooks(engine):
        handle.remove()
    debug_clear_module_and_param_names()
    release_model(engine.module)


def end_passes(module: torch.nn.Module) -> None:
    """Releases the weights that a pass has left gathered when an exception ended it. DeepSpeed refuses to release those
    of the modules that were under way, and to gather one whose shard it has given back."""
    params: Iterable[Any] = module.parameters()
    for param in params:
        if hasattr(param, "ds_id"):
            param.ds_active_sub_modules.clear()
            if param.ds_status is ZeroParamStatus.AVAILABLE and not param.ds_persist and is_free(param):
                param.partition()


def finish_gathers(module: torch.nn.Module, gave_up: Callable[[], None], timeout_s: float = GATHER_TIMEOUT_S) -> None:
    """Waits for the gathers of a model's parameters that were begun and not needed yet: they read shards.

    After an error on one rank, others may have begun gathers that it never will.

    Args:
        module: the model.
        gave_up: called when they do not end; the shards must stay where they are then.
        timeout_s: longest wait.
    """
    registry = getattr(module, "ds_inflight_param_registry", {})
    handles = list({id(handle): handle for handle in registry.values()}.values())
    registry.clear()
    if not get_accelerator().is_synchronized_device():
        for handle in handles:  # orders streams, and does not block
            handle.wait()
        get_accelerator().current_stream().synchronize()  # an interrupted pass has waited for others on it
        return
    if not handles:
        return
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            for handle in handles:
                handle.wait()
        except BaseException as error:  # raised below, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=wait, name="tencache-gathers", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        logger.warning(
            "%d gathers started here did not start on every other rank within %.0f s: a rank has failed, see its log. "
            "The weights that they read stay in memory until the process ends",
            len(handles),
            timeout_s,
        )
        gave_up()
    elif errors:
        raise errors[0]


def _remove_from_stack(proxy: Any) -> None:
    stack = parameter_offload.FWD_MODULE_STACK
    for index, entry in enumerate(stack):
        if entry is proxy:
            del stack[index]
            return
