# SPDX-License-Identifier: Apache-2.0
"""Releases the references to a model that DeepSpeed would keep after its engine ends, for the life of the process.

Weights live as long as their model. An unreferenced model must be freed, so DeepSpeed's own references to it are
removed with its engine.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.debug import debug_clear_module_and_param_names

from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.hooked_modules import is_free

logger = logging.getLogger("DeepSpeed.tencache")

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
