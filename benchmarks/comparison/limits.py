# SPDX-License-Identifier: Apache-2.0
"""The placement of a configuration, and the resulting lower bound of the step time on a machine."""

from __future__ import annotations

from tencache_ds.planning.bound import SPLIT_NBYTES, STATE_NBYTES, WEIGHT_NBYTES, Bound, Demand, Resource, bound
from tencache_ds.profiling.hardware import Hardware

from ..record import Placement, Run, Workload
from .peers import Peer


def placement_of(peer: Peer, run: Run, ranks: int) -> Placement | None:
    """Where a finished run kept things at its end; None if it is not known."""
    stats = run.tencache_stats
    if stats is None or run.numel == 0:
        return None if peer.place is None else peer.place(run.knobs)
    # Statistics are per rank, and every rank holds its share of each weight. Those that were written before things
    # could stay in GPU memory, or state in host memory, do not mention it.
    weights_nbytes, state_nbytes = WEIGHT_NBYTES * run.numel / ranks, STATE_NBYTES * run.numel / ranks
    weights_gpu = _share(stats.get("gpu_weight_nbytes", 0) / weights_nbytes)
    state_gpu = _share(stats.get("gpu_state_nbytes", 0) / state_nbytes)
    if peer.place is not None:
        placed = peer.place(run.knobs)
        on_gpu = {
            "weights_gpu": max(placed.weights_gpu, weights_gpu), "optimizer_gpu": max(placed.optimizer_gpu, state_gpu)
        }  # fmt: skip
        return placed.model_copy(update=on_gpu)
    # Weights in GPU memory may have host memory besides.
    weights_memory = max(stats["resident_weight_nbytes"] / weights_nbytes, weights_gpu)
    weights_nvme = 1 - _share(weights_memory)
    optimizer_nvme = 1 - _share(stats.get("resident_state_nbytes", 0) / state_nbytes + state_gpu)
    state_nbytes = _state_nbytes(
        stats.get("stored_nbytes"), weights_nvme * weights_nbytes, optimizer_nvme * run.numel / ranks
    )
    return Placement(
        weights_nvme=weights_nvme, optimizer_nvme=optimizer_nvme, weights_gpu=weights_gpu, optimizer_gpu=state_gpu,
        optimizer_nvme_nbytes=state_nbytes,
    )  # fmt: skip


def _state_nbytes(stored_nbytes: float | None, weights_nbytes: float, numel: float) -> float:
    """Bytes per parameter of the state on NVMe: of so many parameters, beside so many bytes of weights."""
    if stored_nbytes is None or numel <= 0:
        return STATE_NBYTES
    return min(max((stored_nbytes - weights_nbytes) / numel, STATE_NBYTES - SPLIT_NBYTES), STATE_NBYTES)


def _share(of_all: float) -> float:
    """At most the whole: slabs, and chunks with their padding, are a little larger than their contents."""
    return min(1.0, of_all)


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
