# SPDX-License-Identifier: Apache-2.0
"""Where a configuration keeps things, and the shortest step that this allows on a machine."""

from __future__ import annotations

from tencache_ds.planning.bound import STATE_NBYTES, WEIGHT_NBYTES, Bound, Demand, Resource, bound
from tencache_ds.profiling.hardware import Hardware

from ..record import Placement, Run, Workload
from .peers import Peer


def placement_of(peer: Peer, run: Run, ranks: int) -> Placement | None:
    """Where a finished run kept things; None if it is not known."""
    if peer.place is not None:
        return peer.place(run.knobs)
    stats = run.tencache_stats
    if stats is None or run.numel == 0:
        return None
    # Statistics are per rank, and every rank holds its share of each weight.
    numel = run.numel / ranks
    return Placement(
        weights_nvme=_rest(stats["resident_weight_nbytes"] / (WEIGHT_NBYTES * numel)),
        # Of statistics that were written before state could stay in host memory none did.
        optimizer_nvme=_rest(stats.get("resident_state_nbytes", 0) / (STATE_NBYTES * numel)),
    )


def _rest(resident: float) -> float:
    """The share on NVMe, where ``resident`` is that in host memory; slabs are a little larger than what is in them."""
    return min(1.0, max(0.0, 1.0 - resident))


def bound_of(hardware: Hardware, workload: Workload, numel: int, placement: Placement) -> Bound:
    """The shortest possible step of a placement: the time of its busiest resource, everything else hidden behind it."""
    return bound(
        Demand(
            numel=numel,
            ranks_on_host=workload.ranks,
            micro_steps=workload.accumulation,
            weights_nvme=placement.weights_nvme,
            optimizer_nvme=placement.optimizer_nvme,
            weights_gpu=placement.weights_gpu,
            optimizer_gpu=placement.optimizer_gpu,
            tokens_per_step=workload.tokens_per_step,
            activation_recompute=workload.activation_checkpointing,
        ),
        hardware,
    )


def balance_tokens(found: Bound, workload: Workload) -> float | None:
    """Tokens per step at which arithmetic would take as long as NVMe, with as many micro-steps.

    Args:
        found: of a placement and ``workload``, by :func:`bound_of`.
        workload: its tokens are what the arithmetic in ``found`` is for.

    Returns:
        None when nothing is on NVMe, or a rate is not known.
    """
    nvme_s, gpu_s = (found.by_resource.get(resource) for resource in (Resource.NVME, Resource.GPU))
    return workload.tokens_per_step * nvme_s / gpu_s if nvme_s and gpu_s else None
