# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.16 brought: DeepCompile, and access to state that is on NVMe (``safe_get_*``, ``safe_set_*``)."""

from __future__ import annotations

from typing import Any

import torch

from tencache_ds.integration.adapters.versions import Change, DeepSpeedClass

_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"


class StateInMemory(DeepSpeedClass):
    """The optimizer before 0.16.9, whose access to state does not go through methods for one partition."""

    def get_full_hp_param(self, param: Any, optim_state_key: str | None = None) -> torch.Tensor | None:
        if not param.requires_grad:
            return None
        return self._fp32_state_allgather(param, self._get_fp32_opt_state_partition(param, True, optim_state_key)[0])

    def get_local_fp32_param(self, param: Any, optim_state_key: str | None = None) -> torch.Tensor | None:
        if not param.requires_grad:
            return None
        return self._get_fp32_opt_state_partition(param, True, optim_state_key)[0]

    def get_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None:
        if not param.requires_grad:
            return None
        return self._fp32_state_allgather(param, self._get_fp32_grad_state_partition(param, True)[0])

    def get_local_fp32_grad_for_param(self, param: Any) -> torch.Tensor | None:
        if not param.requires_grad:
            return None
        return self._get_fp32_grad_state_partition(param, True)[0]

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        return super()._get_fp32_opt_state_partition(param, optim_state_key)

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> tuple[torch.Tensor, int]:
        group, start, numel = self.grad_position[self.get_param_id(param)]
        if self.offload_optimizer:
            return self.fp32_partitioned_groups_flat[group].grad.narrow(0, start, numel), group
        return self._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition[param.ds_id].float(), group


class NoDeepCompile:
    """Calls before 0.16.6."""

    def uses_deepcompile(self, ds_config: Any) -> bool:
        return False


class PlainModules:
    """Calls before 0.16.5, whose engines put no hooks of their own on a module."""

    def engine_hooks(self, engine: Any) -> tuple[Any, ...]:
        return ()


CHANGES = (
    Change(
        "0.16.9",
        frozenset({
            f"{_STAGE3}._get_fp32_grad_state_partition",
            f"{_STAGE3}._get_fp32_opt_state_partition",
            f"{_STAGE3}.update_fp32_grad_for_param_vectorized",
        }),
        optimizer=StateInMemory,
    ),
    Change("0.16.6", calls=NoDeepCompile),
    Change("0.16.5", calls=PlainModules),
)  # fmt: skip
