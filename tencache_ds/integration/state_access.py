# SPDX-License-Identifier: Apache-2.0
"""``safe_get_*`` and ``safe_set_*`` on TenCache's tiers: full and local master weights, optimizer states and
gradients.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.tensors import zeros
from tencache_ds.tiers.kinds import MASTER, MOMENTUM


class StateAccessMixin(DeepSpeedClass):
    """Overrides of DeepSpeed's state-access methods for :class:`TenCacheZeroOptimizer_Stage3`.

    DeepSpeed's public functions gather what these return per rank; they are collective.
    """

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        self._require_engine()
        if self._state is None:
            return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        group, start, numel = self.grad_position[self.get_param_id(param)]
        kind = MASTER if optim_state_key is None else optim_state_key
        if kind == MOMENTUM and self._momentum is not None and self._momentum.begun(group):
            return self._momentum.part(param.ds_id), group
        if kind != MASTER and kind not in self._optimizer_states.kinds(group):
            # As with CPU offload a KeyError when there is no such state, or none yet: before the first step.
            value = self.optimizer.state.get(self.fp32_partitioned_groups_flat[group], {})[kind]
            raise KeyError(f"{kind!r} is not kept per element (its value is {value!r})")
        return self._state.read(group, kind, start, numel), group

    def _write_state_partition(self, value: torch.Tensor, param: Any, optim_state_key: str | None) -> None:
        partition, group = self._get_fp32_opt_state_partition(param, True, optim_state_key)
        _, start, _ = self.grad_position[self.get_param_id(param)]
        partition.copy_(value)
        with self.step_guard.change():
            if optim_state_key == MOMENTUM and self._momentum is not None:
                self._momentum.set_part(param.ds_id, partition)
            else:
                self._state.write(group, {optim_state_key or MASTER: partition}, start)

    def set_full_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if self._state is None:
            super().set_full_hp_param(value, param, optim_state_key)
            return
        if not param.requires_grad:
            return
        if value.numel() != param.ds_numel:
            raise ValueError(f"the value has {value.numel()} elements, the parameter {param.ds_numel}")
        self._write_state_partition(self._own_partition(value, param), param, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: Any, optim_state_key: str | None = None) -> None:
        if self._state is None:
            super().set_local_hp_param(value, param, optim_state_key)
            return
        if not param.requires_grad:
            return
        self._check_local(value, param)
        self._write_state_partition(value.flatten(), param, optim_state_key)

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        self._require_engine()
        if self._gradients is None:
            return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        self._await_gradients()
        group, _, _ = self.grad_position[self.get_param_id(param)]
        return self._gradients.value(param.ds_id), group

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if self._gradients is None:
            super().set_fp32_grad_for_param(value, param)
            return
        if param.requires_grad:
            self._await_gradients()
            self._gradients.replace(param.ds_id, self._own_partition(value, param))

    def set_local_grad_for_param(self, value: torch.Tensor, param: Any) -> None:
        if self._gradients is None:
            super().set_local_grad_for_param(value, param)
            return
        if param.requires_grad:
            self._check_local(value, param)
            self._await_gradients()
            self.norm_for_param_grads[self.get_param_id(param)] = self._constant_buffered_norm2(value)
            self._gradients.replace(param.ds_id, value.flatten())

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, Any], torch.Tensor], param_list: list[Any]
    ) -> None:
        if self._gradients is None:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
            return
        for param in param_list:
            if param.requires_grad:
                value = self.get_fp32_grad_for_param(param)
                self.set_fp32_grad_for_param(update_func(value, param), param)

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, torch.Tensor]]:
        if self._gradients is None:
            return super().get_fp32_grad_partitions()
        self._await_gradients()
        partitions: dict[int, dict[int, torch.Tensor]] = collections.defaultdict(dict)
        for params in self.fp16_groups:
            for index, param in enumerate(params):
                group, _, _ = self.grad_position[self.get_param_id(param)]
                partitions[group][index] = self._gradients.value(param.ds_id)
        return partitions

    def _own_partition(self, value: torch.Tensor, param: Any) -> torch.Tensor:
        """This rank's partition of a full value, padded with zeros as the partition is."""
        numel = param.partition_numel()
        start = min(numel * self._get_param_partition_rank(param), value.numel())
        real = min(numel, value.numel() - start)
        partition = zeros(numel, value.dtype)
        partition[:real].copy_(value.flatten()[start : start + real])
        return partition

    @staticmethod
    def _check_local(value: torch.Tensor, param: Any) -> None:
        if value.numel() != param.partition_numel():
            raise ValueError(
                f"the local value has {value.numel()} elements, this rank's partition {param.partition_numel()}"
            )

    def _await_gradients(self) -> None:
        self._finish_step()
        if not get_accelerator().resolves_data_dependency():
            self.reduce_and_partition_stream.synchronize()
