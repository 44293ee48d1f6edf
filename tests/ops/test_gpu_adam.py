# SPDX-License-Identifier: Apache-2.0
"""Adam on the GPU against the fused Adam on the CPU, which equals DeepSpeed's (``test_update.py``), and Muon's step
against that on the CPU, which equals torch's (``test_descent.py``), bit for bit."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tencache_ds.ops.tencache_update import load_tencache_update
from tencache_ds.planning.adam_scalars import BetaPowers, DescentScalars
from tencache_ds.tiers.device_update import Run, TritonAdam
from tests.ops.test_update import DTYPES, SIZES, Setting, State, gradients_of, repeated, scalars_at, scalars_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

MANY = int(float(os.environ.get("TENCACHE_TEST_UPDATE_NUMEL", 3e6)))
"""Elements that are updated a hundred times."""


@pytest.fixture(scope="module")
def op() -> Any:
    return load_tencache_update()


@pytest.fixture(scope="module")
def team(op: Any) -> Any:
    team = op.Team(os.cpu_count() or 1)
    yield team
    team.close()


@pytest.fixture(scope="module")
def adam(op: Any) -> TritonAdam:
    return TritonAdam(torch.device("cuda", 0), tail_contracted=op.TAIL_CONTRACTED)


def differences(
    op: Any,
    team: Any,
    adam: TritonAdam,
    setting: Setting,
    cuts: Sequence[int] = (),
    draw: Callable[..., torch.Tensor] = gradients_of,
    *,
    offset: int = 0,
) -> int:
    """Elements in which the two differ after some steps; the GPU's tensors begin ``offset`` elements into theirs."""
    generator = torch.Generator().manual_seed(setting.numel)
    master = torch.randn(setting.numel, generator=generator)
    expected = State.of(master, setting.weight_dtype)
    powers, width = BetaPowers(setting.betas), op.adam_variant()[1]

    def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device="cuda")
        memory[offset:] = tensor
        return memory[offset:]

    arrays = [on_gpu(each) for each in (expected.master, expected.exp_avg, expected.exp_avg_sq)]
    weight, gradient_there = on_gpu(expected.weight), on_gpu(torch.zeros(setting.numel, dtype=setting.gradient_dtype))
    ends, runs = [*cuts, setting.numel], []
    n_tail = setting.numel % width
    for start, end in zip([0, *cuts], ends, strict=True):
        addresses = (each.data_ptr() + start * each.element_size() for each in (*arrays, gradient_there, weight))
        tail = max(0, end - max(start, setting.numel - n_tail))
        runs.append(Run(*addresses, numel=end - start, n_tail=tail))
    launch = adam.prepare(runs, setting.gradient_dtype, setting.weight_dtype)
    for step in range(1, setting.steps + 1):
        gradient = draw(setting, step, generator)
        op_scalars = scalars_of(op, setting, step, powers)
        types = DTYPES[setting.gradient_dtype], DTYPES[setting.weight_dtype]
        job = team.adam([expected.run(gradient)], *types, n_tail, op_scalars)
        gradient_there.copy_(gradient)
        launch(scalars_at(setting, step, powers))
        assert job.wait(60)
    return State(*(each.cpu() for each in arrays), weight.cpu()).differing(expected)


@pytest.mark.parametrize("numel", [*SIZES, 4096, 4096 * 3 + 7])
def test_every_size_and_tail(op: Any, team: Any, adam: TritonAdam, numel: int) -> None:
    for decoupled in (True, False):
        for weight_decay in (0.0, 0.1):
            setting = Setting(numel, decoupled=decoupled, weight_decay=weight_decay, scale=1 / 7.3)
            assert differences(op, team, adam, setting) == 0, setting


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_dtype(
    op: Any, team: Any, adam: TritonAdam, gradient_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for offset in (0, 1):
        setting = Setting(20_003, gradient_dtype, weight_dtype, weight_decay=0.01, scale=1 / 3)
        assert differences(op, team, adam, setting, offset=offset) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 0.0, "weight_decay": 0.1},
        {"lr": 3e-4, "betas": (0.95, 0.98), "eps": 1e-6},
        {"bias_correction": False},
        {"scale": 2.0**-16},
        {"steps": 60, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_every_hyper_parameter(op: Any, team: Any, adam: TritonAdam, changed: dict[str, Any]) -> None:
    assert differences(op, team, adam, dataclasses.replace(Setting(9001), **changed)) == 0


def test_where_runs_are_cut_changes_no_bit(op: Any, team: Any, adam: TritonAdam) -> None:
    setting = Setting(70_001, weight_decay=0.1, scale=0.3)
    assert differences(op, team, adam, setting, cuts=[1, 2, 9, 4096, 4104, 40_000, 69_999]) == 0


def test_a_hundred_steps(op: Any, team: Any, adam: TritonAdam) -> None:
    setting = Setting(MANY, weight_decay=0.01, scale=1 / 3, steps=100)
    assert differences(op, team, adam, setting, draw=repeated) == 0


def test_a_run_without_gradient_or_weight(op: Any, team: Any, adam: TritonAdam) -> None:
    master, powers = torch.randn(10_000), BetaPowers((0.9, 0.999))
    expected = State.of(master, torch.bfloat16)
    arrays = [each.cuda() for each in (expected.master, expected.exp_avg, expected.exp_avg_sq)]
    launch = adam.prepare(
        [Run(*(each.data_ptr() for each in arrays), gradient=0, weight=0, numel=10_000)], torch.bfloat16, torch.bfloat16
    )
    setting = Setting(10_000, weight_decay=0.1)
    for step in (1, 2):
        assert team.adam([expected.run(None)], "bfloat16", "bfloat16", 0, scalars_of(op, setting, step, powers)).wait(
            60
        )
        launch(scalars_at(setting, step, powers))
    actual = State(*(each.cpu() for each in arrays), expected.weight)
    assert actual.differing(expected) == 0


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_a_step_along_the_gradient(
    op: Any, team: Any, adam: TritonAdam, gradient_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    for numel, offset, scale in ((1, 0, 1.0), (4097, 0, 1 / 3), (3 * 4096, 0, 0.37), (20_003, 1, 2.0**-16)):
        generator = torch.Generator().manual_seed(numel)
        master = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 8 - 6)
        gradient = torch.randn(numel, generator=generator).to(gradient_dtype)
        weight, scalars = torch.empty(numel, dtype=weight_dtype), DescentScalars(scale, 1 - 0.02 * 0.1, -0.02)
        there = [torch.zeros(numel + offset, dtype=each.dtype, device="cuda") for each in (master, gradient, weight)]
        for each, source in zip(there, (master, gradient, weight), strict=True):
            each[offset:] = source
        on_gpu = [each[offset:] for each in there]
        third = numel // 3
        runs = [
            Run(
                on_gpu[0][first:].data_ptr(),
                0,
                0,
                0 if first and offset else on_gpu[1][first:].data_ptr(),  # no gradient
                on_gpu[2][first:].data_ptr(),
                end - first,
            )
            for first, end in ((0, third), (third, numel))
            if end > first
        ]
        adam.prepare(runs, gradient_dtype, weight_dtype)(scalars)
        if offset:
            gradient[third:] = 0
        addresses = (master, master, master, gradient, weight)
        run = (*(each.data_ptr() for each in addresses), numel)
        job = team.descent(
            [run], DTYPES[gradient_dtype], DTYPES[weight_dtype], op.DescentScalars(**dataclasses.asdict(scalars)), ""
        )
        assert job.wait(60)
        assert torch.equal(on_gpu[0].cpu(), master)
        assert torch.equal(on_gpu[2].cpu(), weight)
