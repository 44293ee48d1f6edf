# SPDX-License-Identifier: Apache-2.0
"""The interface of the newest DeepSpeed: what TenCache reads and calls of it and does not subclass, and what TenCache's
optimizer and coordinator ask of DeepSpeed's and do not override. Changes override it for older versions.

DeepSpeed's coordinator keeps account of the modules that are in backward, and attributes to them frozen weights that a
recomputation gathers: a release of these is DeepSpeed's.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from tencache_ds.integration.adapters.versions import DeepSpeedClass


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


class NewestOptimizer(DeepSpeedClass):
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


class NewestCoordinator(DeepSpeedClass):
    """Over ``PartitionedParameterCoordinator``."""

    def backward_begins(self, module: Any) -> None:
        """A module is about to be in backward."""
        self._PartitionedParameterCoordinator__active_backward_submodules[module.ds_id] = module

    def backward_ends(self, module: Any) -> None:
        """A module is through backward."""
        self._PartitionedParameterCoordinator__active_backward_submodules.pop(module.ds_id, None)

    def releases_own_weights(self, module: Any, forward: bool) -> bool:
        """Whether a release of a module concerns its own weights only, and no error of the order of hooks."""
        if module.__dict__["ds_recompute_parameters"]:
            return False
        return forward or bool(self._PartitionedParameterCoordinator__active_backward_submodules)
