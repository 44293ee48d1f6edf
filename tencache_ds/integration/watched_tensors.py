# SPDX-License-Identifier: Apache-2.0
"""Tensors that scripts may look at while they do not have their values, and DeepSpeed's functions for that: full and
local master weights, optimizer states and gradients (``safe_get_*`` and ``safe_set_*``).

``param.ds_tensor`` is DeepSpeed's private shard of a weight. Scripts read and write it, for averages of weights for
instance. During a step that continues in the background it waits for the weight's update; while the shard is on NVMe it
says what to use instead. For as long it is of another class, so that nothing else is any slower.

``optimizer.state`` waits for the end of a step that may still be under way.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._pytree import tree_leaves

from tencache_ds.errors import TenCacheError
from tencache_ds.integration.adapters.versions import DeepSpeedClass
from tencache_ds.tensors import zeros
from tencache_ds.tiers.sub_group import MASTER, MOMENTUM

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad", "grad_fn",
    "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "_base", "_version",
)  # fmt: skip
_METHODS = (
    "numel", "nelement", "size", "dim", "stride", "element_size", "is_contiguous", "is_floating_point", "is_complex",
    "is_signed", "is_pinned", "get_device", "data_ptr", "storage_offset", "untyped_storage", "record_stream",
    "requires_grad_", "__len__", "__hash__", "__repr__",
)  # fmt: skip
_WITHOUT_VALUES = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(torch.Tensor, name).__set__ for name in ("data", "grad", "requires_grad")),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""What neither reads nor writes a shard's values."""

_plain: Any = collections.defaultdict


class WatchedShard(torch.Tensor):
    """A shard that :attr:`before_use` is called for, before its values are read or written."""

    before_use: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See PyTorch's documentation."""
        kwargs = kwargs or {}
        if func not in _WITHOUT_VALUES:
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, WatchedShard):
                    each.before_use()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


class PendingShard(WatchedShard):
    """A shard in memory whose update may be under way."""


class AbsentShard(WatchedShard):
    """The placeholder of a shard on NVMe."""


def watch_update(params: Iterable[Any], wait: Callable[[Sequence[Any]], None]) -> None:
    """The update of weights is about to begin; ``wait`` returns when some of them have their new values, and says so to
    :func:`updated`."""
    for param in params:
        if type(param.ds_tensor) is torch.Tensor:
            shard: Any = param.ds_tensor
            shard.before_use = functools.partial(wait, [param])
            _become(shard, PendingShard)


def updated(params: Iterable[Any]) -> None:
    """Weights have their new values."""
    for param in params:
        if type(param.ds_tensor) is PendingShard:
            _become(param.ds_tensor, torch.Tensor)


def show(param: Any, values: torch.Tensor) -> None:
    """The shard has these values."""
    _become(param.ds_tensor, torch.Tensor)
    param.ds_tensor.data = values


def show_absent(param: Any, stand_in: torch.Tensor) -> None:
    """The shard is on NVMe, with this tensor in its place."""
    show(param, stand_in)
    param.ds_tensor.before_use = functools.partial(_refuse, param)
    _become(param.ds_tensor, AbsentShard)


def values_of(param: Any) -> torch.Tensor:
    """The shard as it is now, for those who know what they may do with it."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.ds_tensor.data


def _become(shard: Any, kind: type[torch.Tensor]) -> None:
    shard.__class__ = kind


def _refuse(param: Any) -> None:
    raise TenCacheError(
        f"ds_tensor of the weight of shape {tuple(param.ds_shape)} (ds_id {param.ds_id}) has no values now: its shard "
        "is on NVMe. Read the weight within deepspeed.zero.GatheredParameters([param]), or change it there with "
        "modifier_rank=0; deepspeed.utils.safe_get_local_fp32_param(param) gives this rank's part of the master weight"
    )


def _after_step(look: Callable[..., Any]) -> Any:
    @functools.wraps(look)
    def waiting(self: WatchedStates, *args: Any, **kwargs: Any) -> Any:
        self._finish()
        return look(self, *args, **kwargs)

    return waiting


def _of_a_copy(look: Callable[..., Any]) -> Any:
    return _after_step(functools.wraps(look)(lambda self, *args: look(self.plain(), *args)))


class WatchedStates(collections.defaultdict[Any, Any]):
    """A torch optimizer's ``state`` that waits for the step before it shows or changes anything.

    Copies are plain ones. Only ``in``, ``len`` and ``bool`` do not wait: which parameters have states is known at once.

    Args:
        states: what it holds.
        finish: called before each look; returns when the step is over.
    """

    def __init__(self, states: Any, finish: Callable[[], None]) -> None:
        super().__init__(dict, states)
        self._finish = finish

    def plain(self) -> collections.defaultdict[Any, Any]:
        """The same, for those who need not wait any more."""
        return collections.defaultdict(dict, super().items())

    __getitem__ = _after_step(_plain.__getitem__)
    __setitem__ = _after_step(_plain.__setitem__)
    __delitem__ = _after_step(_plain.__delitem__)
    __iter__ = _after_step(_plain.__iter__)  # with it, dict(state) and {**state} wait too
    __reversed__ = _after_step(_plain.__reversed__)
    __ior__ = _after_step(_plain.__ior__)
    get = _after_step(_plain.get)
    keys = _after_step(_plain.keys)
    values = _after_step(_plain.values)
    items = _after_step(_plain.items)
    pop = _after_step(_plain.pop)
    popitem = _after_step(_plain.popitem)
    setdefault = _after_step(_plain.setdefault)
    update = _after_step(_plain.update)
    clear = _after_step(_plain.clear)

    # DeepSpeed and torch know a defaultdict: so do those who compare, print or pickle it.
    copy = _of_a_copy(_plain.copy)
    __copy__ = _of_a_copy(_plain.__copy__)
    __or__ = _of_a_copy(_plain.__or__)
    __ror__ = _of_a_copy(_plain.__ror__)
    __eq__ = _of_a_copy(_plain.__eq__)
    __ne__ = _of_a_copy(_plain.__ne__)
    __repr__ = _of_a_copy(_plain.__repr__)
    __reduce__ = _of_a_copy(_plain.__reduce__)
    __hash__ = None  # type: ignore[assignment]
    fromkeys = _plain.fromkeys


# DeepSpeed's functions for access


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
