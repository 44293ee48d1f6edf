# SPDX-License-Identifier: Apache-2.0
"""What is known of optimizers, and who owns their states; without training."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tencache_ds.errors import ConfigError, SeamError, TenCacheError
from tencache_ds.integration import muon
from tencache_ds.integration.config_checks import refuse_optimizer
from tencache_ds.integration.optimizer_states import OptimizerStates, known_kinds, step_is_watched
from tencache_ds.integration.seams import Feature
from tencache_ds.observability.counters import Counters
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import MASTER, SubGroupSpec

NUMEL = 40
TORCH: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {},
    "ASGD": {},
    "Rprop": {},
    "SGD": {"momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def states_of(optimizer: torch.optim.Optimizer, placeholder: torch.Tensor, **options: Any) -> OptimizerStates:
    tier = OptimizerStateTier(
        [SubGroupSpec(NUMEL, ((MASTER, torch.float32),), None)],
        store=None,
        pool=lambda: pytest.fail("no pool is needed"),
        counters=Counters(),
        chunk_nbytes=2**20,
        timeout_s=1.0,
    )
    return OptimizerStates(optimizer, tier, [placeholder], **options)


def step(states: OptimizerStates, optimizer: torch.optim.Optimizer) -> None:
    with states.whole(0) as placeholder:
        placeholder.grad = torch.ones(NUMEL)
        optimizer.param_groups[0]["params"] = [placeholder]
        optimizer.step()


@pytest.mark.parametrize("options", [True, False], ids=["with options", "plain"])
@pytest.mark.parametrize("name", TORCH)
def test_the_known_kinds_are_those_that_the_first_step_makes(name: str, options: bool) -> None:
    param = torch.zeros(NUMEL, requires_grad=True)
    param.grad = torch.ones(NUMEL)
    optimizer = getattr(torch.optim, name)([param], lr=1e-3, **(TORCH[name] if options else {}))
    known = known_kinds(optimizer, torch.float32)
    optimizer.step()
    created = {kind: value.dtype for kind, value in optimizer.state[param].items() if value.shape == param.shape}
    assert dict(known) == created


def test_a_resident_sub_group_holds_the_optimizers_own_tensors() -> None:
    """State is there once: a second step changes the tensors of the first one, which the tier has."""
    placeholder = torch.zeros(0, requires_grad=True)
    optimizer = torch.optim.AdamW([placeholder], lr=1e-3)
    states = states_of(optimizer, placeholder)
    assert not states.started(0)
    step(states, optimizer)
    first = {kind: optimizer.state[placeholder][kind].data_ptr() for kind in states.kinds(0)}
    weights = placeholder.data_ptr()
    step(states, optimizer)
    assert {kind: optimizer.state[placeholder][kind].data_ptr() for kind in states.kinds(0)} == first
    assert placeholder.data_ptr() == weights
    assert set(first) == {"exp_avg", "exp_avg_sq"}
    assert placeholder.grad is None


@pytest.mark.parametrize("loaded", [{}, {"step": torch.tensor(7.0), "exp_avg": torch.ones(NUMEL)}])
def test_what_was_loaded_is_all_the_state(loaded: dict[str, Any]) -> None:
    placeholder = torch.zeros(0, requires_grad=True)
    optimizer = torch.optim.AdamW([placeholder], lr=1e-3)
    states = states_of(optimizer, placeholder)
    step(states, optimizer)
    optimizer.state[placeholder] = dict(loaded)
    states.replace(0, torch.full((NUMEL,), 3.0), with_state=True)
    assert states.kinds(0) == tuple(kind for kind in loaded if kind != "step")
    assert states.started(0) == bool(loaded)
    assert set(optimizer.state[placeholder]) == set(loaded)
    assert torch.equal(placeholder.data, torch.full((NUMEL,), 3.0))
    states.replace(0, torch.full((NUMEL,), 4.0), with_state=False)
    assert states.kinds(0) == tuple(kind for kind in loaded if kind != "step")
    assert torch.equal(placeholder.data, torch.full((NUMEL,), 4.0))


def test_states_of_another_optimizer_are_named() -> None:
    placeholder = torch.zeros(0, requires_grad=True)
    optimizer = torch.optim.SGD([placeholder], lr=1e-3)
    states = states_of(optimizer, placeholder, needed=lambda sub_group: frozenset({"step", "exp_avg"}))
    optimizer.state[placeholder] = {"momentum_buffer": torch.ones(NUMEL)}
    with pytest.raises(TenCacheError, match=r"\['momentum_buffer'\], but SGD needs \['exp_avg', 'step'\]"):
        states.replace(0, torch.zeros(NUMEL), with_state=True)


def test_a_step_that_fails_leaves_the_states_as_they_are_seen() -> None:
    placeholder = torch.zeros(0, requires_grad=True)
    optimizer = torch.optim.AdamW([placeholder], lr=1e-3)
    states = states_of(optimizer, placeholder)
    step(states, optimizer)
    with pytest.raises(RuntimeError, match="out of luck"), states.whole(0):
        raise RuntimeError("out of luck")
    assert set(optimizer.state[placeholder]) == {"step", "exp_avg", "exp_avg_sq"}
    assert placeholder.numel() == NUMEL


def watched_by_hook(optimizer: Any) -> Any:
    return optimizer.register_step_pre_hook(lambda *args: None).remove


def watched_by_global_hook(optimizer: Any) -> Any:
    return register_optimizer_step_post_hook(lambda *args: None).remove


def replaced(optimizer: Any) -> Any:
    optimizer.step = functools.partial(type(optimizer).step, optimizer)
    return lambda: delattr(optimizer, "step")


def replaced_below_a_scheduler(optimizer: Any) -> Any:
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    return lambda: delattr(optimizer, "step")


@pytest.mark.parametrize("watch", [watched_by_hook, watched_by_global_hook, replaced, replaced_below_a_scheduler])
def test_a_watched_step_is_noticed_and_no_longer_when_it_ends(watch: Any) -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1e-3)
    assert not step_is_watched(optimizer)
    end = watch(optimizer)
    assert step_is_watched(optimizer)
    end()
    assert not step_is_watched(optimizer)


@pytest.mark.parametrize("name", ["Muon", "MuonWithAuxAdam"])
def test_offloaded_muon_needs_a_deepspeed_that_updates_after_the_last_micro_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(feature: Feature) -> None:
        raise SeamError(feature.group)

    monkeypatch.setattr("tencache_ds.integration.config_checks.require", refuse)
    refuse_optimizer(name, offloaded=False, on_gpu=True)
    with pytest.raises(SeamError, match="Muon"):
        refuse_optimizer(name, offloaded=True, on_gpu=True)


def test_a_scheduler_does_not_watch() -> None:
    optimizer = torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    assert not step_is_watched(optimizer)


@pytest.mark.parametrize(
    ("name", "offloaded", "on_gpu", "reason"),
    [
        ("MuonWithAuxAdam", True, True, None),
        ("LBFGS", True, False, "closure"),
        ("SparseAdam", True, False, "sparse gradients"),
        ("Lamb", True, True, "runs on the GPU"),
        ("FusedAdam", True, True, "DeepSpeedCPUAdam"),
        ("FusedLion", True, True, "DeepSpeedCPULion"),
        ("FusedAdam", False, True, None),
        ("FusedAdam", True, False, None),
        ("AdamW", True, True, None),
        ("None", True, True, None),
    ],
)
def test_optimizers_that_cannot_work_are_refused(name: str, offloaded: bool, on_gpu: bool, reason: str | None) -> None:
    if reason is None:
        refuse_optimizer(name, offloaded=offloaded, on_gpu=on_gpu)
        return
    with pytest.raises(ConfigError, match=f'optimizer "{name}" .*Use another optimizer') as caught:
        refuse_optimizer(name, offloaded=offloaded, on_gpu=on_gpu)
    assert reason in str(caught.value)


class Beside:
    """An accelerator that works beside the host, and its streams and events."""

    def is_synchronized_device(self) -> bool:
        return False

    def current_stream(self) -> Beside:
        return self

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def wait_stream(self, stream: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    Stream = Event = lambda self: Beside()


def test_what_follows_a_turn_of_muon_waits_for_its_end_and_not_for_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(muon, "get_accelerator", Beside)
    copies, ended = muon._Copies(), []
    with copies.turns():
        for turn in range(4):
            with copies.to_host([], functools.partial(ended.append, turn)):
                assert turn not in ended
            copies.end_turns(2)
        assert ended == [0, 1]
        copies.end_turns(0)
    assert ended == [0, 1, 2, 3]
    with contextlib.suppress(RuntimeError), copies.turns():
        with copies.to_host([], functools.partial(ended.append, "of a step that failed")):
            pass
        raise RuntimeError
    copies.end_turns(0)
    assert ended == [0, 1, 2, 3]
