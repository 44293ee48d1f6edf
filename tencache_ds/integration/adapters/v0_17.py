# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.17 brought: gradients of several dtypes for ``torch_autocast``, checkpoint engines that
write beside training, a config for ZenFlow."""

from __future__ import annotations

from typing import Any

import torch

from tencache_ds.integration.adapters.versions import Change, DeepSpeedClass

_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"


class NoZenFlow:
    """Calls before 0.17.5."""

    def uses_zenflow(self, zero_config: Any) -> bool:
        return False


class OneGradientDtype:
    """Calls before 0.17.2, which has no ``torch_autocast``."""

    def gather_dtype(self, param: Any, shard: torch.Tensor) -> torch.dtype:
        return shard.dtype

    def autocast(self, ds_config: Any) -> tuple[bool, str]:
        return False, "None"


class OneBucket(DeepSpeedClass):
    """The optimizer before 0.17.2."""

    torch_autocast_gradscaler = None

    def allocate_buckets(self, numel: int) -> None:
        from deepspeed.accelerator import get_accelerator

        from tencache_ds.tensors import empty

        buffer = empty(numel, self.dtype, get_accelerator().current_device_name())
        self._DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer = buffer

    def free_buckets(self) -> None:
        from tencache_ds.tensors import empty

        self._DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer = empty(0, self.dtype)

    def empty_buckets(self) -> None:
        self.params_in_ipg_bucket.clear()


class ArchivesAtOnce:
    """Calls before 0.17.1, where ``torch.save`` writes every checkpoint, in its zip format."""

    def half_precision(self, ds_config: Any) -> tuple[bool, bool]:
        return bool(ds_config.bfloat16_enabled), bool(ds_config.fp16_enabled)

    def writes_archives(self, checkpoint_engine: Any) -> bool:
        return True

    def commits_later(self, checkpoint_engine: Any) -> bool:
        return False


class ReleasesOfAnyPass(DeepSpeedClass):
    """The coordinator before 0.17.0, whose releases are the same in forward and backward passes."""

    def release_sub_module(self, submodule: Any, forward: bool = False) -> None:
        super().release_sub_module(submodule)


CHANGES = (
    Change("0.17.5", calls=NoZenFlow),
    Change(
        "0.17.2",
        frozenset({"deepspeed.runtime.zero.partition_parameters.get_allgather_dtype"}),
        calls=OneGradientDtype,
        optimizer=OneBucket,
    ),
    Change("0.17.1", calls=ArchivesAtOnce),
    Change("0.17.0", coordinator=ReleasesOfAnyPass),
)
