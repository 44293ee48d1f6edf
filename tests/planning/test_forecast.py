# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tencache_ds.planning.forecast import SPLIT_NBYTES, Resource, Training, forecast
from tencache_ds.profiling.hardware import Hardware, StorageRates

pytestmark = pytest.mark.timeout(60)

DRIVE = StorageRates(
    read_bytes_per_s=2e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2e9, request_nbytes=2**20, lanes=8, direct=True,
    filesystem="ext4",
)  # fmt: skip
MACHINE = Hardware(
    cpu="a CPU", cores=16, memory_nbytes=2**37, storage=DRIVE, cpu_adam_params_per_s=5e9, matmul_flops_per_s=5e14
)
BILLION = Training(numel=10**9, tokens_per_step=2048)
trainings = st.builds(
    Training,
    numel=st.integers(1, 10**12),
    tokens_per_step=st.integers(1, 10**7),
    micro_steps=st.integers(1, 64),
    gradient_nbytes=st.sampled_from([2, 4]),
    state_nbytes=st.sampled_from([12, 6 + 8 / 256, 4 + 8 / 256 + 1 / 8]),
)


@given(trainings, st.integers(0, 2**50))
def test_everything_is_somewhere_and_the_budget_is_used_first(training: Training, budget: int) -> None:
    plan = forecast(training, budget, MACHINE)
    assert plan.host_nbytes + plan.nvme_nbytes == training.nbytes
    gradients = training.numel * training.gradient_nbytes
    assert plan.gradients.host_nbytes == gradients
    assert plan.host_nbytes <= max(budget, min(budget, training.numel * training.weight_nbytes) + gradients)
    if plan.nvme_nbytes:
        assert plan.host_nbytes >= budget
    if plan.weights.nvme_nbytes:
        assert plan.state.host_nbytes == 0, "weights come first"


@given(trainings, st.lists(st.integers(0, 2**45), min_size=2, max_size=6), st.integers(0, 2**45))
@example(Training(numel=44, tokens_per_step=1, gradient_nbytes=4), [191, 198], 26)
def test_more_memory_is_never_slower(training: Training, budgets: list[int], other: int) -> None:
    ascending = sorted(budgets)
    host = [forecast(training, budget, MACHINE, gpu_budget_nbytes=other).bound.seconds for budget in ascending]
    gpu = [forecast(training, other, MACHINE, gpu_budget_nbytes=budget).bound.seconds for budget in ascending]
    for seconds in (host, gpu):
        assert all(less >= more for less, more in pairwise(seconds))


@given(trainings, st.integers(0, 2**45), st.integers(0, 2**45))
def test_gradients_are_in_gpu_memory_beside_state_and_weights(training: Training, host: int, gpu: int) -> None:
    plan = forecast(training, host, MACHINE, gpu_budget_nbytes=gpu)
    assert plan.gpu_nbytes <= gpu
    state = plan.state
    missing = training.state_of(training.numel) - (state.gpu_nbytes + state.host_nbytes + state.nvme_nbytes)
    assert missing in (0, 1), "both parts are rounded down"
    n_gradients = plan.gradients.gpu_nbytes / training.gradient_nbytes
    assert n_gradients <= (state.gpu_nbytes + 1) / training.state_nbytes, "only beside state"
    assert n_gradients <= plan.weights.gpu_nbytes / training.weight_nbytes, "and beside weights"
    at_start = forecast(training, host, MACHINE)
    assert plan.host_nbytes <= at_start.host_nbytes
    assert plan.nvme_nbytes <= at_start.nvme_nbytes


def test_where_the_drive_is_the_limit_state_comes_before_weights() -> None:
    slow = forecast(BILLION, 4 * 10**9, MACHINE, gpu_budget_nbytes=4 * 10**9)
    assert slow.state.gpu_nbytes == pytest.approx(4 * 10**9)
    fast = MACHINE.model_copy(update={"h2d_bytes_per_s": 1e9})
    quick = forecast(BILLION, 16 * 10**9, fast, gpu_budget_nbytes=2 * 10**9)
    assert (quick.weights.gpu_nbytes, quick.state.gpu_nbytes) == (2 * 10**9, 0)


def test_gpu_memory_that_holds_everything_leaves_nothing_to_move() -> None:
    demand = forecast(BILLION, 4 * 10**9, MACHINE, gpu_budget_nbytes=16 * 10**9).demand
    assert demand.h2d_nbytes == demand.d2h_nbytes == demand.nvme_read_nbytes == demand.cpu_adam_numel == 0
    assert demand.gpu_adam_numel == 10**9


@pytest.mark.parametrize(
    ("budget", "bytes_per_param", "with_split_masters"),
    [(0, 30, 30), (2 * 10**9, 24, 20), (4 * 10**9, 24, 20), (10 * 10**9, 12, 10), (16 * 10**9, 0, 0)],
)
@pytest.mark.parametrize("split", [False, True])
def test_the_bytes_of_a_step(budget: int, bytes_per_param: int, with_split_masters: int, split: bool) -> None:
    training = dataclasses.replace(BILLION, split_nbytes=SPLIT_NBYTES if split else 0)
    demand = forecast(training, budget, MACHINE).demand
    bytes_per_param = with_split_masters if split else bytes_per_param
    assert demand.nvme_read_nbytes + demand.nvme_write_nbytes == pytest.approx(bytes_per_param * 1e9)


def test_the_limit_moves_from_the_drive_to_the_processor() -> None:
    nothing, everything = (forecast(BILLION, budget, MACHINE).bound for budget in (0, BILLION.nbytes))
    assert (nothing.limit, everything.limit) == (Resource.NVME, Resource.CPU)
    assert nothing.seconds == pytest.approx(15)
    assert everything.seconds == pytest.approx(0.2)
