# SPDX-License-Identifier: Apache-2.0
"""Adam on optimizer state in device memory, and a step along the gradient where there are no moments: the table of its
places, and the kernels that update it.

A table says which elements of which tensors belong together. It is the same in every step until something changes its
place, so that a step costs one or two launches per sub-group, however many weights and chunks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch

from tencache_ds.errors import ConfigError
from tencache_ds.planning.adam_scalars import AdamScalars, DescentScalars

Launch = Callable[[AdamScalars | DescentScalars], None]
"""Updates the runs it was prepared for, which have moments or have none, on the current stream; returns before that is
done."""

Table = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Runs, and of each block its run and its first element there, on the device."""

VECTOR_NBYTES = 16
N_WARPS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that lie next to each other in every tensor.

    Attributes:
        master: to ``weight``: addresses of the first element's master weight, moments (0: there are none), gradient
            (0: it is zero) and weight (0: no rounded weight needed).
        numel: how many.
        n_tail: number of elements at the end that are the scalar tail of DeepSpeed's loop over the sub-group.
    """

    master: int
    exp_avg: int
    exp_avg_sq: int
    gradient: int
    weight: int
    numel: int
    n_tail: int = 0


class TritonAdam:
    """The kernels for state in the memory of one device: :mod:`tencache_ds.ops.gpu_adam` on CUDA. Used by one thread.

    Args:
        device: where state, gradients and weights are.
        tail_contracted: whether DeepSpeed's op was compiled by a compiler that contracts its scalar tail.

    Raises:
        ConfigError: Triton is not available.
    """

    def __init__(self, device: torch.device, *, tail_contracted: bool) -> None:
        try:
            from tencache_ds.ops import gpu_adam
        except ImportError as error:
            raise ConfigError(f"Triton, which comes with torch's CUDA builds, cannot be imported ({error})") from error
        self._op = gpu_adam
        self._device = device
        self._tail_contracted = tail_contracted
        self._codes = {
            torch.float32: gpu_adam.FLOAT32.value,
            torch.bfloat16: gpu_adam.BFLOAT16.value,
            torch.float16: gpu_adam.FLOAT16.value,
        }

    def prepare(self, runs: Sequence[Run], gradient: torch.dtype, weight: torch.dtype) -> Launch:
        """Builds the updater of ``runs`` for every step. The caller keeps their tensors alive as long.

        Args:
            runs: in device memory; all of them have moments, or none.
            gradient: dtype of the gradients.
            weight: dtype of the weights.
        """
        whole: list[Run] = []
        partial: list[Run] = []
        for run in runs:
            numel = self._in_whole_blocks(run)
            if numel:
                whole.append(replace(run, numel=numel, n_tail=0))
            if numel < run.numel:
                partial.append(_from(run, numel, gradient, weight))
        tables = [(table, is_whole) for table, is_whole in ((whole, True), (partial, False)) if table]
        kind = self._adam if runs[0].exp_avg else self._descent
        launches = [
            kind(
                self._on_device(table),
                GRADIENT=self._codes[gradient],
                WEIGHT=self._codes[weight],
                WHOLE=is_whole,
                BLOCK=self._op.BLOCK_NUMEL,
                num_warps=N_WARPS,
                enable_fp_fusion=False,
            )
            for table, is_whole in tables
        ]

        def launch(scalars: Any) -> None:
            with torch.cuda.device(self._device):
                for each in launches:
                    each(scalars)

        return launch

    def _in_whole_blocks(self, run: Run) -> int:
        moments = (run.exp_avg, run.exp_avg_sq) if run.exp_avg else ()
        addresses = (run.master, *moments, run.gradient, run.weight)
        if any(address == 0 or address % VECTOR_NBYTES for address in addresses):
            return 0
        return (run.numel - run.n_tail) // self._op.BLOCK_NUMEL * self._op.BLOCK_NUMEL

    def _on_device(self, runs: Sequence[Run]) -> Table:
        fields = np.array([(*astuple(run)[:6], run.numel - run.n_tail) for run in runs], dtype=np.int64)
        n_blocks = -(-fields[:, 5] // self._op.BLOCK_NUMEL)
        block_run = np.repeat(np.arange(len(runs), dtype=np.int32), n_blocks)
        first_block = np.repeat(np.cumsum(n_blocks) - n_blocks, n_blocks)
        block_start = (np.arange(len(block_run), dtype=np.int64) - first_block) * self._op.BLOCK_NUMEL
        arrays = (fields, block_run, block_start)
        of_runs, of_blocks, starts = (torch.from_numpy(array).to(self._device) for array in arrays)
        return of_runs, of_blocks, starts

    def _adam(self, table: Table, **constants: Any) -> Launch:
        kernel, grid = self._op.adam_runs, (len(table[1]),)

        def launch(scalars: Any) -> None:
            kernel[grid](
                *table,
                scalars.scale,
                scalars.beta1,
                scalars.one_minus_beta1,
                scalars.beta2,
                scalars.one_minus_beta2,
                scalars.bias_correction2,
                scalars.eps,
                scalars.step_size,
                scalars.decay,
                DECAY=int(scalars.weight_decay),
                TAIL_CONTRACTED=self._tail_contracted,
                **constants,
            )

        return launch

    def _descent(self, table: Table, **constants: Any) -> Launch:
        kernel, grid = self._op.descent_runs, (len(table[1]),)

        def launch(scalars: Any) -> None:
            kernel[grid](*table, scalars.scale, scalars.retained, scalars.step, **constants)

        return launch


def _from(run: Run, first: int, gradient: torch.dtype, weight: torch.dtype) -> Run:
    """The elements of a run from ``first`` on."""

    def advanced(address: int, nbytes: int) -> int:
        return address + first * nbytes if address else 0

    return Run(
        advanced(run.master, 4),
        advanced(run.exp_avg, 4),
        advanced(run.exp_avg_sq, 4),
        advanced(run.gradient, gradient.itemsize),
        advanced(run.weight, weight.itemsize),
        run.numel - first,
        run.n_tail,
    )
