# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients that are accumulated in a :class:`~tencache_ds.tiers.gradients.GradientTier`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tencache_ds.host_path import GradientNorms


class GradientNormsMixin:
    """Overrides of DeepSpeed's methods for :class:`TenCacheZeroOptimizer_Stage3`.

    Attributes:
        _quick_norms: those that are completed together; None: DeepSpeed computes each.
    """

    _quick_norms: GradientNorms | None = None

    def _offload_grad_partition_at_boundary(
        self, param: Any, grad_buffer: torch.Tensor, offload_fp32_gradients: Any, offload_fp32_offsets: Any
    ) -> None:
        if self._gradients is None:
            super()._offload_grad_partition_at_boundary(
                param, grad_buffer, offload_fp32_gradients, offload_fp32_offsets
            )
            return
        key = self.get_param_id(param)
        if self._quick_norms is not None and self._quick_norms.add(key, grad_buffer):
            self.norm_for_param_grads.pop(key, None)
        else:
            self.norm_for_param_grads[key] = self._constant_buffered_norm2(grad_buffer)

    def _get_norm_groups(self) -> Any:
        """DeepSpeed's norm of each sub-group. Some scripts ask for it between a backward pass and the step."""
        if self._gradients is not None:
            self._complete_norms()
        return super()._get_norm_groups()

    def _complete_norms(self) -> None:
        """The norms of all gradients, in host memory, where DeepSpeed adds them one by one; also of those that came in
        an earlier micro-step only, which DeepSpeed would forget."""
        norms = dict(self.norm_for_param_grads)
        if self._quick_norms is not None:
            norms = self._quick_norms.complete() | norms
        params = {param.ds_id: param for param in itertools.chain.from_iterable(self.fp16_groups)}
        device = get_accelerator().current_device_name()
        for key in self._gradients.live():
            if key not in norms:
                segment = self._gradients.segment(key).to(device)
                norms[self.get_param_id(params[key])] = self._constant_buffered_norm2(segment)
        self.norm_for_param_grads = {key: norm.cpu() for key, norm in norms.items()}  # all on one device
