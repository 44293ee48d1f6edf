# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's hooks on modules whose weights stay gathered, where they have nothing to do.

Four hooks on every module gather its weights, release them, and prepare the backward pass. In generation, where the
arithmetic of a module may take ten microseconds, they take several times as long as everything else; in training with
small batches, as long as everything else. In training, what two of them add to the graph stays ([Note: the order of
sums] in :mod:`.module_hooks`).

Measured: a token of a Llama of 16 layers and width 256 takes 26 ms of a CPU's time, 94 ms with the hooks. A step of
1.3 B parameters, all in the memory of an H200, takes 0.197 s, stock ZeRO-3 without offload 0.374 s; with the hooks, on
another host, 0.630 s, stock 0.555 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from tencache_ds.host_path.module_hooks import Hooks, unchanged
from tencache_ds.integration.hooked_modules import KEEPER, is_compiled, is_free, params_of, uncompiled
from tencache_ds.placement.memory_watch import Patience

if TYPE_CHECKING:
    from tencache_ds.integration.model_weights import GatheredWeights
    from tencache_ds.tiers.update import UpdateGate

FIRST_PATIENCE, LONGEST_PATIENCE = 1, 32
"""Steps in which no user has gathered weights before hooks are taken off, the first time and at most."""

MOST_INCOMPLETE = 4
"""Steps in which DeepSpeed has not completed its order of modules."""


class SuspendedHooks:
    """Weights that stay gathered, and DeepSpeed's hooks of modules that have no others: taken off until one of these
    weights is released.

    Used by the thread that computes, on one rank. Hooks are taken off between passes. When a weight is released between
    passes, everything is as DeepSpeed would have it: all hooks, its order of modules, no weight gathered. Within a pass
    only the hooks on modules with the weight come back, none of which is being executed: only modules without weights
    or without submodules are suspended, and none with weights is being executed while another one begins. What was
    computed without hooks is not prepared for a backward pass that gathers: :meth:`begin_backward` gathers what was
    released since.

    [Note: updates of weights that stay gathered] No gather waits for their update behind the forward pass. In the place
    of DeepSpeed's first hook, a module has one that does (:meth:`UpdateGate.wait_for`); with DeepSpeed's hooks, its
    fetch does. DeepSpeed also gathers where something looks a weight up that is not gathered; here that waits, too. In
    a compiled model, where this would break graphs, these weights are updated before the step returns
    (:meth:`modules_wait_for`). So are the small ones that DeepSpeed keeps gathered anyway.

    Args:
        offload: a ``DeepSpeedZeRoOffload``, whose hooks.
        weights: which can stay.
        relieve: called at the start of each block (child of a ``ModuleList``) within a pass, to which DeepSpeed's hooks
            no longer lead; None where nothing is to be called.
        trains: whether there are backward passes, in which blocks may be recomputed.
        gate: of the weights that are updated behind a forward pass; None where none are.
    """

    def __init__(
        self,
        offload: Any,
        weights: GatheredWeights,
        relieve: Callable[[], None] | None = None,
        *,
        trains: bool = True,
        gate: UpdateGate | None = None,
    ) -> None:
        self._offload = offload
        self._weights = weights
        self._trains = trains
        self._gate = gate
        self._modules_wait = False
        self._params: list[Any] = []  # of the model, at the time of suspend()
        self._requires_grad: list[bool] = []  # of each, then
        self._suspended: dict[torch.nn.Module, list[_Taken]] = {}
        self._kept: dict[int, _Kept] = {}  # by id of the parameter
        self._released: dict[int, Any] = {}  # parameters, since the start of the forward pass
        self._registered: list[Any] = []  # the handles that were looked at last
        self._version = -1
        self._resumed = self._undone = self._in_pass = False
        self._patience = Patience(FIRST_PATIENCE, LONGEST_PATIENCE)
        self._order: dict[str, Any] | None = None  # of modules with hooks, as DeepSpeed's coordinator has it
        self._n_incomplete = 0  # steps in which it could have been suspended
        self.n_changes = 0
        """Number of changes of :attr:`modules` so far."""
        self._hooks = []
        if relieve is not None:
            look = uncompiled(lambda *_: relieve())
            for blocks in offload.module.modules():
                if isinstance(blocks, torch.nn.ModuleList):
                    self._hooks += [block.register_forward_pre_hook(look) for block in blocks]
        # Functions, which copy.deepcopy(model) does not copy; a bound method would take everything here along.
        begin, end = uncompiled(lambda *_: self._begin_forward()), uncompiled(lambda *_: self.end_pass())
        self._hooks.append(offload.module.register_forward_pre_hook(begin, prepend=True))
        self._hooks.append(offload.module.register_forward_hook(end, always_call=True))

    @property
    def up_to_date(self) -> bool:
        """Whether nothing has changed since :meth:`suspend`: some libraries remove DeepSpeed's hooks for a generation
        and register new ones, and whoever releases a weight puts its hooks back."""
        if self._resumed or self._version != self._weights.version or self._requires_grad != self._requires_grad_now():
            return False
        return self._registered == self._offload.forward_hooks

    @property
    def modules(self) -> Collection[torch.nn.Module]:
        """Those without hooks."""
        return self._suspended.keys()

    def modules_wait_for(self, param: Any) -> bool:
        """Whether all modules that use a weight, which stays gathered, wait for its update: see [Note: updates of
        weights that stay gathered]."""
        kept = self._kept.get(param.ds_id)
        return self._modules_wait and kept is not None and not kept.persisted

    def wait_for(self, param: Any) -> None:
        """Returns when a weight has its new value, see :meth:`UpdateGate.wait_for`."""
        if self._gate is not None:
            self._gate.wait_for((param.ds_id,))

    def step_done(self) -> None:
        """An optimizer step is over: suspends, unless users gather weights all the time."""
        if self._undone:
            self._patience.undone()
            self._undone = False
        self._patience.step_done()
        if self.up_to_date or not self._patience.over:
            return
        # With the complete order, which is to be had again later; some models have none.
        self._n_incomplete += 1
        if self._offload.get_param_coordinator().is_complete_trace() or self._n_incomplete >= MOST_INCOMPLETE:
            self.suspend()
            self._patience.tried()

    def suspend(self) -> None:
        """Gathers the weights that stay, and takes the hooks off all modules that have no others. Between passes."""
        offload = self._offload
        self.resume()
        coordinator = offload.get_param_coordinator()
        self._order = coordinator.order() if coordinator.is_complete_trace() else None
        self._resumed, self._version, self._n_incomplete = False, self._weights.version, 0
        self._registered = list(offload.forward_hooks)
        self._params = list(offload.module.parameters()) if self._trains else []
        self._requires_grad = self._requires_grad_now()
        gate = None if is_compiled(offload.module) else self._gate
        self._modules_wait = gate is not None
        modules = self._suspendable()
        self._keep(param for module in modules for param in params_of(module).values())
        if not self._kept:
            return
        by_hooks = {id(hooks): module for module in modules for hooks in _hook_dicts(module)}
        orders = {key: list(hooks) for module in modules for hooks in _hook_dicts(module) for key in [id(hooks)]}
        for handles, adds_nodes in ((offload.forward_hooks, False), (offload.backward_hooks, self._trains)):
            for handle in handles:
                hooks: Hooks | None = handle.hooks_dict_ref()
                module = by_hooks.get(id(hooks))
                if hooks is None or module is None or handle.id not in hooks:
                    continue
                taken = _Taken(hooks, handle.id, hooks.pop(handle.id), orders[id(hooks)])
                self._suspended.setdefault(module, []).append(taken)
                if adds_nodes:
                    taken.replace(_same_inputs if hooks is module._forward_pre_hooks else _same_output)
                elif gate is not None and hooks is module._forward_pre_hooks and params_of(module):
                    taken.replace(_waiting(gate, tuple(params_of(module))))
        for module in self._suspended:
            for param in params_of(module).values():
                self._kept[param.ds_id].modules.append(module)
            if gate is not None and type(module._parameters) is ZeROOrderedDict:
                module._parameters.__class__ = _AwaitedParameters
        self._forget_order()
        self.n_changes += 1

    def resume(self) -> None:
        """Puts all hooks back, and releases the weights. Between passes."""
        kept, self._kept = self._kept, {}
        for each in kept.values():
            self._let_go(each)
        if kept:
            self._offload.get_param_coordinator().forget_releases()
        self._put_back(list(self._suspended))
        if kept and self._order is not None and self._registered == self._offload.forward_hooks:
            self._offload.get_param_coordinator().restore(self._order)
        for each in kept.values():
            if not each.persisted and each.param.ds_status is ZeroParamStatus.AVAILABLE:
                each.param.partition()

    def close(self) -> None:
        """Puts all hooks back. Idempotent."""
        for handle in self._hooks:
            handle.remove()
        self.resume()

    # Passes

    def _begin_forward(self) -> None:
        self._released.clear()
        self._in_pass = True

    def begin_backward(self) -> None:
        """A backward pass begins, possibly of a forward pass in which modules had no hooks."""
        self._in_pass = True
        released, self._released = self._released, {}
        self._keep([param for param in released.values() if self._weights.stays(param) and is_free(param)])

    def end_pass(self) -> None:
        """A pass is over."""
        self._in_pass = False

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """Within the block the weights count as released, for DeepSpeed's check before an update, and are not: their
        shards are updated, which are what is gathered."""
        self._in_pass = False
        hidden = []
        for kept in self._kept.values():
            param = kept.param
            if param.ds_status is ZeroParamStatus.AVAILABLE and _is_shard(param):
                param.ds_active_sub_modules.clear()
                param.ds_status = ZeroParamStatus.NOT_AVAILABLE
                hidden.append(param)
        try:
            yield
        finally:
            for param in hidden:
                param.ds_status = ZeroParamStatus.AVAILABLE

    # Mechanics

    def _keep(self, params: Iterable[Any]) -> None:
        new = list({param.ds_id: param for param in params if param.ds_id not in self._kept}.values())
        for param in new:
            if param.ds_status is ZeroParamStatus.AVAILABLE and not _is_shard(param):
                param.partition()  # a copy, which an update of the shard would not change
        _gather(new)
        for param in new:
            self._kept[param.ds_id] = _Kept(param, param.ds_persist)
            param.ds_persist = True
            setattr(param, KEEPER, self)
        if new:
            self._offload.get_param_coordinator().forget_releases()

    @uncompiled
    def _release(self, param: Any) -> None:
        """It is about to be released."""
        if not self._in_pass:
            self.resume()
            return
        kept = self._kept.pop(param.ds_id)
        self._let_go(kept)
        self._offload.get_param_coordinator().forget_releases()
        self._put_back(kept.modules)

    def _let_go(self, kept: _Kept) -> None:
        self._released[kept.param.ds_id] = kept.param
        self._resumed = True
        delattr(kept.param, KEEPER)
        kept.param.ds_persist = kept.persisted

    def _suspendable(self) -> list[torch.nn.Module]:
        """Modules whose weights can stay, and are used by no module that keeps its hooks, which would release them."""
        root = self._offload.module
        used_by = {module: list(params_of(module).values()) for module in root.modules()}
        stay = {
            param.ds_id: self._weights.stays(param) and is_free(param)
            for params in used_by.values()
            for param in params
        }
        candidates = [
            module
            for module, params in used_by.items()
            if module is not root and not (params and any(True for _ in module.children()))
        ]
        while True:
            chosen = {module for module in candidates if all(stay[param.ds_id] for param in used_by[module])}
            released = {param.ds_id for module, params in used_by.items() if module not in chosen for param in params}
            if not any(stay[key] for key in released):
                break
            stay |= dict.fromkeys(released, False)
        chosen -= self._recomputed(chosen, used_by)
        return [module for module in candidates if module in chosen]

    def _recomputed(
        self, chosen: Collection[torch.nn.Module], used_by: Mapping[torch.nn.Module, Sequence[Any]]
    ) -> set[torch.nn.Module]:
        """Chosen modules around frozen weights that are gathered. When a block is recomputed, DeepSpeed gathers them,
        and releases them when the block is through backward: without hooks on the block, when the whole model is."""
        if all(self._requires_grad):
            return set()
        gather = {
            module
            for module, params in used_by.items()
            if module not in chosen and any(not param.requires_grad for param in params)
        }
        return {module for module in chosen if not gather.isdisjoint(module.modules())}

    def _requires_grad_now(self) -> list[bool]:
        return [param.requires_grad for param in self._params]

    def _put_back(self, modules: Iterable[torch.nn.Module]) -> None:
        current = {handle.id for handle in (*self._offload.forward_hooks, *self._offload.backward_hooks)}
        any_put_back = False
        for module in modules:
            if type(module._parameters) is _AwaitedParameters:
                module._parameters.__class__ = ZeROOrderedDict
            for taken in self._suspended.pop(module, ()):
                if taken.number in current:  # else it was removed meanwhile
                    taken.put_back()
                    any_put_back = True
            for param in params_of(module).values():
                if param.ds_id in self._kept:
                    self._kept[param.ds_id].modules.clear()
        if any_put_back:
            self._resumed = True
            self.n_changes += 1
            self._forget_order()

    def _forget_order(self) -> None:
        """DeepSpeed's order of modules is another one now: it records it anew."""
        coordinator = self._offload.get_param_coordinator()
        if not coordinator.is_invalid_trace():
            coordinator._invalidate_trace()


@dataclass(frozen=True, slots=True)
class _Kept:
    """A weight that stays gathered.

    Attributes:
        param: the parameter.
        persisted: whether DeepSpeed kept it gathered anyway.
        modules: those that use it, and have no hooks.
    """

    param: Any
    persisted: bool
    modules: list[torch.nn.Module] = field(default_factory=list)


def before_release(param: Any) -> None:
    """DeepSpeed is about to release the gathered value of a parameter."""
    owner: SuspendedHooks | None = getattr(param, KEEPER, None)
    if owner is not None:
        owner._release(param)


def before_user_gathers(params: Iterable[Any]) -> None:
    """A user is about to gather parameters. Between passes, what stays gathered is released first: what then happens to
    their values is what happens with DeepSpeed."""
    for param in params:
        owner: SuspendedHooks | None = getattr(param, KEEPER, None)
        if owner is not None and not owner._in_pass:
            owner.resume()
            owner._undone = True


@contextlib.contextmanager
def user_releases(params: Iterable[Any]) -> Iterator[None]:
    """Within the block DeepSpeed releases parameters that a user has gathered. Those that stay gathered, because this
    is within a pass, are gathered again: their modules have no hooks, and one of them may be being executed."""
    owners = {param: owner for param in params if (owner := param.__dict__.pop(KEEPER, None)) is not None}
    try:
        yield
    finally:
        _gather(owners)
        for param, owner in owners.items():
            setattr(param, KEEPER, owner)


def _gather(params: Iterable[Any]) -> None:
    """Gathers with ``all_gather_coalesced``: ``all_gather`` copies a single parameter."""
    missing = [param for param in params if param.ds_status is ZeroParamStatus.NOT_AVAILABLE]
    if missing:
        with torch.no_grad():
            missing[0].all_gather_coalesced(missing).wait()


def _is_shard(param: Any) -> bool:
    """Whether the gathered value of a parameter is its shard, in the same memory."""
    return bool(param.data_ptr() == param.ds_tensor.data_ptr())


@dataclass(frozen=True, slots=True)
class _Taken:
    """A hook that was taken off.

    Attributes:
        hooks: the module's, of this kind.
        number: of the hook among them.
        hook: what is called.
        order: the numbers of all of them, before any was taken off.
    """

    hooks: Hooks
    number: int
    hook: Callable[..., Any]
    order: Sequence[int]

    def put_back(self) -> None:
        """Where it was among the others; those that came later stay behind it."""
        self.replace(self.hook)

    def replace(self, hook: Callable[..., Any]) -> None:
        """Puts another hook where it was."""
        present = dict(self.hooks) | {self.number: hook}
        ordered = [number for number in self.order if number in present]
        ordered += [number for number in present if number not in set(self.order)]
        self.hooks.clear()
        self.hooks.update((number, present[number]) for number in ordered)


class _AwaitedParameters(ZeROOrderedDict):
    """Parameters of a module without hooks, awaited where they are looked up: other modules and functions may use them.
    Without a state of its own, which ``copy.deepcopy(model)`` would copy."""

    def __getitem__(self, key: str) -> Any:
        param = super().__getitem__(key)
        keeper: SuspendedHooks | None = getattr(param, KEEPER, None)
        if keeper is not None:
            keeper.wait_for(param)
        return param


def _waiting(gate: UpdateGate, keys: Sequence[int]) -> Callable[..., None]:
    """A hook in which a module waits for its weights."""
    return uncompiled(lambda *_: gate.wait_for(keys))


def _same_inputs(module: torch.nn.Module, inputs: Any) -> Any:
    return unchanged(inputs)


def _same_output(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
    return unchanged(output)


def _hook_dicts(module: torch.nn.Module) -> tuple[Hooks, Hooks]:
    return module._forward_pre_hooks, module._forward_hooks
