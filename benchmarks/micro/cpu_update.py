# SPDX-License-Identifier: Apache-2.0
"""The optimizer's pass over host memory: TenCache's chunks against DeepSpeedCPUAdam on one flat tensor.

TenCache's side is :class:`~tencache_ds.tiers.fused_update.FusedUpdate` over the chunks of a resident sub-group: one
pass takes the 16-bit gradient, updates master weight and moments, and writes the weight in 16 bits. Reading and writing
chunks is covered by the storage benchmark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from tencache_ds.config import TenCacheConfig
from tencache_ds.integration.optimizers import known_kinds
from tencache_ds.memory import BufferPool
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.adam_scalars import BetaPowers, adam_scalars
from tencache_ds.planning.chunks import Chunk
from tencache_ds.tiers.cpu_share import CpuShare
from tencache_ds.tiers.fused_adam import FusedAdam
from tencache_ds.tiers.fused_update import FusedUpdate
from tencache_ds.tiers.gradients import GradientSegment, GradientTier
from tencache_ds.tiers.kinds import MASTER
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import SubGroupSpec
from tencache_ds.tiers.update import ChunkedUpdate, SubGroupStep

from .result import MIN_REPEATS, Case, MicroResult, Row, alternate, progress

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


def run(
    seconds: float = 16.0,
    *,
    threads: Sequence[int] | None = None,
    numel: int | None = None,
    repeats: int = MIN_REPEATS,
) -> MicroResult:
    """Measures the update.

    Args:
        seconds: about how long it takes; more of it means more repeats.
        threads: numbers of OpenMP threads; 1, half and all of this process's cores when omitted.
        numel: parameters; from the budget when omitted.
        repeats: samples per figure, at least.

    Raises:
        RuntimeError: DeepSpeed's cpu_adam op does not build, or TenCache's weights differ from those of the flat pass.
    """
    cores = len(os.sched_getaffinity(0))
    threads = sorted({1, max(cores // 2, 1), cores}) if threads is None else threads
    numel = max(min(NUMEL, int(seconds * _NUMEL_PER_S)), 1 << 20) if numel is None else numel
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(numel, generator=generator)
    gradient = torch.randn(numel, generator=generator).to(_WEIGHT_DTYPE)
    passes, adam, copied = _Flat(master, gradient), _Flat(master, gradient), torch.empty_like(master)
    chunk_nbytes = int(TenCacheConfig().chunk_size)
    fused = _Fused(master, gradient, torch.empty_like(gradient), chunk_nbytes)
    fused.use(max(threads))
    variants: dict[str, Callable[[], object]] = {
        CHUNKS: fused.step, PASSES: passes.update, ADAM: adam.adam.step, COPY: partial(copied.copy_, master)
    }  # fmt: skip
    share = CpuShare()
    with share.limited(max(threads)):
        for update in variants.values():  # touches the pages
            update()
        t_start_s = time.perf_counter()
        for update in variants.values():
            update()
        round_s = time.perf_counter() - t_start_s
    rounds = sum(max(threads) / n for n in threads)
    repeats = min(max(int(seconds / (rounds * round_s)) - 2, repeats), max(_MAX_REPEATS, repeats))
    rows: list[Row] = []
    with progress(len(threads) * len(variants) * (repeats + 1), "cpu_update") as bar:
        for n in threads:
            fused.use(n)
            with share.limited(n):
                timed = {name: partial(_seconds, update) for name, update in variants.items()}
                rows += _rows(alternate(timed, repeats, bar.update), numel, {"threads": n})
    fused.close()
    if not torch.equal(fused.weights, passes.weights):
        raise RuntimeError("TenCache's chunks and the flat pass gave different weights: their rates are not comparable")
    return MicroResult(
        name="cpu_update",
        parameters={
            "params": numel,
            "state": f"{12 * numel / 1e9:.3f} GB (fp32 master weight and two moments)",
            "chunk": f"{chunk_nbytes} bytes of state",
            "gradient and weight": str(_WEIGHT_DTYPE).removeprefix("torch."),
            "repeats": repeats,
            "bytes counted per parameter": dict(NBYTES_PER_PARAM),
            "flat, same passes": "up-cast, unscale, Adam, 16-bit weight: each over the whole tensor, as stock does it",
            "memory copy": "also loads overwritten bytes; an update in place does not, hence shares over 100 %",
            "result": "TenCache's weights equal those of the flat pass bit for bit",
        },
        rows=rows,
    )


def _rows(taken: Mapping[str, Sequence[float]], numel: int, case: Case) -> list[Row]:
    rows = []
    traffic = {name: NBYTES_PER_PARAM[name] * numel / np.array(seconds) for name, seconds in taken.items()}
    for name, seconds in taken.items():
        if name != COPY:
            rows.append(Row.of(name, "update", "Gparam/s", case, list(numel / np.array(seconds) / 1e9)))
            # Round by round: what slowed the machine down slowed both.
            shares = list(100 * traffic[name] / traffic[COPY])
            rows.append(Row.of(name, "share of the copy's traffic", "%", case, shares))
        rows.append(Row.of(name, "memory traffic", "GB/s", case, list(traffic[name] / 1e9)))
    return rows


def _seconds(update: Callable[[], object]) -> float:
    time.sleep(_PAUSE_S)
    t_start_s = time.perf_counter()
    update()
    return time.perf_counter() - t_start_s


def _adam(parameter: torch.Tensor) -> DeepSpeedCPUAdam:
    return DeepSpeedCPUAdam([parameter], lr=1e-4, weight_decay=0.01, adamw_mode=True)


@dataclass(frozen=True, slots=True)
class _OneTensor:
    """Weights that are one tensor in host memory."""

    weights: torch.Tensor

    def open(self, chunk: Chunk) -> list[tuple[int, torch.Tensor]]:
        return [(0, self.weights[chunk.start : chunk.start + chunk.numel])]

    def close(self, chunk: Chunk) -> None: ...

    def stored(self, chunk: Chunk) -> bool:
        return False

    def holds_buffers(self, sub_group: int) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class _OneGradient:
    """The memory of all gradients."""

    gradient: torch.Tensor

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.gradient

    def give_back(self, tensor: torch.Tensor) -> None: ...


class _Fused:
    """TenCache's update of one resident sub-group; writes the 16-bit weights to ``weights``."""

    def __init__(self, master: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor, chunk_nbytes: int) -> None:
        numel, counters = master.numel(), Counters()
        self._optimizer = _adam(torch.nn.Parameter(torch.empty(0)))
        kinds = ((MASTER, torch.float32), *known_kinds(self._optimizer, torch.float32))
        self._state = OptimizerStateTier(
            [SubGroupSpec(numel, kinds, None)], store=None, pool=_no_pool, counters=counters,
            chunk_nbytes=chunk_nbytes, timeout_s=1.0,
        )  # fmt: skip
        self._state.write(0, {MASTER: master})
        segment = GradientSegment(0, 0, numel)
        self._gradients = GradientTier([[segment]], gradient.dtype, _OneGradient(gradient), counters)
        self.weights = weights
        self._powers = BetaPowers(self._optimizer.defaults["betas"])
        self._step = 0
        self._adam: FusedAdam | None = None

    def use(self, n_threads: int) -> None:
        """Uses a team of this number of threads from now on."""
        self.close()
        self._adam = FusedAdam(n_threads)
        self._update = ChunkedUpdate(self._state, self._gradients, _OneTensor(self.weights), [FusedUpdate(self._adam)])

    def step(self) -> None:
        """One optimizer step."""
        self._step += 1
        group = self._optimizer.param_groups[0]
        scalars = adam_scalars(
            lr=group["lr"], betas=group["betas"], powers=self._powers.at(self._step, group["betas"]), eps=group["eps"],
            weight_decay=group["weight_decay"], decoupled=True, bias_correction=True, scale=_SCALE,
        )  # fmt: skip
        self._update.run(SubGroupStep(0, 0, self._step, _SCALE, group, scalars), self._state.chunks(0))

    def close(self) -> None:
        if self._adam is not None:
            self._adam.close()


def _no_pool() -> BufferPool:
    raise RuntimeError("a resident sub-group needs no staging buffers, yet one was requested")
