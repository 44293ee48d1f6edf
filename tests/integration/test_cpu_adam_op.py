# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's CPU Adam op that is loaded late updates as one that was there from the start."""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest import mock

import cpuinfo
import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.integration.adapters import installed
from tencache_ds.integration.chunk_update import LazyCpuAdam, loaded_when_needed
from tencache_ds.planning.adam_scalars import BetaPowers

pytestmark = pytest.mark.timeout(120)

CREATION = (1e-3, 0.9, 0.999, 1e-8, 0.0, True, False)
OPTIONS = (1e-8, 0.0, True)
BETAS = [(0.9, 0.999), (0.8, 0.99)]
NOTHING = [torch.empty(0)] * 4
processor = functools.cache(cpuinfo.get_cpu_info)
"""Asking takes a second."""

calls = st.lists(
    st.tuples(st.sampled_from(BETAS), st.sampled_from(["next", "same", "jump"]), st.integers(0, 50)), max_size=30
)


def steps_of(calls: list[tuple[tuple[float, float], str, int]]) -> list[tuple[int, tuple[float, float]]]:
    result, step = [], 0
    for betas, how, target in calls:
        step = {"next": step + 1, "same": step, "jump": target}[how]
        result.append((step, betas))
    return result


@settings(max_examples=200, deadline=None)
@given(calls, st.integers(0, 30))
def test_the_late_op_updates_as_an_early_one(calls: Any, when: int) -> None:
    op = CPUAdamBuilder().load(verbose=False)
    lazy = LazyCpuAdam(lambda: op)
    op.create_adam(990, *CREATION)
    lazy.create_adam(991, *CREATION)
    generator = torch.Generator().manual_seed(0)
    states = [[torch.randn(40, generator=generator).abs() for _ in range(4)]]
    states.append([tensor.clone() for tensor in states[0]])
    for index, (step, betas) in enumerate([*steps_of(calls), (60, BETAS[0]), (61, BETAS[0])]):
        for each, opt_id, state in ((op, 990, states[0]), (lazy, 991, states[1])):
            each.adam_update(opt_id, step, 1e-3, *betas, *OPTIONS, *(state if index >= when else NOTHING))
        assert lazy.loaded == (index >= when)
    assert all(torch.equal(*(each.view(torch.int32) for each in pair)) for pair in zip(*states, strict=True))
    op.destroy_adam(990)
    lazy.destroy_adam(991)


@settings(max_examples=100, deadline=None)
@given(calls, st.integers(0, 29), st.booleans())
def test_a_resumed_op_updates_as_one_that_never_stopped(calls: Any, when: int, early: bool) -> None:
    op = CPUAdamBuilder().load(verbose=False)
    op.create_adam(990, *CREATION)
    with mock.patch.object(cpuinfo, "get_cpu_info", processor):
        resumed = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
    if early:  # with powers of its own, of other steps
        resumed.ds_opt_adam.adam_update(resumed.opt_id, 3, 1e-3, *BETAS[1], *OPTIONS, *[torch.ones(1)] * 4)
    stand_in = LazyCpuAdam.of(resumed)
    assert LazyCpuAdam.of(resumed) is stand_in
    powers = BetaPowers(BETAS[0], pow_when_repeated=installed.calls.pow_when_repeated)
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(40, generator=generator).abs() for _ in range(4)]
    for index, (step, betas) in enumerate([*steps_of(calls), (60, BETAS[0]), (61, BETAS[0]), (62, BETAS[0])]):
        if index == when:
            stand_in.powers = BetaPowers(**powers.state_dict(), pow_when_repeated=installed.calls.pow_when_repeated)
        powers.at(step, betas)
        expected, actual = ([tensor.clone() for tensor in state] for _ in range(2))
        op.adam_update(990, step, 1e-3, *betas, *OPTIONS, *expected)
        resumed.ds_opt_adam.adam_update(resumed.opt_id, step, 1e-3, *betas, *OPTIONS, *actual)
        if index >= when:
            assert all(
                torch.equal(*(each.view(torch.int32) for each in pair)) for pair in zip(actual, expected, strict=True)
            )
    op.destroy_adam(990)


def test_powers_of_a_million_steps_are_brought_to_the_op_at_once() -> None:
    optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(1))])
    stand_in = LazyCpuAdam.of(optimizer)
    stand_in.powers = BetaPowers((0.9, 0.999), 10**6, 0)
    state = [torch.ones(4) for _ in range(4)]
    t_start = time.perf_counter()
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 10**6 + 1, 1e-3, 0.9, 0.999, *OPTIONS, *state)
    assert time.perf_counter() - t_start < 1
    assert torch.equal(state[0], torch.full((4,), 1 - 1e-3))


def test_an_optimizer_that_updates_nothing_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    load = CPUAdamBuilder.load
    monkeypatch.setattr(CPUAdamBuilder, "load", lambda self, verbose=True: loaded.append(self) or load(self, verbose))
    parameter = torch.nn.Parameter(torch.zeros(4))
    with loaded_when_needed():
        optimizer = DeepSpeedCPUAdam([parameter])
    optimizer.step()
    assert type(optimizer) is DeepSpeedCPUAdam
    assert not optimizer.ds_opt_adam.loaded
    assert not loaded
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert optimizer.ds_opt_adam.loaded
    assert len(loaded) == 1
    assert torch.allclose(parameter, torch.full((4,), -1e-3))
    assert not isinstance(DeepSpeedCPUAdam([parameter]).ds_opt_adam, LazyCpuAdam), "others are as they were"


def test_it_is_loaded_at_once_where_the_update_is_not_tencaches(monkeypatch: pytest.MonkeyPatch) -> None:
    from tencache_ds.errors import ConfigError
    from tencache_ds.ops import tencache_update

    def refuse() -> None:
        raise ConfigError("no compiler")

    monkeypatch.setattr(tencache_update, "load_tencache_update", refuse)
    with loaded_when_needed():
        optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(4))])
    assert not isinstance(optimizer.ds_opt_adam, LazyCpuAdam)
