# SPDX-License-Identifier: Apache-2.0
"""GPU memory that is handed back on request, while another program generates on the card, for example: DeepSpeed's
``engine.offload_states()`` and ``engine.reload_states()``, and :func:`tencache_ds.release_gpu_memory`.

Stock DeepSpeed refuses both where ``offload_param`` is set. Here everything that TenCache keeps in GPU memory leaves
it, and DeepSpeed's own buffer of gradients; weights that the config leaves there (no ``offload_param``) stay. Training
goes on with the same bits, also before the memory is taken again. All ranks call it at the same time, between two
micro-steps, as DeepSpeed asks for.
"""

from __future__ import annotations

import functools
from collections.abc import Container
from types import TracebackType
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

from tencache_ds.errors import ConfigError
from tencache_ds.placement.gpu_homes import GpuHomes
from tencache_ds.placement.inference_homes import InferenceHomes

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
