# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed 0.18 brought: backward passes that a script begins with ``loss.backward()``, master weights of other
dtypes, SuperOffload, universal checkpoints of several sub-groups, ZenFlow."""

from __future__ import annotations

from typing import Any

import torch

from tencache_ds.integration.adapters.versions import Change, DeepSpeedClass

_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"


class WholeFetches(DeepSpeedClass):
    """The coordinator before 0.18.6."""

    def _fetch_sub_module_impl(self, module: Any, forward: bool, is_leaf: bool) -> None:
        super().fetch_sub_module(module, forward)


class CommitsByTag:
    """Calls before 0.18.4."""

    def tag_of(self, commit_info: Any) -> str:
        return str(commit_info)


class UnseenBackward(DeepSpeedClass):
    """The optimizer before 0.18.5, which does not know that a backward pass was interrupted."""

    _backward_under_way = False

    def backward_prologue(self) -> None:
        if self._backward_under_way:
            self.forget_interrupted_backward()
        self._backward_under_way = True
        super().backward_prologue()

    def independent_gradient_partition_epilogue(self) -> None:
        super().independent_gradient_partition_epilogue()
        self._backward_under_way = False

    def end_backward(self) -> None:
        self._backward_under_way = False


class ParallelGathers:
    """Calls before 0.18.5."""

    def gathers_one_by_one(self, zero_config: Any) -> bool:
        return False


class BackwardOfOptimizer(DeepSpeedClass):
    """The optimizer before 0.18.3, whose ``backward`` is the pass."""

    master_weights_and_grads_dtype = torch.float32

    def backward_prologue(self) -> None:
        """The start of a pass."""

    def backward_epilogue(self) -> None:
        """Its end."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self.backward_prologue()
        super().backward(*args, **kwargs)
        self.backward_epilogue()


class NoZenFlow:
    """The optimizer before 0.18.1."""

    zenflow = False


class OneOptimizer:
    """Calls before 0.18.0."""

    def uses_super_offload(self, offload_optimizer: Any) -> bool:
        return False

    def import_optimizers(self) -> None:
        pass


class UnnamedParameters(DeepSpeedClass):
    """The optimizer before 0.18.0."""

    def name_of(self, param: Any) -> str:
        return str(self._deepspeed_engine().param_names[param])


CHANGES = (
    Change("0.18.6", coordinator=WholeFetches),
    Change(
        "0.18.5",
        frozenset({f"{_STAGE3}.clear_backward_seen_flag"}),
        calls=ParallelGathers,
        optimizer=UnseenBackward,
    ),
    Change("0.18.4", calls=CommitsByTag),
    Change(
        "0.18.3",
        frozenset({f"{_STAGE3}.backward_prologue", f"{_STAGE3}.backward_epilogue"}),
        optimizer=BackwardOfOptimizer,
    ),
    Change("0.18.1", optimizer=NoZenFlow),
    Change(
        "0.18.0",
        frozenset({f"{_STAGE3}.load_hp_checkpoint_state_from_checkpoint_dir_stage3"}),
        calls=OneOptimizer,
        optimizer=UnnamedParameters,
    ),
)
