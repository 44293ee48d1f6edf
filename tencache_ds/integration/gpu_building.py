# SPDX-License-Identifier: Apache-2.0
"""Builds what keeps weights, gradients and optimizer state of one DeepSpeed engine in GPU memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError
from tencache_ds.integration.agreement import Agreement, Post, agreed, difference
from tencache_ds.integration.device_weights import GatheredWeights
from tencache_ds.integration.engine_building import on_cuda
from tencache_ds.integration.reporting import announce
from tencache_ds.memory.device_memory import CudaMemory, DeviceMemory
from tencache_ds.observability.counters import Stall
from tencache_ds.placement.gpu_homes import GpuHomes, open_device
from tencache_ds.placement.moves import GpuMoves, StateMoves
from tencache_ds.placement.places import GpuUsage
from tencache_ds.profiling.host import available_nbytes
from tencache_ds.profiling.waits import FetchRecorder
from tencache_ds.runtime.session import Session
from tencache_ds.tiers.device_update import TritonAdam
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.gradients import GradientTier
from tencache_ds.tiers.momentum import Momentum

logger = logging.getLogger("DeepSpeed.tencache")

LEFT_TO_OTHERS_NBYTES = 2**30
"""Host memory, per rank, that state leaves to all others when it has to leave GPU memory within an allocation."""


def open_gpu(session: Session, fused: FusedAdam | None) -> tuple[DeviceMemory, TritonAdam] | None:
    """GPU memory for weights, gradients and state, where the updates of all ranks know how to use it. Every rank of the
    job calls it, also one that has no use for it.

    Args:
        session: of the engine.
        fused: Adam in one pass on the host; None where there is none, or another optimizer.
    """
    opened = None
    if fused is not None and session.options.gpu_memory != 0:
        try:
            opened = open_device(session.surroundings.on_cuda, fused)
        except ConfigError as error:
            logger.warning("GPU memory is not used: %s", error)
    # Later they decide together what goes there: one that cannot, or may not, would be waited for.
    used = Agreement.of_job().reach("whether GPU memory is used", opened is not None, _all_use_it)
    return opened if used else None


def _all_use_it(ranks: Sequence[Post]) -> bool:
    values = [bool(rank.value) for rank in ranks]
    if any(values) and not all(values):
        logger.warning("GPU memory is not used: %s", difference("whether they can and may use it", values, ranks))
    return all(values)


def open_memory(options: TenCacheConfig) -> DeviceMemory | None:
    """GPU memory for the weights of an engine without optimizer; None without a GPU, or if it is not to be used."""
    return None if options.gpu_memory == 0 or not on_cuda() else _open_cuda()


def _open_cuda() -> CudaMemory:
    return CudaMemory(torch.device("cuda", torch.cuda.current_device()), torch.Tensor.copy_)


def open_usage() -> Callable[[], GpuUsage] | None:
    """Tells the usage of GPU memory; None without a GPU."""
    memory = _open_cuda() if on_cuda() else None
    return None if memory is None else memory.usage


def build_gpu_homes(
    session: Session,
    memory: DeviceMemory,
    state: StateMoves,
    gradients: GradientTier,
    weights: GatheredWeights,
    groups: Sequence[Sequence[Any]],
    *,
    moved_gradient: Callable[[int, torch.Tensor], None],
    momentum: Momentum | None,
    hidden_share: Callable[[], float],
    record_fetches: Callable[[FetchRecorder | None], None],
) -> GpuHomes:
    """Decides what of an engine lives in GPU memory, and moves it.

    Args:
        session: of the engine.
        memory: of the compute device.
        state: moves the optimizer's state.
        gradients: the accumulated gradients.
        weights: of the model.
        groups: the parameters of each sub-group.
        moved_gradient: see :class:`GpuMoves`.
        momentum: see :class:`GpuMoves`.
        hidden_share: see :class:`GpuHomes`.
        record_fetches: see :class:`GpuHomes`.
    """
    moves = GpuMoves(
        memory,
        state,
        gradients,
        [[(param.ds_id, param.partition_numel()) for param in group] for group in groups],
        weights,
        session,
        moved_gradient=moved_gradient,
        momentum=momentum,
    )

    def say(placement: str, predicted_seconds: float | None) -> None:
        session.note_placement(placement, predicted_seconds)
        announce(f"TenCache: {placement}", session.options)

    session.await_placement()
    return GpuHomes(
        session.options,
        memory,
        state.tier,
        len(groups),
        weights.shards,
        moves,
        host_left_nbytes=lambda: session.host_left_nbytes,
        host_room_nbytes=lambda: available_nbytes() // session.surroundings.local_ranks - LEFT_TO_OTHERS_NBYTES,
        hidden_share=hidden_share,
        without_fetches=weights.stay_gathered,
        update_waits=lambda: session.counters.stalled_seconds(Stall.UPDATE),
        agree=agreed,
        record_fetches=record_fetches,
        say=say,
        activations=session.competing_activations,
    )
