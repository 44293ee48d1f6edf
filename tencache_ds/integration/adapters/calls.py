# SPDX-License-Identifier: Apache-2.0
"""What TenCache reads and calls of DeepSpeed and does not subclass, in the newest version's way. Changes override."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def _imported(module: str, name: str) -> Any:
    """A function of DeepSpeed that older versions lack, for every weight: an import statement takes longer."""
    return getattr(importlib.import_module(module), name)


class Calls:
    """Functions and attributes of the installed DeepSpeed."""

    pow_when_repeated = False
    """Whether the CPU Adam op calls ``pow`` for all sub-groups of a step but the first: see
    :class:`~tencache_ds.planning.adam_scalars.BetaPowers`."""

    # The config

    def half_precision(self, ds_config: Any) -> tuple[bool, bool]:
        """Whether ``bf16`` and ``fp16`` are enabled."""
        return bool(ds_config.bfloat16_config.enabled), bool(ds_config.float16_config.enabled)

    def autocast(self, ds_config: Any) -> tuple[bool, str]:
        """Whether ``torch_autocast`` is enabled, and its dtype."""
        return bool(ds_config.torch_autocast_enabled), str(ds_config.torch_autocast_dtype)

    def uses_zenflow(self, zero_config: Any) -> bool:
        """Whether ZenFlow is on."""
        return zero_config.zenflow is not None

    def uses_super_offload(self, offload_optimizer: Any) -> bool:
        """Whether SuperOffload is on."""
        return bool(offload_optimizer.super_offload)

    def uses_deepcompile(self, ds_config: Any) -> bool:
        """Whether DeepCompile is on."""
        return bool(ds_config.compile_config.deepcompile)

    def gathers_one_by_one(self, zero_config: Any) -> bool:
        """Whether weights are to be gathered one after the other."""
        return bool(zero_config.allgather_sequential)

    # Functions

    def norm_dtype(self) -> torch.dtype:
        """In which norms of gradients are computed."""
        return _imported("deepspeed.runtime.zero.utils", "get_norm_dtype")()

    def gather_dtype(self, param: Any, shard: torch.Tensor) -> torch.dtype:
        """In which a weight is gathered."""
        return _imported("deepspeed.runtime.zero.partition_parameters", "get_allgather_dtype")(param, shard)

    def forget_contexts(self, param: Any) -> None:
        """A ``GatheredParameters`` that has failed to gather a parameter does not hold it."""
        from deepspeed.runtime.zero.partition_parameters import DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR

        param.__dict__.pop(DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR, None)

    def complete_gathers(self, init: Any) -> None:
        """Has a gather of several parameters return when all of them are there.

        Args:
            init: the class ``deepspeed.zero.Init``.
        """

    def import_optimizers(self) -> None:
        """Imports the modules with subclasses of the ZeRO-3 optimizer."""
        importlib.import_module("deepspeed.runtime.superoffload.superoffload_stage3")

    # The engine

    def engine_hooks(self, engine: Any) -> tuple[Any, ...]:
        """Handles of the hooks that a ``DeepSpeedEngine`` has put on its module."""
        return engine.module_forward_pre_hook, engine.module_forward_post_hook

    def step_samples(self, engine: Any) -> int:
        """Samples of the optimizer step at hand, of all ranks."""
        batch: int = engine.train_batch_size()
        if engine.managed_gradient_accumulation():
            return batch
        return int(batch // engine.gradient_accumulation_steps() * engine._unmanaged_backward_count)

    def forget_micro_steps(self, engine: Any) -> None:
        """The next micro-step is the first one of a step."""
        engine.micro_steps = 0
        engine._running_engine_step = False

    # Checkpoint engines

    def writes_archives(self, checkpoint_engine: Any) -> bool:
        """Whether a ``TorchCheckpointEngine`` writes torch's zip format."""
        return bool(checkpoint_engine.zipfile_serialization)

    def commits_later(self, checkpoint_engine: Any) -> bool:
        """Whether a checkpoint is committed at the end of a later step."""
        return bool(checkpoint_engine.is_decoupled())

    def tag_of(self, commit_info: Any) -> str:
        """The tag of a checkpoint that is committed."""
        return str(commit_info.tag)

    def forget_commit(self, checkpoint_engine: Any) -> None:
        """A checkpoint that would be committed later is not committed."""
        checkpoint_engine.commit_info = None
