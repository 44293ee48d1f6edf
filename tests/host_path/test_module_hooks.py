# SPDX-License-Identifier: Apache-2.0
"""Hooks taken off a module come back where they were; those that stay cost less."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, _init_external_params
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import set_z3_leaf_modules

from tencache_ds.host_path.module_hooks import lighten_hooks
from tencache_ds.host_path.suspended_hooks import SuspendedHooks, _Taken
from tencache_ds.integration.hooked_modules import has_weights, modules_wait_for, params_of


def test_hooks_come_back_in_their_order() -> None:
    module = torch.nn.Identity()
    calls: list[str] = []

    def named(name: str) -> Any:
        return lambda *_: calls.append(name)

    module.register_forward_pre_hook(named("before"))
    handles = [module.register_forward_pre_hook(named(name)) for name in ("gather", "backward")]
    module.register_forward_pre_hook(named("after"))
    module.register_forward_pre_hook(named("first"), prepend=True)
    hooks = module._forward_pre_hooks
    order = list(hooks)
    taken = [_Taken(hooks, handle.id, hooks.pop(handle.id), order) for handle in handles]
    module.register_forward_pre_hook(named("later"))
    module(torch.zeros(1))
    assert calls == ["first", "before", "after", "later"]
    calls.clear()
    for each in taken:
        each.put_back()
    module(torch.zeros(1))
    assert calls == ["first", "before", "gather", "backward", "after", "later"]
    handles[0].remove()
    calls.clear()
    module(torch.zeros(1))
    assert calls == ["first", "before", "backward", "after", "later"]


class Gate:
    """Takes down who waits for what."""

    def __init__(self) -> None:
        self.keys: list[int] = []

    def wait_for(self, keys: Any) -> None:
        self.keys += keys


class Tied(torch.nn.Module):
    """Its last module has the weight of the first one, and the one between uses it as well: an external parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (torch.nn.Linear(2, 2, bias=False) for _ in range(3))
        self.last.weight = self.first.weight
        self.plain = torch.nn.ReLU()
        for key, param in enumerate(self.parameters()):
            param.ds_id, param.ds_persist, param.ds_status = key, False, ZeroParamStatus.AVAILABLE
            param.ds_tensor, param.ds_active_sub_modules, param.partition = param.data, set(), mock.Mock()
        for module in self.modules():
            _init_external_params(module)
            parameter_offload._inject_parameters(module, parameter_offload.ZeROOrderedDict)
        self.between._external_params[0] = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.plain(self.between(self.first(x))))


def suspended(model: torch.nn.Module, gate: Gate | None) -> tuple[SuspendedHooks, list[Any]]:
    """A model's hooks that were taken off, and what the only one of DeepSpeed's on each module was called with."""
    called: list[Any] = []
    handles = [module.register_forward_pre_hook(lambda *args: called.append(args)) for module in model.children()]
    coordinator = mock.Mock(is_complete_trace=lambda: False, is_invalid_trace=lambda: True)
    offload: Any = SimpleNamespace(
        module=model, forward_hooks=handles, backward_hooks=[], get_param_coordinator=lambda: coordinator
    )
    weights: Any = SimpleNamespace(version=0, stays=lambda param: True)
    hooks = SuspendedHooks(offload, weights, gate=gate)  # type: ignore[arg-type]
    hooks.suspend()
    return hooks, called


def test_modules_without_hooks_wait_for_all_weights_that_they_use() -> None:
    model, gate = Tied(), Gate()
    hooks, called = suspended(model, gate)
    assert set(hooks.modules) == set(model.children())
    for module, keys in ((model.first, [0]), (model.between, [1, 0]), (model.last, [0]), (model.plain, [])):
        gate.keys.clear()
        for hook in module._forward_pre_hooks.values():
            hook(module, ())
        assert gate.keys == keys
    gate.keys.clear()
    torch.nn.functional.linear(torch.zeros(1, 2), model.between.weight)  # by another module or a function
    assert gate.keys == [1]
    copied = copy.deepcopy(model)
    gate.keys.clear()
    copied(torch.zeros(1, 2))
    assert gate.keys == [0, 1, 0, 0]
    assert not called
    hooks.close()
    assert {type(module._parameters) for module in model.children()} == {parameter_offload.ZeROOrderedDict}
    gate.keys.clear()
    model(torch.zeros(1, 2))
    assert len(called) == 4
    assert not gate.keys


def test_a_weight_waits_for_an_update_behind_a_pass_where_all_its_modules_do() -> None:
    model = Tied()
    model.between.weight.ds_persist = True  # of DeepSpeed's own
    hooks, _ = suspended(model, Gate())
    assert [modules_wait_for(param) for param in model.parameters()] == [True, False]


@pytest.mark.parametrize("case", ["resumed", "no overlap", "compiled"])
def test_otherwise_its_update_comes_first(case: str) -> None:
    model, gate = Tied(), Gate()
    if case == "compiled":
        model.first.compile(backend="eager")
    hooks, _ = suspended(model, None if case == "no overlap" else gate)
    assert hooks.modules
    if case == "resumed":
        hooks.resume()
    assert not any(modules_wait_for(param) for param in model.parameters())
    model.between(torch.zeros(1, 2))
    assert not gate.keys


class Coordinator:
    """Takes down what the hooks ask for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, bool]] = []
        self.passes_over_without_weights = True

    def passes_over(self, module: torch.nn.Module) -> bool:
        return self.passes_over_without_weights and not has_weights(module)

    def begin_module(self, module: Any, forward: bool) -> None:
        self.calls.append(("gather", module.name, forward))

    fetch_sub_module = begin_module

    def trace_prologue(self, module: Any) -> None:
        pass

    def is_record_trace(self) -> bool:
        return False

    def is_invalid_trace(self) -> bool:
        return True

    def release_sub_module(self, module: Any, forward: bool = False) -> None:
        self.calls.append(("release", module.name, forward))


class Pair(torch.nn.Module):
    """With two inputs and two outputs, and a weight that it hands to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> Any:
        return left * self.scale, right + self.scale, self.scale


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act, self.pair = torch.nn.Linear(2, 2), torch.nn.SiLU(), Pair()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right, scale = self.pair(self.act(self.linear(x)), x)
        return (left + right + scale).sum()


def hooked(block: Block, *, light: bool) -> Any:
    """With DeepSpeed's hooks, or with those in their places."""
    for name, module in block.named_modules():
        module.name = name
        _init_external_params(module)
    for key, param in enumerate(block.parameters()):
        param.ds_id, param.is_external_param = key, False
        param.all_gather = lambda: None
    offload = object.__new__(DeepSpeedZeRoOffload)
    offload.module, offload.zenflow, offload.param_coordinator = block, False, Coordinator()
    offload.forward_hooks, offload.backward_hooks = [], []
    offload._register_deepspeed_module(block)
    if light:
        lighten_hooks(offload)
    return offload


@pytest.fixture
def modules_in_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """DeepSpeed's, with a root: a model that registers weights has one around it. Without process groups, which its
    messages ask for the rank."""
    for name in ("print_rank_0", "see_memory_usage"):
        monkeypatch.setattr(parameter_offload, name, lambda *_, **__: None)
    root = torch.nn.Module()
    _init_external_params(root)
    parameter_offload.FWD_MODULE_STACK.append(root)
    yield parameter_offload.FWD_MODULE_STACK
    parameter_offload.FWD_MODULE_STACK.clear()


def trained(block: Block, *, light: bool, passes_over: bool = False) -> tuple[list[Any], list[torch.Tensor], Any]:
    offload = hooked(block, light=light)
    offload.param_coordinator.passes_over_without_weights = passes_over
    block(torch.ones(3, 2, requires_grad=True)).backward()
    return offload.param_coordinator.calls, [param.grad for param in block.parameters()], offload


def test_the_hooks_ask_for_what_deepspeeds_ask_for(modules_in_forward: list[Any]) -> None:
    torch.manual_seed(0)
    blocks = [Block()]
    blocks.append(copy.deepcopy(blocks[0]))
    results = [trained(block, light=light) for block, light in zip(blocks, (False, True), strict=True)]
    assert results[0][0] == results[1][0]
    assert {(what, forward) for what, _, forward in results[0][0]} == {
        (what, forward) for what in ("gather", "release") for forward in (True, False)
    }
    assert all(torch.equal(*grads) for grads in zip(results[0][1], results[1][1], strict=True))
    # The weight among the outputs is registered with the block, and the root is the only one left.
    assert all(list(block._external_params.values()) == [block.pair.scale] for block in blocks)
    assert len(modules_in_forward) == 1


def test_modules_without_weights_are_left_out(modules_in_forward: list[Any]) -> None:
    block = Block()
    calls, _, _ = trained(block, light=True, passes_over=True)
    without = {name for _, name, _ in calls}
    assert without == {"linear", "pair", ""}  # the block has one from within its first pass on
    assert ("gather", "", True) not in calls
    calls.clear()
    block(torch.ones(3, 2, requires_grad=True)).backward()
    assert ("gather", "", True) in calls
    assert not any(name == "act" for _, name, _ in calls)
    assert len(modules_in_forward) == 1


def graph(node: Any) -> Any:
    """The kinds of the nodes from one on; those of the hooks are one kind."""
    if node is None:
        return None
    names = ("PreBackwardFunction", "PostBackwardFunction", "_CallInBackward")
    kind = "hook" if node.name().startswith(names) else node.name()
    return kind, [graph(following) for following, _ in node.next_functions]


class Mixed(Block):
    """With a tensor that a module without weights uses several times, beside a residual connection, and with inputs and
    outputs that are no single tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.split = Split()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        parts = self.split([x, None], scale=2.0)
        return super().forward(x + parts["sum"] + parts["products"][0])


class Split(torch.nn.Module):
    def forward(self, values: list[Any], scale: float) -> dict[str, Any]:
        (x, _), frozen = values, torch.ones(2)
        return {"sum": x + x * scale, "products": (x * x, frozen), "none": None, "scale": scale}


def test_the_graph_is_deepspeeds(modules_in_forward: list[Any]) -> None:
    blocks = [Mixed()]
    blocks += [copy.deepcopy(blocks[0]) for _ in range(2)]
    graphs, grads = [], []
    for block, light, passes_over in zip(blocks, (False, True, True), (False, False, True), strict=True):
        hooked(block, light=light).param_coordinator.passes_over_without_weights = passes_over
        loss = block(torch.ones(3, 2, requires_grad=True))
        graphs.append(graph(loss.grad_fn))
        loss.backward()
        grads.append([param.grad for param in block.parameters()])
    assert graphs[0] == graphs[1] == graphs[2]
    assert str(graphs[0]).count("'hook'") > 12
    for ours in grads[1:]:
        assert all(torch.equal(*pair) for pair in zip(grads[0], ours, strict=True))
    with torch.no_grad():
        assert not blocks[2](torch.ones(3, 2)).requires_grad


def test_hooks_for_a_backward_pass_are_skipped_in_evaluation_without_gradients_only(
    modules_in_forward: list[Any],
) -> None:
    block = Block()
    hooked(block, light=True)
    for training, gradients, prepared in ((True, True, 1), (True, False, 2), (False, True, 3), (False, False, 3)):
        block.train(training)
        with torch.set_grad_enabled(gradients):
            block(torch.ones(3, 2))
        assert block.linear.applied_pre_backward_ref_cnt == prepared


@pytest.mark.parametrize("leaf", [False, True])
def test_copies_of_a_model_share_its_hooks(leaf: bool) -> None:
    block = Block()
    if leaf:
        set_z3_leaf_modules(block, [Pair])
    hooked(block, light=True)
    copied = copy.deepcopy(block)
    for one, other in zip(block.modules(), copied.modules(), strict=True):
        assert list(one._forward_hooks.values()) == list(other._forward_hooks.values())
        assert list(one._forward_pre_hooks.values()) == list(other._forward_pre_hooks.values())


def test_hooks_are_replaced_once_and_those_that_come_later_too() -> None:
    block = Block()
    offload = hooked(block, light=True)
    before = [dict(module._forward_hooks) for module in block.modules()]
    lighten_hooks(offload)
    assert before == [dict(module._forward_hooks) for module in block.modules()]
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        handle.remove()
    offload._register_deepspeed_module(block)
    for module in block.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            assert hook.__module__ == lighten_hooks.__module__


class Doubled(torch.autograd.Function):
    """With a context that is set up separately, like DeepSpeed's."""

    @staticmethod
    def forward(value: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return value * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.factor, None


def test_signatures_of_autograd_functions_are_looked_up_once() -> None:
    module = torch.nn.Identity()
    module.post_bwd_fn = Doubled
    offload = SimpleNamespace(
        module=module,
        forward_hooks=[],
        backward_hooks=[],
        get_param_coordinator=Coordinator,
        _register_deepspeed_module=lambda *_: None,
    )
    value = torch.ones(2, requires_grad=True)
    expected = Doubled.apply(value)
    lighten_hooks(offload)
    assert "__signature__" in LinearFunctionForZeroStage3.forward.__dict__
    with mock.patch.object(inspect, "_signature_from_function", side_effect=AssertionError("looked up again")):
        result = Doubled.apply(value)  # takes the default of the factor from the signature
    assert torch.equal(result, expected)
    result.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("leaf", [False, True])
def test_the_parameters_of_a_fetch_are_deepspeeds(leaf: bool) -> None:
    shared = torch.nn.Linear(2, 2)
    block = torch.nn.Sequential(shared, torch.nn.Linear(2, 2, bias=False), torch.nn.SiLU(), shared)
    block.register_parameter("scale", torch.nn.Parameter(torch.ones(1)))
    block.register_parameter("none", None)
    for key, param in enumerate(block.parameters()):
        param.ds_id = key
    for module in block.modules():
        _init_external_params(module)
    external = torch.nn.Parameter(torch.ones(3))
    external.ds_id = 17
    block._external_params[id(external)] = external
    if leaf:
        set_z3_leaf_modules(block, [torch.nn.Sequential])
    for module in block.modules():
        expected = {param.ds_id: param for param in iter_params(module, recurse=leaf and module is block)}
        found = params_of(module)
        assert found.keys() == expected.keys()
        assert all(found[key] is expected[key] for key in found)
