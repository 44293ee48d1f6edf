# SPDX-License-Identifier: Apache-2.0
"""What TenCache's ZeRO-3 optimizer asks of DeepSpeed's and does not override, in the newest version's way."""

from __future__ import annotations

from typing import Any

import torch


class NewestOptimizer:
    """Over ``DeepSpeedZeroOptimizer_Stage3``. Subclasses define ``forget_interrupted_backward``."""

    def at_boundary(self) -> bool:
        """Whether this micro-step is the last one of a step."""
        return self.is_gradient_accumulation_boundary()

    def note_reduced(self, param: Any) -> None:
        """The gradient of a parameter has been reduced in this micro-step."""
        self._offload_boundary_param_ids.add(param.ds_id)

    def clear_backward_seen_flag(self) -> None:
        """A forward pass begins."""
        if self._backward_hook_state.backward_active_depth > 0:
            self.forget_interrupted_backward()
        super().clear_backward_seen_flag()

    def end_backward(self) -> None:
        """No backward pass is under way, whatever the flags of an interrupted one say."""
        self._backward_hook_state.backward_active_depth = 0

    def allocate_buckets(self, numel: int) -> None:
        """Allocates the buckets of gradients, of ``numel`` elements each."""
        from deepspeed.accelerator import get_accelerator

        from tencache_ds.tensors import empty

        for dtype, bucket in self.ipg_buckets.items():
            bucket.buffer = empty(numel, dtype, get_accelerator().current_device_name())

    def free_buckets(self) -> None:
        """Frees the memory of the buckets, which are empty, until they are allocated again."""
        for bucket in self.ipg_buckets.values():
            bucket.buffer = None

    def empty_buckets(self) -> None:
        """Forgets the gradients in buckets."""
        for bucket in self.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0

    def name_of(self, param: Any) -> str:
        """A parameter's name in the model."""
        return str(self.param_names[param])

    def universal_state(self, folder: str, key: str, param: Any) -> torch.Tensor:
        """This rank's partition of a parameter's state in a universal checkpoint, 1-D.

        Args:
            folder: of the parameter.
            key: kind of state.
            param: the parameter.
        """
        return self.load_hp_checkpoint_state(folder, key, param=param)
