# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.19 brought: parameters of several process groups, an account of modules in backward, and of
parameters in ``GatheredParameters``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from tencache_ds.integration.adapters.versions import Change, DeepSpeedClass

_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator"
_ENGINE = "deepspeed.runtime.engine.DeepSpeedEngine"


class GathersOfLastOnly:
    """Calls before 0.19.8, which waits for the last one of the collectives of several parameters. On a device that is
    enough; gloo's, on a CPU, do not end in order: weights were read before they were there, and changes overwritten."""

    def complete_gathers(self, init: Any) -> None:
        from deepspeed.accelerator import get_accelerator

        gather = init._allgather_params_coalesced
        if not get_accelerator().is_synchronized_device():
            return

        @functools.wraps(gather)
        def one_by_one(self: Any, param_list: Sequence[Any], hierarchy: Any = 0, quantize: bool = False) -> None:
            for param in param_list:
                gather(self, [param], hierarchy, quantize)

        init._allgather_params_coalesced = one_by_one


class NormsInDouble:
    """Calls before 0.19.6."""

    def norm_dtype(self) -> torch.dtype:
        return torch.double


class BoundaryAttribute(DeepSpeedClass):
    """The optimizer before 0.19.5."""

    def at_boundary(self) -> bool:
        return bool(self.is_gradient_accumulation_boundary)

    def note_reduced(self, param: Any) -> None:
        """Every gradient is final at the boundary."""


class ManagedSteps:
    """Calls before 0.19.4, where DeepSpeed always counts micro-steps itself, and does not count contexts."""

    def forget_contexts(self, param: Any) -> None:
        pass

    def step_samples(self, engine: Any) -> int:
        return int(engine.train_batch_size())

    def forget_micro_steps(self, engine: Any) -> None:
        engine.micro_steps = 0


class OneProcessGroup(DeepSpeedClass):
    """The optimizer before 0.19.3, where all parameters are partitioned over the same ranks."""

    def _get_param_partition_group(self, param: Any) -> Any:
        return self.dp_process_group

    def _get_param_partition_rank(self, param: Any) -> int:
        from deepspeed import comm as dist

        return int(dist.get_rank(self.dp_process_group))

    def universal_state(self, folder: str, key: str, param: Any) -> torch.Tensor:
        return self.load_hp_checkpoint_state(folder, key)


class UncountedBackward:
    """The coordinator before 0.19.3, where a recomputed module releases what it has gathered."""

    def backward_begins(self, module: Any) -> None:
        pass

    def backward_ends(self, module: Any) -> None:
        pass

    def releases_own_weights(self, module: Any, forward: bool) -> bool:
        return True


class StaleFetches(DeepSpeedClass):
    """The coordinator before 0.19.2."""

    def _invalidate_trace(self) -> None:
        super()._invalidate_trace()
        self._PartitionedParameterCoordinator__step_id_module_fetched_for.clear()  # or recording may fail (IndexError)


class PowersOfJumps:
    """Calls before 0.19.0."""

    pow_when_repeated = True


CHANGES = (
    Change("0.19.8", calls=GathersOfLastOnly),
    Change("0.19.6", frozenset({"deepspeed.runtime.zero.utils.get_norm_dtype"}), calls=NormsInDouble),
    Change("0.19.5", frozenset({f"{_STAGE3}._offload_grad_partition_at_boundary"}), optimizer=BoundaryAttribute),
    Change(
        "0.19.4",
        frozenset({
            f"{_ENGINE}.managed_gradient_accumulation",
            "deepspeed.runtime.zero.partition_parameters.DS_Z3_GATHERED_PARAM_CONTEXT_DEPTH_ATTR",
        }),
        calls=ManagedSteps,
    ),
    Change(
        "0.19.3",
        frozenset({
            f"{_STAGE3}._get_param_partition_group",
            f"{_STAGE3}._get_param_partition_rank",
            f"{_STAGE3}.load_hp_checkpoint_state",
            f"{_STAGE3}.load_module_checkpoint_state_from_checkpoint_dir_stage3",
            f"{_COORDINATOR}._fetch_sub_module_impl",
            f"{_COORDINATOR}.release_sub_module",
        }),
        optimizer=OneProcessGroup,
        coordinator=UncountedBackward,
    ),
    Change("0.19.2", coordinator=StaleFetches),
    Change("0.19.0", calls=PowersOfJumps),
)  # fmt: skip
