# SPDX-License-Identifier: Apache-2.0
"""The placement of a configuration, and the resulting lower bound of the step time on a machine."""

from __future__ import annotations

from tencache_ds.planning.forecast import SPLIT_NBYTES, STATE_NBYTES, WEIGHT_NBYTES, Bound, Demand, Resource, bound
from tencache_ds.profiling.hardware import Hardware

from ..record import Placement, Run, Workload
from .peers import Peer


def placement_of(peer: Peer, run: Run, ranks: int) -> Placement | None:
    """Where a finished run kept things at its end; None if it is not known."""
    placed, stats = peer.place(run.knobs), run.tencache_stats
    if stats is None or run.numel == 0:
        return placed
    # Statistics are per rank, and every rank holds its share of each weight. Those that were written before things
    # could stay in GPU memory, or state in host memory, do not mention it. Slabs, and chunks with their padding, are a
    # little larger than their contents: at most the whole counts.
    numel = run.numel / ranks
    weights_gpu = min(1.0, stats.get("gpu_weight_nbytes", 0) / (WEIGHT_NBYTES * numel))
    state_gpu = min(1.0, stats.get("gpu_state_nbytes", 0) / (STATE_NBYTES * numel))
    on_gpu = {"weights_gpu": weights_gpu, "optimizer_gpu": state_gpu}
    if placed is not None:
        return placed.model_copy(update=on_gpu)
    # Weights in GPU memory may have host memory besides.
    weights_memory = max(stats["resident_weight_nbytes"] / (WEIGHT_NBYTES * numel), weights_gpu)
    weights_nvme = max(0.0, 1 - weights_memory)
    state_memory = stats.get("resident_state_nbytes", 0) / (STATE_NBYTES * numel) + state_gpu
    state_nvme = max(0.0, 1 - state_memory)
    per_param = float(STATE_NBYTES)
    if "stored_nbytes" in stats and state_nvme > 0:
        stored_state = stats["stored_nbytes"] - weights_nvme * WEIGHT_NBYTES * numel
        per_param = min(max(stored_state / (state_nvme * numel), STATE_NBYTES - SPLIT_NBYTES), STATE_NBYTES)
    return Placement(
        weights_nvme=weights_nvme, optimizer_nvme=state_nvme, optimizer_nvme_nbytes=per_param, **on_gpu
    )  # fmt: skip


def bound_of(hardware: Hardware, workload: Workload, numel: int, placement: Placement) -> Bound:
    """The shortest possible step of a placement: the time of its busiest resource, everything else hidden behind it."""
    placed = placement.model_dump()
    demand = Demand(
        numel=numel, ranks_on_host=workload.ranks, micro_steps=workload.accumulation,
        optimizer_state_nbytes_per_param=placed.pop("optimizer_nvme_nbytes"), tokens_per_step=workload.tokens_per_step,
        activation_recompute=workload.activation_checkpointing, **placed,
    )  # fmt: skip
    return bound(demand, hardware)


def balance_tokens(found: Bound, workload: Workload) -> float | None:
    """Tokens per step at which compute time equals NVMe time, with as many micro-steps, by a bound for
    ``workload``; None when nothing is on NVMe, or a rate is not known.
    """
    nvme_s, gpu_s = (found.by_resource.get(resource) for resource in (Resource.NVME, Resource.GPU))
    return workload.tokens_per_step * nvme_s / gpu_s if nvme_s and gpu_s else None
