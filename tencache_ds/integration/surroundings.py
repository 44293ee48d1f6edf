# SPDX-License-Identifier: Apache-2.0
"""What TenCache reads from a parsed DeepSpeed config and from the process DeepSpeed runs in."""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.constants import (
    AIO_BLOCK_SIZE,
    AIO_OVERLAP_EVENTS,
    AIO_QUEUE_DEPTH,
    AIO_SINGLE_SUBMIT,
)

from tencache_ds.config import TenCacheConfig
from tencache_ds.engine import AioSettings, Surroundings, TenCacheEngine, logger
from tencache_ds.io.scratch import device_of


def is_true(value: object) -> bool:
    """A flag of the ``aio`` section, where ``ds_nvme_tune`` writes the strings ``"true"`` and ``"false"``."""
    return value.strip().lower() == "true" if isinstance(value, str) else bool(value)


def build_engine(ds_config: Any, options: TenCacheConfig) -> TenCacheEngine:
    """A TenCache engine for a parsed DeepSpeed config. Collective: every rank of the job calls it."""
    zero, aio = ds_config.zero_config, ds_config.aio_config
    pins = [section.pin_memory for section in (zero.offload_param, zero.offload_optimizer) if section is not None]
    surroundings = Surroundings(
        rank=dist.get_rank(),
        local_ranks=local_ranks(),
        on_cuda=not get_accelerator().is_synchronized_device() and get_accelerator().device_name().startswith("cuda"),
        weights_paths=_nvme_paths(zero.offload_param, options),
        optimizer_paths=_nvme_paths(zero.offload_optimizer, options),
        pin_memory=all(pins),
        aio=AioSettings(
            block_nbytes=int(aio[AIO_BLOCK_SIZE]),
            queue_depth=int(aio[AIO_QUEUE_DEPTH]),
            single_submit=is_true(aio[AIO_SINGLE_SUBMIT]),
            overlap_events=is_true(aio[AIO_OVERLAP_EVENTS]),
        ),
        available_nbytes=_agreed_minimum(psutil.virtual_memory().available),
    )
    if surroundings.rank == 0:
        _warn_of_shared_devices(surroundings.weights_paths + surroundings.optimizer_paths, bool(options.nvme_paths))
    return TenCacheEngine(options, surroundings)


def local_ranks() -> int:
    """Ranks on this host."""
    return max(int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 0), 1)


def _nvme_paths(section: Any, options: TenCacheConfig) -> tuple[str, ...]:
    """The folders of one kind of state: DeepSpeed's own ``nvme_path`` and TenCache's further ones."""
    if section is None or section.device != "nvme":
        return ()
    return (str(section.nvme_path), *options.nvme_paths)


def _warn_of_shared_devices(paths: tuple[str, ...], several: bool) -> None:
    """Paths on one file system do not add up to more bandwidth, which is what they were given for."""
    if not several:
        return
    found: dict[int, list[str]] = {}
    for path in dict.fromkeys(paths):
        found.setdefault(device_of(path), []).append(path)
    for shared in found.values():
        if len(shared) > 1:
            logger.warning(
                "the NVMe paths %s are on the same file system: they share its space and its bandwidth, so that "
                'several gain nothing. "tencache.nvme_paths" is for folders on different drives.',
                " and ".join(shared),
            )


def _agreed_minimum(value: int) -> int:
    """The smallest value of any rank: what is decided from it must be the same everywhere, because the weights' places
    decide which of them enter a collective together."""
    if dist.get_world_size() == 1:
        return value
    tensor = torch.tensor([value], dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    return int(tensor.item())
