# SPDX-License-Identifier: Apache-2.0
"""The optimizers that DeepSpeed may wrap: how they are updated, the states they keep, and the owner of these for each
sub-group.

A state with one value per element lives in the tier, next to the master weights. Everything else (step numbers,
scalars, factored states) stays in ``optimizer.state`` under the sub-group's placeholder, the flat tensor by which the
optimizer knows the sub-group.

Between two steps a user sees there: for a sub-group in host memory the same as with stock CPU offload, the placeholder
being the master weights and ``optimizer.state`` holding the tier's own tensors; for one on NVMe only the states that
are not per element, under an empty placeholder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion
from torch.optim import optimizer as torch_optimizer

from tencache_ds.errors import TenCacheError
from tencache_ds.tensors import empty
from tencache_ds.tiers.kinds import MASTER
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import Kinds

_Groups = list[dict[str, Any]]
_KINDS: Mapping[type, Callable[[_Groups], tuple[str, ...]]] = {
    DeepSpeedCPUAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    DeepSpeedCPULion: lambda groups: ("exp_avg", "exp_avg_sq"),  # the second is created, and never used
    DeepSpeedCPUAdagrad: lambda groups: ("exp_avg_sq",),
    torch.optim.Adam: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.AdamW: lambda groups: ("exp_avg", "exp_avg_sq", *_where(groups, "amsgrad", "max_exp_avg_sq")),
    torch.optim.NAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: lambda groups: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: lambda groups: ("exp_avg", "exp_inf"),
    torch.optim.Adadelta: lambda groups: ("square_avg", "acc_delta"),
    torch.optim.Adagrad: lambda groups: ("sum",),
    torch.optim.ASGD: lambda groups: ("ax",),
    torch.optim.Rprop: lambda groups: ("prev", "step_size"),
    torch.optim.SGD: lambda groups: _where(groups, "momentum", "momentum_buffer"),
    torch.optim.RMSprop: lambda groups: (
        "square_avg",
        *_where(groups, "momentum", "momentum_buffer"),
        *_where(groups, "centered", "grad_avg"),
    ),
}


def known_kinds(optimizer: Any, master_dtype: torch.dtype) -> Kinds:
    """``(kind, dtype)`` of the states an optimizer is known to keep per element, besides the master weight.

    Of optimizers not listed they turn up at the first step; knowing them reserves their space at the start.
    """
    kinds_of = _KINDS.get(type(optimizer))
    kinds = kinds_of(optimizer.param_groups) if kinds_of is not None else ()
    in_fp32 = getattr(optimizer, "fp32_optimizer_states", False)
    return tuple((kind, torch.float32 if in_fp32 else master_dtype) for kind in kinds)


def step_is_watched(optimizer: Any) -> bool:
    """Whether something observes ``optimizer.step()``: a step hook, its own or a global one, or a replacement of
    ``step``.

    The function that an LR scheduler puts there only notes that ``step`` was called.
    """
    hooks = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    )
    step = optimizer.step
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return any(hooks) or getattr(step, "__func__", step) is not type(optimizer).step


def _where(groups: _Groups, option: str, kind: str) -> tuple[str, ...]:
    """``kind`` if an option of some parameter group asks for it."""
    return (kind,) if any(group.get(option) for group in groups) else ()


class OptimizerStates:
    """Which states each sub-group has, and where. Used by the training thread."""

    def __init__(
        self,
        optimizer: Any,
        tier: OptimizerStateTier,
        placeholders: Sequence[torch.Tensor],
        needed: Callable[[int], frozenset[str]] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            optimizer: the torch optimizer DeepSpeed wraps.
            tier: where master weights and per-element states live.
            placeholders: per sub-group, the tensor under which the optimizer knows it.
            needed: names of the states that the update of a sub-group cannot do without once it has begun; None if not
                known.
            shared: states that the optimizer makes in a sub-group's first step, and never changes.
        """
        self._optimizer = optimizer
        self._tier = tier
        self._placeholders = placeholders
        self._needed = needed or (lambda sub_group: frozenset())
        self._shared = shared or {}
        self._kinds: list[tuple[str, ...]] = [() for _ in placeholders]
        # ZeRO has replaced the parameters that the optimizer was created with by placeholders.
        for key in [key for key in optimizer.state if torch.is_tensor(key)]:
            del optimizer.state[key]
        for sub_group in range(len(placeholders)):
            self._begin(sub_group)
            self.show(sub_group)

    def kinds(self, sub_group: int) -> tuple[str, ...]:
        """The per-element states that the optimizer has created for a sub-group, in a step or by loading.

        The tier may have room for more: those hold zeros that mean nothing yet.
        """
        return self._kinds[sub_group]

    def started(self, sub_group: int) -> bool:
        """Whether the optimizer has any state for a sub-group."""
        return bool(self._kinds[sub_group]) or bool(self._optimizer.state.get(self._placeholders[sub_group]))

    def n_steps(self, sub_group: int) -> int:
        """How many steps the optimizer has counted of a sub-group."""
        return int(self._optimizer.state.get(self._placeholders[sub_group], {}).get("step", 0))

    def begin_step(self, sub_group: int) -> Any:
        """Counts a step of a sub-group whose states are zero before the first one; returns the step's number, 0 of one
        whose update does not depend on it."""
        if "step" not in self._needed(sub_group):
            return 0
        state = self._optimizer.state[self._placeholders[sub_group]]
        if "step" not in state:
            state.update(self._shared)
        state["step"] = state.get("step", 0) + 1
        if not self._kinds[sub_group]:
            self._kinds[sub_group] = self._tier.kinds(sub_group)[1:]
            self.show(sub_group)
        return state["step"]

    @contextmanager
    def whole(self, sub_group: int) -> Iterator[torch.Tensor]:
        """The sub-group's placeholder, its data the master weights and its states in ``optimizer.state``, whole.

        The contents at the end are the sub-group's state. Nothing of a sub-group in host memory is copied.

        Raises:
            SpaceError: NVMe has no space for the states that the optimizer created.
            StorageError: a read failed.
        """
        placeholder, values = self._placeholders[sub_group], self._tier.borrow(sub_group)
        try:
            placeholder.data = values[MASTER]
            self._optimizer.state[placeholder].update((kind, values[kind]) for kind in self._kinds[sub_group])
            del values
            yield placeholder
            states = self._per_element(sub_group)
            self._tier.keep(sub_group, {MASTER: placeholder.data} | states)
            self._kinds[sub_group] = tuple(states)
        finally:
            self.show(sub_group)

    def replace(self, sub_group: int, master: torch.Tensor, *, with_state: bool) -> None:
        """Puts loaded values in the place of a sub-group's.

        Args:
            sub_group: which one.
            master: the master weights, 1-D, in any float dtype.
            with_state: what ``optimizer.state`` holds for the sub-group now was loaded as well, and is all the state
                it has: every other is as if no step had been taken. Without, the states stay as they are.

        Raises:
            SpaceError: the loaded states need more room on NVMe than there is.
            TenCacheError: the loaded states are those of another optimizer.
        """
        master = master.detach().to(self._placeholders[sub_group].dtype)
        if not with_state:
            self._tier.write(sub_group, {MASTER: master})
            return
        loaded = self._optimizer.state.get(self._placeholders[sub_group], {})
        missing = self._needed(sub_group) - set(loaded)
        if loaded and missing:
            raise TenCacheError(
                f"the loaded optimizer state of sub-group {sub_group} holds {sorted(loaded)}, but "
                f"{type(self._optimizer).__name__} needs {sorted(missing)} too: it was saved with another optimizer. "
                "Load it with load_optimizer_states=False, or use the optimizer it was saved with."
            )
        states = self._per_element(sub_group)
        self._tier.replace(sub_group, {MASTER: master} | states)
        self._kinds[sub_group] = tuple(states)
        self._begin(sub_group)
        self.show(sub_group)

    def _per_element(self, sub_group: int) -> dict[str, torch.Tensor]:
        """The entries of ``optimizer.state`` with one value per element of a sub-group, and the scales of these that
        the tier keeps.

        A state that has the name of the tier's master weights stays where it is.
        """
        state = self._optimizer.state.get(self._placeholders[sub_group], {})
        return {
            kind: value.detach()
            for kind, value in state.items()
            if torch.is_tensor(value)
            and value.shape == (self._tier.numel(sub_group, kind),)
            and value.layout is torch.strided
            and kind != MASTER
        }

    def show(self, sub_group: int) -> None:
        """Sets the states visible between two steps under the placeholder."""
        placeholder = self._placeholders[sub_group]
        placeholder.grad = None
        if self._tier.whole(sub_group):
            values = self._tier.borrow(sub_group)
            placeholder.data = values[MASTER]
            if self._kinds[sub_group]:
                self._optimizer.state[placeholder].update((kind, values[kind]) for kind in self._kinds[sub_group])
            return
        state = self._optimizer.state.get(placeholder, {})
        for kind in self._per_element(sub_group):
            del state[kind]
        placeholder.data = empty(0, placeholder.dtype)

    def _begin(self, sub_group: int) -> None:
        """torch's Adagrad creates its states in its constructor, for parameters that ZeRO has replaced since."""
        if not isinstance(self._optimizer, torch.optim.Adagrad) or self.started(sub_group):
            return
        with self.whole(sub_group) as placeholder:
            fresh = torch.optim.Adagrad([placeholder], **self._optimizer.defaults)
            self._optimizer.state[placeholder] = fresh.state[placeholder]
