# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what CPU offload would have written, streamed from scratch storage, and its way back.

Stock NVMe offload copies its swap files beside the checkpoint and loses Adam's state on the way back. Here
``zero_to_fp32.py``, stock CPU offload and universal checkpoints read what is saved, and what they saved is read.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, LOSS_SCALER, OPTIMIZER_STATE_DICT

from tencache_ds.errors import TenCacheError
from tencache_ds.tiers.optimizer_state import MASTER


class CheckpointMixin:
    """Overrides of DeepSpeed's checkpoint methods for :class:`TenCacheZeroOptimizer_Stage3`."""

    def checkpoint_event_prologue(self) -> None:
        super().checkpoint_event_prologue()
        self._get_param_coordinator().hide_unused()
        # DeepSpeed saves and loads frozen weights through their shards: let it see the stored ones.
        self._mapped_frozen: list[Any] = [param for param in self._frozen_params() if param.nvme_swapper.stored(param)]
        self._frozen_may_have_changed = False
        for param in self._mapped_frozen:
            param.nvme_swapper.show_mapped(param)

    def checkpoint_event_epilogue(self) -> None:
        for param in getattr(self, "_mapped_frozen", []):
            param.nvme_swapper.hide_mapped(param, changed=self._frozen_may_have_changed)
        self._mapped_frozen = []
        super().checkpoint_event_epilogue()

    def _frozen_params(self) -> list[Any]:
        updated = {param.ds_id for group in self.fp16_groups for param in group}
        return [p for p in self.module.parameters() if p.ds_id not in updated and self._in_tier(p)]

    def _rigid_state_dict(self) -> dict[str, Any]:
        if self._state is None:
            return super()._rigid_state_dict()
        self._state.drain()
        flats = self.fp32_partitioned_groups_flat
        masters = []
        try:
            for index, placeholder in enumerate(flats):
                placeholder.data = self._saved_state(index, MASTER)
                masters.append(placeholder.data.detach().requires_grad_())
                for kind in self._optimizer_states.kinds(index):
                    self.optimizer.state[placeholder][kind] = self._saved_state(index, kind)
            saved = super()._rigid_state_dict()
            packed = saved[OPTIMIZER_STATE_DICT]
            # The packed state shares its dicts with the optimizer, which lets go of the tensors below.
            saved[OPTIMIZER_STATE_DICT] = packed | {
                "state": {key: dict(value) for key, value in packed["state"].items()}
            }
            saved[FP32_FLAT_GROUPS] = masters
        finally:
            for index in range(len(flats)):
                self._optimizer_states.show(index)
        return saved

    def _saved_state(self, index: int, kind: str) -> torch.Tensor:
        """One kind of state as a checkpoint takes it: mapped, or copied for an engine that writes during training."""
        value = self._state.whole(index, kind)
        deepspeed_engine = self._deepspeed_engine()
        checkpoint_engine = getattr(deepspeed_engine, "checkpoint_engine", None)
        in_background = checkpoint_engine is not None and checkpoint_engine.is_decoupled()
        return value.clone() if in_background else value

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        if self._state is None:
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)
            return
        self._frozen_may_have_changed = True
        masters = state_dict[FP32_FLAT_GROUPS]
        self._check_same_shape(masters)
        self.loss_scaler = state_dict[LOSS_SCALER]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        if load_optimizer_states:
            self._set_fp32_optimizer_param_groups()
            self.optimizer.load_state_dict(state_dict[OPTIMIZER_STATE_DICT])
            self._clear_fp32_optimizer_param_groups()
        for index, master in enumerate(masters):
            self._replace_master(index, master.detach(), with_state=load_optimizer_states)

    def _restore_from_bit16_weights(self) -> None:
        if self._state is None:
            super()._restore_from_bit16_weights()
            return
        self._frozen_may_have_changed = True
        self._drop_staged_weights()
        for index in range(len(self.fp16_groups)):
            self._copy_weights_to_master(index)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Loads a universal checkpoint's master weights and optimizer states."""
        if self._state is None:
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)
            return
        self._frozen_may_have_changed = True
        folder = os.path.join(checkpoint_dir, "zero")
        path = os.path.join(folder, "optimizer_state.pt")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} is missing: {checkpoint_dir} is not a universal checkpoint")
        saved = torch.load(path, weights_only=False)
        self._load_global_state_stage3(saved)
        step = saved[OPTIMIZER_STATE_DICT]["state"][0]["step"]
        for index, params in enumerate(self.fp16_groups):
            placeholder = self.fp32_partitioned_groups_flat[index]
            state = self.optimizer.state[placeholder] = {}
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                pieces = [
                    self.load_hp_checkpoint_state(os.path.join(folder, self.param_names[param]), key, param=param)
                    for param in params
                ]
                whole = torch.cat([piece.reshape(-1) for piece in pieces]).to(placeholder.dtype)
                if key == "fp32":
                    master = whole
                else:
                    state[key] = whole
            state["step"] = step
            self._replace_master(index, master, with_state=True)
        for group in self.optimizer.param_groups:
            for key, value in saved[OPTIMIZER_STATE_DICT]["param_groups"][0].items():
                group[key] = [] if key == "params" else value

    def _replace_master(self, index: int, master: torch.Tensor, *, with_state: bool) -> None:
        """Puts loaded master weights (and the states the optimizer holds for them) into the tier, then the weights."""
        self._drop_staged_weights()
        self._optimizer_states.replace(index, master, with_state=with_state)
        for chunk in self._state.chunks(index):
            self._publish(chunk, master[chunk.start : chunk.start + chunk.numel])

    def _check_same_shape(self, masters: list[torch.Tensor]) -> None:
        saved = [master.numel() for master in masters]
        here = [int(numel) for numel in self.fp16_partitioned_groups_flat_numel]
        if saved != here:
            raise TenCacheError(
                f"the checkpoint's sub-groups hold {saved} elements on this rank, the model's {here}: it was saved "
                'with another "sub_group_size", number of ranks or set of trainable parameters'
            )
