# SPDX-License-Identifier: Apache-2.0
"""The optimizer's pass over host memory: TenCache's chunks against DeepSpeedCPUAdam on one flat tensor.

TenCache's side is :class:`~tencache_ds.tiers.host_update.FusedUpdate` over chunks of optimizer state: one pass takes
the 16-bit gradient, updates master weight and moments, and writes the weight in 16 bits. Reading and writing chunks is
covered by the storage benchmark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import pandas as pd
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.planning.adam_scalars import BetaPowers, adam_scalars
from tencache_ds.planning.chunks import automatic_chunk_nbytes, cut_sub_group
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.host_update import CpuShare, FusedUpdate
from tencache_ds.tiers.sub_group import EXP_AVG, EXP_AVG_SQ, MASTER
from tencache_ds.tiers.update import JOB_TIMEOUT_S, SubGroupStep

from .result import REPEATS, Case, MicroResult, alternate

CHUNKS, PASSES, ADAM, COPY = "TenCache chunks", "flat, same passes", "flat, Adam only", "memory copy"

NBYTES_PER_PARAM = {CHUNKS: 2 + 4 * 6 + 2, PASSES: 2 + 4 * 6 + 2, ADAM: 4 + 4 * 6, COPY: 4 * 2}
"""Bytes that have to cross memory per parameter, however many passes are made: the gradient read (16 bits, or fp32 for
Adam alone), fp32 master weight and two moments read and written, the 16-bit weight written. A copy reads and writes one
fp32 number."""

NUMEL = 128 << 20
"""Parameters: 1.5 GiB of optimizer state. An update takes tens of milliseconds on a server, so the cost of starting it
is negligible."""

_NUMEL_PER_S = 4 << 20
"""Elements updated per second of budget, up to :data:`NUMEL`."""

_PAUSE_S = 0.03
"""Before each run: OpenMP's threads spin for some milliseconds after their last region, on the cores of the next
variant."""

_SCALE = 0.5
_WEIGHT_DTYPE = torch.bfloat16
_MAX_REPEATS = 50


class _Flat:
    """One flat tensor per kind of state, and DeepSpeed's optimizer for it."""

    def __init__(self, master: torch.Tensor, gradient: torch.Tensor) -> None:
        self.master = torch.nn.Parameter(master.clone())
        self.fp32_gradient = self.master.grad = gradient.float()
        self.adam = _adam(self.master)
        self._gradient, self.weights = gradient, torch.empty_like(gradient)

    def update(self) -> None:
        """The arithmetic of TenCache's chunks, with every pass over the whole tensor."""
        self.fp32_gradient.copy_(self._gradient)
        self.fp32_gradient.mul_(_SCALE)
        self.adam.step()
        self.weights.copy_(self.master.data)


class _Chunks:
    """The same state in chunks, as TenCache keeps it, and its update on a team of threads."""

    def __init__(self, master: torch.Tensor, gradient: torch.Tensor, chunk_nbytes: int) -> None:
        optimizer = _adam(torch.nn.Parameter(torch.empty(0)))
        self._hyper, self._step = optimizer.param_groups[0], 0
        self._powers = BetaPowers(self._hyper["betas"])
        self.weights = torch.empty_like(gradient)
        self._chunks = []
        kinds = (MASTER, EXP_AVG, EXP_AVG_SQ)
        for chunk in cut_sub_group(0, master.numel(), [(kind, 4) for kind in kinds], chunk_nbytes):
            part = slice(chunk.start, chunk.start + chunk.numel)
            slab = torch.zeros(len(kinds), chunk.numel)
            slab[0].copy_(master[part])
            self._chunks.append((dict(zip(kinds, slab, strict=True)), gradient[part], self.weights[part]))

    def update(self, kernel: FusedUpdate) -> None:
        """One optimizer step."""
        self._step += 1
        group = self._hyper
        scalars = adam_scalars(
            lr=group["lr"], betas=group["betas"], powers=self._powers.at(self._step, group["betas"]), eps=group["eps"],
            weight_decay=group["weight_decay"], decoupled=True, bias_correction=True, scale=_SCALE,
        )  # fmt: skip
        step = SubGroupStep(0, 0, self._step, _SCALE, group, scalars)
        jobs = [kernel.start(state, gradient, [(0, weights)], step, b"") for state, gradient, weights in self._chunks]
        for job in jobs:
            if not job.wait(JOB_TIMEOUT_S):
                raise RuntimeError("the update of a chunk does not end")


def _adam(parameter: torch.Tensor) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.01, adamw_mode=True)


def run(seconds: float = 16.0, *, threads: Sequence[int] | None = None, numel: int | None = None) -> MicroResult:
    """Measures the update.

    Args:
        seconds: about how long it takes; more of it means more repeats.
        threads: numbers of OpenMP threads; 1, half and all of this process's cores when omitted.
        numel: parameters; from the budget when omitted.

    Raises:
        RuntimeError: DeepSpeed's cpu_adam op does not build, or TenCache's weights differ from those of the flat pass.
    """
    cores = len(os.sched_getaffinity(0))
    threads = threads or sorted({1, max(cores // 2, 1), cores})
    numel = numel or max(min(NUMEL, int(seconds * _NUMEL_PER_S)), 1 << 20)
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator)
    gradient = torch.randn(numel, generator=generator).to(_WEIGHT_DTYPE)
    chunk_nbytes = automatic_chunk_nbytes(may_be_stored=False)
    passes, adam, copied = _Flat(master, gradient), _Flat(master, gradient), torch.empty_like(master)
    chunks = _Chunks(master, gradient, chunk_nbytes)
    result = MicroResult(
        name="cpu_update",
        parameters={
            "params": numel,
            "state": f"{12 * numel / 1e9:.3f} GB (fp32 master weight and two moments)",
            "chunk": f"{chunk_nbytes} bytes of state",
            "gradient and weight": str(_WEIGHT_DTYPE).removeprefix("torch."),
            "bytes counted per parameter": dict(NBYTES_PER_PARAM),
            "flat, same passes": "up-cast, unscale, Adam, 16-bit weight: each over the whole tensor, as stock does it",
            "memory copy": "also loads overwritten bytes; an update in place does not, hence shares over 100 %",
            "result": "TenCache's weights equal those of the flat pass bit for bit",
        },
    )
    share, repeats = CpuShare(), 0
    for n in sorted(threads, reverse=True):
        with ExitStack() as stack:
            stack.enter_context(share.limited(n))
            team = stack.enter_context(closing(FusedAdam(n)))
            variants: dict[str, Callable[[], object]] = {
                CHUNKS: partial(chunks.update, FusedUpdate(team)),
                PASSES: passes.update,
                ADAM: adam.adam.step,
                COPY: partial(copied.copy_, master),
            }
            timed = {name: partial(_seconds, update) for name, update in variants.items()}
            if not repeats:  # by the time of a round with all threads, after one that touches the pages
                round_s = [sum(sample() for sample in timed.values()) for _ in range(2)][1]
                rounds = sum(max(threads) / n for n in threads)
                repeats = min(max(int(seconds / (rounds * round_s)) - 2, REPEATS), _MAX_REPEATS)
            _add_figures(result, alternate(f"cpu_update, {n} threads", timed, repeats), numel, {"threads": n})
    if not torch.equal(chunks.weights, passes.weights):
        raise RuntimeError("TenCache's chunks and the flat pass gave different weights: their rates are not comparable")
    result.parameters["repeats"] = repeats
    return result


def _add_figures(result: MicroResult, taken: Mapping[str, Sequence[float]], numel: int, case: Case) -> None:
    per_s = numel / pd.DataFrame(taken)
    traffic = per_s * pd.Series(NBYTES_PER_PARAM)
    updates = per_s.columns.drop(COPY)
    result.add("update", "Gparam/s", case, per_s[updates] / 1e9)
    # Round by round: what slowed the machine down slowed both.
    result.add("share of the copy's traffic", "%", case, 100 * traffic[updates].div(traffic[COPY], axis=0))
    result.add("memory traffic", "GB/s", case, traffic / 1e9)


def _seconds(update: Callable[[], object]) -> float:
    time.sleep(_PAUSE_S)
    t_start_s = time.perf_counter()
    update()
    return time.perf_counter() - t_start_s
