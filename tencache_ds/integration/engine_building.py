# SPDX-License-Identifier: Apache-2.0
"""Engines and sessions for a parsed DeepSpeed config and the process DeepSpeed runs in."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.config import Share, TenCacheConfig
from tencache_ds.integration.agreement import Agreement, Post
from tencache_ds.integration.config_checks import aio_settings
from tencache_ds.io.scratch import device_of
from tencache_ds.planning.budget import HostBudget, RankMemory, plan_host_memory
from tencache_ds.profiling.filesystem import file_system_of
from tencache_ds.profiling.host import CoreQuota, MemoryDomain, core_quotas, memory_domains
from tencache_ds.runtime.engine import TenCacheEngine, logger
from tencache_ds.runtime.session import Session
from tencache_ds.runtime.surroundings import Surroundings


def build_engine(ds_config: Any, options: TenCacheConfig) -> TenCacheEngine:
    """A TenCache engine for a parsed DeepSpeed config. Every rank of the job calls it: they agree on host memory.

    Raises:
        AgreementError: not all of them do.
    """
    rank, budget = dist.get_rank(), agree_on_host_memory(options)
    zero = ds_config.zero_config
    pins = [section.pin_memory for section in (zero.offload_param, zero.offload_optimizer) if section is not None]
    surroundings = Surroundings(
        rank=rank,
        local_ranks=budget.local_ranks[rank],
        cores=budget.cores[rank],
        on_cuda=on_cuda(),
        weights_paths=_nvme_paths(zero.offload_param, options),
        optimizer_paths=_nvme_paths(zero.offload_optimizer, options),
        pin_memory=all(pins),
        aio=aio_settings(ds_config._param_dict),
        host_nbytes=budget.host_nbytes,
        host_reason=budget.reason,
    )
    if rank == 0:
        if budget.warning:
            logger.warning(budget.warning)
        paths = surroundings.weights_paths + surroundings.optimizer_paths
        _warn_of_shared_devices(paths, bool(options.nvme_paths))
        _warn_of_network_folders(paths)
    return TenCacheEngine(options, surroundings)


def on_cuda() -> bool:
    """Whether DeepSpeed computes on a CUDA GPU."""
    return not get_accelerator().is_synchronized_device() and get_accelerator().device_name().startswith("cuda")


def agree_on_host_memory(options: TenCacheConfig) -> HostBudget:
    """The host memory of each rank, and the ranks and cores of each machine, from the figures of each rank."""
    wanted = options.host_memory
    mine = RankMemory(
        socket.gethostname(),
        None if isinstance(wanted, Share) else wanted,
        memory_domains(),
        tuple(sorted(os.sched_getaffinity(0))),
        core_quotas(),
        wanted.fraction if isinstance(wanted, Share) else None,
    )
    return HostBudget(**Agreement.of_job().reach("host memory", asdict(mine), _plan_host_memory))


def _plan_host_memory(posts: Sequence[Post]) -> dict[str, Any]:
    values = [post.value for post in posts]
    return asdict(
        plan_host_memory(
            [
                RankMemory(
                    v["host"],
                    v["wanted_nbytes"],
                    tuple(MemoryDomain(**domain) for domain in v["domains"]),
                    tuple(v["cores"]),
                    tuple(CoreQuota(**quota) for quota in v["quotas"]),
                    v["wanted_share"],
                )
                for v in values
            ]
        )
    )


def session_for(engines: list[TenCacheEngine], ds_config: Any, options: TenCacheConfig) -> Session:
    """The session of a DeepSpeed engine for a model whose weights ``engines`` hold. Without engines, one is built for
    the optimizer state; every rank of the job must then call this.
    """
    if not engines:
        engine = build_engine(ds_config, options)
        return Session(options, engine.surroundings, [engine], owns=True)
    optimizer_paths = _nvme_paths(ds_config.zero_config.offload_optimizer, options)
    surroundings = replace(engines[0].surroundings, optimizer_paths=optimizer_paths)
    return Session(options, surroundings, engines, owns=False)


def _nvme_paths(section: Any, options: TenCacheConfig) -> tuple[str, ...]:
    """The folders of one kind of state: DeepSpeed's own ``nvme_path`` and TenCache's further ones."""
    if section is None or section.device != "nvme":
        return ()
    return (str(section.nvme_path), *options.nvme_paths)


def _warn_of_shared_devices(paths: tuple[str, ...], several: bool) -> None:
    """Warns about several paths on one file system, which add no bandwidth."""
    if not several:
        return
    by_device: dict[int, list[str]] = {}
    for path in dict.fromkeys(paths):
        by_device.setdefault(device_of(path), []).append(path)
    for shared in by_device.values():
        if len(shared) > 1:
            logger.warning(
                "the NVMe paths %s are on the same file system: they share its space and its bandwidth, so "
                'several paths gain nothing. "tencache.nvme_paths" is for folders on different drives.',
                " and ".join(shared),
            )


def _warn_of_network_folders(paths: tuple[str, ...]) -> None:
    """Warns about paths that nodes may share: their ranks' files do not meet, but their traffic does."""
    for path in dict.fromkeys(paths):
        system = file_system_of(Path(path))
        if system.over_network:
            logger.warning(
                "the NVMe path %s is on %s, a file system over the network: all nodes that use it share its bandwidth "
                "and its space. Name a folder on a drive that each node has, by the same path on all of them.",
                path,
                system.kind,
            )
