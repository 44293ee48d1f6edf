# SPDX-License-Identifier: Apache-2.0
"""The fused Adam against DeepSpeed's CPU Adam with its passes around it, bit for bit; and the team that runs it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.ops.tencache_update import load_tencache_update
from tencache_ds.planning.adam_scalars import AdamScalars, BetaPowers, adam_scalars

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
STOCK_ID = 4711
MANY = int(float(os.environ.get("TENCACHE_TEST_UPDATE_NUMEL", 3e5)))
"""Elements that are updated a hundred times; 1e8 take some minutes."""

SIZES = (1, 3, 7, 8, 15, 16, 17, 63, 100, 127, 128, 129, 1000, 32768 + 5, 100_003)


@pytest.fixture(scope="module")
def op() -> Any:
    return load_tencache_update()


@pytest.fixture
def team(op: Any) -> Any:
    team = op.Team(2)
    yield team
    team.close()


@pytest.fixture(scope="module")
def stock() -> Any:
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    return CPUAdamBuilder().load(verbose=False)


@dataclasses.dataclass
class State:
    """Master weights, moments and the weight of one kind of run."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    weight: torch.Tensor
    remainder: torch.Tensor | None = None
    """Remainder of split master weights: with it, ``master`` and ``exp_avg_sq`` are those of the last :meth:`join`."""
    marks: torch.Tensor | None = None
    """Bits that mark elements of split master weights; None where signs of ``exp_avg_sq`` do."""

    @classmethod
    def of(cls, master: torch.Tensor, weight_dtype: torch.dtype) -> State:
        zeros = torch.zeros_like(master)
        return cls(master.clone(), zeros.clone(), zeros.clone(), master.to(weight_dtype))

    def run(self, gradient: torch.Tensor | None, start: int = 0, end: int | None = None) -> tuple[int, ...]:
        """Addresses of elements ``start`` to ``end`` for the op."""
        end = self.master.numel() if end is None else end
        arrays = (self.master, self.exp_avg, self.exp_avg_sq, gradient, self.weight)
        addresses = [0 if array is None else array.data_ptr() + start * array.element_size() for array in arrays]
        return (*addresses, end - start)

    def split_run(self, gradient: torch.Tensor, start: int, end: int) -> tuple[int, ...]:
        """The same, with the remainder in the place of the master weights."""
        return (self.remainder.data_ptr() + 2 * start, *self.run(gradient, start, end)[1:])

    def master_run(self) -> tuple[int, ...]:
        """Addresses for splitting and joining."""
        arrays = (self.master, self.remainder, self.weight)
        squares = self.exp_avg_sq.data_ptr() if self.marks is None else 0
        return (*(array.data_ptr() for array in arrays), squares, self.master.numel())

    @property
    def marks_address(self) -> int:
        """Of the marks; 0 without."""
        return 0 if self.marks is None else self.marks.data_ptr()

    def split(self, team: Any, variant: str = "") -> State:
        """Splits the master weights, and wipes them out."""
        self.remainder = torch.empty(self.master.numel(), dtype=torch.int16)
        assert team.splits_exactly([self.master_run()], variant, self.marks_address)
        assert team.split([self.master_run()], variant, self.marks_address).wait(60)
        self.master.fill_(7)
        return self

    def join(self, team: Any, variant: str = "") -> State:
        """The whole master weights again."""
        assert team.join([self.master_run()], variant, self.marks_address).wait(60)
        return self

    def differing(self, other: State) -> int:
        """Elements whose bits differ; NaNs of any payload are equal."""
        count = 0
        for name in ("master", "exp_avg", "exp_avg_sq", "weight"):
            mine, theirs = getattr(self, name), getattr(other, name)
            bits = torch.int32 if mine.element_size() == 4 else torch.int16
            count += int(((mine.view(bits) != theirs.view(bits)) & ~(mine.isnan() & theirs.isnan())).sum())
        return count


@dataclasses.dataclass(frozen=True)
class Setting:
    numel: int
    gradient_dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    bias_correction: bool = True
    scale: float = 1.0
    steps: int = 6


def gradients_of(setting: Setting, step: int, generator: torch.Generator) -> torch.Tensor:
    """Magnitudes from 1e-6 to 1e2, denormals, and from some step on infinities and NaNs."""
    values = torch.randn(setting.numel, generator=generator)
    values *= 10 ** (torch.rand(setting.numel, generator=generator) * 8 - 6)
    values[::17] = 1e-40
    values[3::29] = -0.0
    if step > 3:
        values[5::97] = float("inf")
    if step > 4:
        values[7::101] = float("nan")
    return values.to(setting.gradient_dtype)


def scalars_at(setting: Setting, step: int, powers: BetaPowers) -> AdamScalars:
    options = {key: getattr(setting, key) for key in ("lr", "betas", "eps", "weight_decay", "decoupled", "scale")}
    return adam_scalars(**options, bias_correction=setting.bias_correction, powers=powers.at(step, setting.betas))


def scalars_of(op: Any, setting: Setting, step: int, powers: BetaPowers) -> Any:
    return op.AdamScalars(**dataclasses.asdict(scalars_at(setting, step, powers)))


def repeated(setting: Setting, step: int, generator: torch.Generator) -> torch.Tensor:
    """Finite gradients of every magnitude, other ones in each step; a million of them over and over, which is quick."""
    part = gradients_of(dataclasses.replace(setting, numel=1_000_003), 1, torch.Generator().manual_seed(step))
    return part.repeat(-(-setting.numel // part.numel()))[: setting.numel]


def differences(
    op: Any,
    team: Any,
    stock: Any,
    setting: Setting,
    runs: Any = None,
    draw: Callable[..., torch.Tensor] = gradients_of,
    split: bool = False,
) -> int:
    """Elements in which the op and DeepSpeed's sequence of passes differ after some steps."""
    generator = torch.Generator().manual_seed(setting.numel)
    master = torch.randn(setting.numel, generator=generator)
    expected, actual = State.of(master, setting.weight_dtype), State.of(master, setting.weight_dtype)
    if split:
        actual.split(team)
    powers = BetaPowers(setting.betas)
    stock.create_adam(STOCK_ID, setting.lr, *setting.betas, setting.eps, setting.weight_decay, setting.decoupled, False)
    width = op.adam_variant()[1]
    for step in range(1, setting.steps + 1):
        gradient = draw(setting, step, generator)
        unscaled = gradient.float().clone()
        if setting.scale != 1.0:
            unscaled.mul_(setting.scale)
        stock.adam_update(
            STOCK_ID, step, setting.lr, *setting.betas, setting.eps, setting.weight_decay, setting.bias_correction,
            expected.master, unscaled, expected.exp_avg, expected.exp_avg_sq,
        )  # fmt: skip
        expected.weight.copy_(expected.master)
        pieces = [(0, setting.numel)] if runs is None else runs
        job = team.adam(
            [(actual.split_run if split else actual.run)(gradient, *piece) for piece in pieces],
            DTYPES[setting.gradient_dtype],
            DTYPES[setting.weight_dtype],
            setting.numel % width,
            scalars_of(op, setting, step, powers),
            split=split,
        )
        assert job.wait(60)
    stock.destroy_adam(STOCK_ID)
    if split:
        actual.join(team)
    return actual.differing(expected)


SCHEDULES: dict[str, Callable[[int], list[tuple[float, float]]]] = {
    "constant": lambda step: [(0.9, 0.999)],
    "groups": lambda step: [(0.9, 0.95), (0.9, 0.95), (0.9, 0.999)],
    "cycled": lambda step: [(0.85 + 0.1 * abs(step % 200 - 100) / 100, 0.999)],
    "cycled_for_a_while": lambda step: [(max(0.85, 0.95 - 0.001 * step), 0.99)],
    "one_group_cycled": lambda step: [(0.9, 0.999), (max(0.9, 0.95 - 0.001 * step), 0.999)],
}
"""The betas of each sub-group in a step."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_resumed_at_any_step_powers_are_those_of_deepspeed_that_never_stopped(
    op: Any, team: Any, stock: Any, name: str
) -> None:
    """DeepSpeed's own op, which calls ``pow`` when betas change and multiplies from there, is the one that never stops.

    Updates of the same elements with the same gradient: nothing but betas and their powers makes a difference.
    """
    schedule, setting = SCHEDULES[name], Setting(64)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(64, generator=generator).to(setting.gradient_dtype)
    begin = State.of(torch.zeros(64), setting.weight_dtype)
    begin.exp_avg.copy_(torch.randn(64, generator=generator))
    begin.exp_avg_sq.copy_(torch.rand(64, generator=generator))
    stock.create_adam(STOCK_ID, setting.lr, *schedule(1)[0], setting.eps, 0.0, True, False)
    masters: dict[int, list[torch.Tensor]] = {}
    for step in range(1, 405):
        masters[step] = []
        for betas in schedule(step):
            state = copy.deepcopy(begin)
            stock.adam_update(
                STOCK_ID, step, setting.lr, *betas, setting.eps, setting.weight_decay, True,
                state.master, gradient.float(), state.exp_avg, state.exp_avg_sq,
            )  # fmt: skip
            masters[step].append(state.master)
    stock.destroy_adam(STOCK_ID)
    powers, wrong = BetaPowers(schedule(1)[0]), []
    for step in range(1, 401):
        for betas in schedule(step):
            powers.at(step, betas)
        resumed = BetaPowers(**powers.state_dict())
        for later in range(step + 1, step + 4):
            for betas, expected in zip(schedule(later), masters[later], strict=True):
                state, here = copy.deepcopy(begin), dataclasses.replace(setting, betas=betas)
                job = team.adam(
                    [state.run(gradient, 0, 64)], DTYPES[setting.gradient_dtype], DTYPES[setting.weight_dtype], 0,
                    scalars_of(op, here, later, resumed),
                )  # fmt: skip
                assert job.wait(60)
                if not torch.equal(state.master, expected):
                    wrong.append((step, later))
    assert wrong == []


@pytest.mark.parametrize("numel", SIZES)
def test_every_size_and_tail_equals_deepspeed(op: Any, team: Any, stock: Any, numel: int) -> None:
    for decoupled in (True, False):
        for weight_decay in (0.0, 0.1):
            setting = Setting(numel, decoupled=decoupled, weight_decay=weight_decay, scale=1 / 7.3)
            assert differences(op, team, stock, setting) == 0, setting


@pytest.mark.parametrize("gradient_dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_every_dtype_equals_deepspeed(
    op: Any, team: Any, stock: Any, gradient_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    setting = Setting(5003, gradient_dtype, weight_dtype, weight_decay=0.01, scale=1 / 3)
    assert differences(op, team, stock, setting) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 0.0, "weight_decay": 0.1},  # a warm-up's first step
        {"lr": 3e-4, "betas": (0.95, 0.98), "eps": 1e-6},
        {"bias_correction": False},
        {"scale": 2.0**-16},
        {"steps": 60, "weight_decay": 0.01},
    ],
    ids=str,
)
def test_every_hyper_parameter_equals_deepspeed(op: Any, team: Any, stock: Any, changed: dict[str, Any]) -> None:
    assert differences(op, team, stock, dataclasses.replace(Setting(4099), **changed)) == 0


@pytest.mark.timeout(3600)
def test_a_hundred_steps(op: Any, team: Any, stock: Any) -> None:
    setting = Setting(MANY, weight_decay=0.01, scale=1 / 3, steps=100)
    assert differences(op, team, stock, setting, draw=repeated) == 0


@pytest.mark.parametrize("numel", [1, 15, 17, 1023, 1029, 100_003])
@pytest.mark.parametrize("gradient_dtype", DTYPES)
def test_split_master_weights_equal_deepspeed(
    op: Any, team: Any, stock: Any, numel: int, gradient_dtype: torch.dtype
) -> None:
    setting = Setting(numel, gradient_dtype, weight_decay=0.1, scale=0.3, steps=12)
    assert differences(op, team, stock, setting, split=True) == 0
    cuts = [0, numel // 3, numel // 2, numel]
    setting = dataclasses.replace(setting, decoupled=False)
    assert differences(op, team, stock, setting, runs=list(zip(cuts, cuts[1:], strict=False)), split=True) == 0


SPECIAL_HIGHS = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3FFF, 0x7EFF, 0x7F7E, 0x7F7F, 0x7F80)


@settings(max_examples=20, deadline=None)
@given(highs=st.lists(st.integers(0, 0x7F7F) | st.sampled_from(SPECIAL_HIGHS), min_size=1, max_size=8))
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("variant", ["avx512", "avx2", "neon"])
def test_split_and_joined_every_lower_half_is_as_before(op: Any, variant: str, marked: bool, highs: list[int]) -> None:
    """All remainders, ties and carries among them: a number near each end is rounded into the next weight."""
    if variant not in variants(op):
        return
    team = op.Team(1)
    lows = torch.arange(2**16, dtype=torch.int64)
    halves = [(sign | high) << 16 | lows for high in highs for sign in (0, 0x8000)]
    bits = torch.cat(halves)
    numbers = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]  # NaNs have a test of their own
    master = numbers.to(torch.uint32).view(torch.float32)
    state = State.of(master, torch.bfloat16)
    state.exp_avg_sq = torch.rand(master.numel()) * 1e-20
    if marked:
        state.marks = torch.full((-(-master.numel() // 8),), 0xFF, dtype=torch.uint8)
    before = dataclasses.replace(state, master=master.clone(), exp_avg_sq=state.exp_avg_sq.clone())
    assert state.split(team, variant).join(team, variant).differing(before) == 0
    team.close()


@pytest.mark.parametrize("exp_avg_sq", [0x7FC00000, 0xFFC00000, 0x3F800000, 0xBF800000])
def test_split_and_joined_a_nan_keeps_its_bits(op: Any, team: Any, exp_avg_sq: int) -> None:
    """Those that arithmetic makes: with a lower half of zeros, as from bfloat16 and on x86, or of ones, as on GPUs."""
    kept = [
        sign | 0x7F800000 | upper << 16 | lower for sign in (0, 2**31) for upper in range(128) for lower in (0, 0xFFFF)
    ]
    bits = torch.tensor([nan for nan in kept if nan & 0x7FFFFF], dtype=torch.uint32)
    squares = torch.full(bits.shape, exp_avg_sq, dtype=torch.uint32)
    weight = torch.full(bits.shape, -1, dtype=torch.int16).view(torch.bfloat16)
    zeros = torch.zeros(bits.shape)
    state = State(bits.clone().view(torch.float32), zeros, squares.clone().view(torch.float32), weight)
    state.split(team).join(team)
    assert torch.equal(state.master.view(torch.uint32), bits)
    assert torch.equal(state.exp_avg_sq.view(torch.uint32), squares)


@pytest.mark.parametrize(
    ("master", "exp_avg_sq", "weight"),
    [
        (0x3F800000, 0, 0x3F81),  # the weight is another number
        (0x3F808000, 0, 0x3F81),  # a tie goes to the even one
        (0x7FC00000, 0, 0x7FC0),  # the weight of a NaN is that of DeepSpeed's copy
        (0x7FC01234, 0, 0xFFFF),  # a payload that is not kept
        (0x3F800000, 0x80000000, 0x3F80),  # the sign of -0
        (0x3F800000, 0xBF800000, 0x3F80),
    ],
)
def test_what_would_be_lost_is_noticed(op: Any, team: Any, master: int, exp_avg_sq: int, weight: int) -> None:
    numbers = [torch.full((40_000,), 1.0) for _ in range(2)]
    state = State(numbers[0], torch.zeros(40_000), numbers[1], torch.ones(40_000, dtype=torch.bfloat16))
    state.remainder = torch.zeros(40_000, dtype=torch.int16)
    assert team.splits_exactly([state.master_run()])
    state.master.view(torch.uint32)[39_999] = master
    state.exp_avg_sq.view(torch.uint32)[39_999] = exp_avg_sq
    state.weight.view(torch.uint16)[39_999] = weight
    assert not team.splits_exactly([state.master_run()])


def digest(team: Any, *weights: torch.Tensor) -> bytes:
    return bytes(team.digest([(weight.data_ptr(), weight.numel()) for weight in weights]))


@pytest.mark.parametrize("numel", [1, 15, 16, 17, 1000, 32_768, 32_768 + 5, 100_003])
def test_a_digest_differs_when_weights_do(op: Any, team: Any, numel: int) -> None:
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    bits = weights.view(torch.int16)
    before = digest(team, weights)
    assert len(before) == 8 * -(-numel // 32_768)
    alone = op.Team(1)
    assert digest(alone, weights) == before == digest(alone, weights.clone())
    alone.close()
    for cuts in ([numel // 3], [numel // 2, numel // 2 + 1], [min(5, numel), numel - numel // 7]):
        pieces = [piece for piece in weights.tensor_split(sorted(cuts)) if piece.numel()]
        assert digest(team, *pieces) == before
    seen = {before}
    for place in {0, numel // 2, max(numel - 2, 0), numel - 1}:
        for bit in (0, 7, 15):
            bits[place] ^= -(2**15) if bit == 15 else 2**bit
            seen.add(digest(team, weights))
            bits[place] ^= -(2**15) if bit == 15 else 2**bit
    assert len(seen) == 1 + 3 * len({0, numel // 2, max(numel - 2, 0), numel - 1})
    assert digest(team, weights) == before
    assert digest(team, -weights) != before  # all sign bits
    if numel > 1 and not torch.equal(weights.flip(0), weights):
        assert digest(team, weights.flip(0)) != before


def test_an_update_of_split_master_weights_compares_the_weights_and_says_what_they_are(op: Any, team: Any) -> None:
    numel, part = 100_003, 40_000
    state = State.of(torch.randn(numel, generator=torch.Generator().manual_seed(0)), torch.bfloat16)
    state.split(team)
    gradient = torch.ones(numel, dtype=torch.bfloat16)
    scalars = op.AdamScalars(
        scale=1.0, beta1=0.9, one_minus_beta1=0.1, beta2=0.99, one_minus_beta2=0.01, bias_correction2=10.0, eps=1e-8,
        step_size=-1e-2, weight_decay=0, decay=0.0,
    )  # fmt: skip
    parts = state.weight[:part], state.weight[part:]
    runs = [state.split_run(gradient, 0, part), state.split_run(gradient, part, numel)]
    before = digest(team, *parts)
    job = team.adam(runs, "bfloat16", "bfloat16", 0, scalars, True, before)
    assert job.wait(60)
    assert job.match
    assert bytes(job.digest) == digest(team, *parts) != before

    # A weight changes: its block of 32,768 elements is left as it is.
    state.weight[part + 17] += 1
    kept = copy.deepcopy(state)
    job = team.adam(runs, "bfloat16", "bfloat16", 0, scalars, True, bytes(job.digest))
    assert job.wait(60)
    assert not job.match
    block = slice(32_768, 2 * 32_768)
    for name in ("remainder", "exp_avg", "exp_avg_sq", "weight"):
        assert torch.equal(getattr(state, name)[block], getattr(kept, name)[block])
        assert not torch.equal(getattr(state, name)[:32_768], getattr(kept, name)[:32_768])
    with pytest.raises(ValueError, match="another number of weights"):
        team.adam(runs, "bfloat16", "bfloat16", 0, scalars, True, b"12345678")


def variants(op: Any) -> list[str]:
    """The instruction sets of this processor and build."""
    names = []
    team = op.Team(1)
    for name in ("avx512", "avx2", "neon"):
        with contextlib.suppress(ValueError):
            team.split([], name)
            names.append(name)
    team.close()
    return names


def test_where_runs_are_cut_changes_no_bit(op: Any, team: Any, stock: Any) -> None:
    setting = Setting(70_001, weight_decay=0.1, scale=0.3)
    cuts = [0, 1, 2, 9, 4096, 4103, 40_000, 69_999, 70_001]
    assert differences(op, team, stock, setting, runs=list(zip(cuts, cuts[1:], strict=False))) == 0


def test_a_run_without_gradient_has_one_of_zeros(op: Any, team: Any) -> None:
    master, powers = torch.randn(1000), BetaPowers((0.9, 0.999))
    with_zeros, without = State.of(master, torch.bfloat16), State.of(master, torch.bfloat16)
    for step in (1, 2):
        scalars = scalars_of(op, Setting(1000, weight_decay=0.1), step, powers)
        for state, gradient in ((with_zeros, torch.zeros(1000, dtype=torch.bfloat16)), (without, None)):
            assert team.adam([state.run(gradient)], "bfloat16", "bfloat16", 8, scalars).wait(60)
    assert with_zeros.differing(without) == 0
    assert not torch.equal(with_zeros.master, master)


def test_jobs_end_in_any_order_and_every_block_runs_once(op: Any, team: Any) -> None:
    zeros = torch.zeros(3 * 2**20 + 4, dtype=torch.uint8)
    buffers = [torch.full((3 * 2**20 + 5,), 7, dtype=torch.uint8) for _ in range(20)]
    jobs = [team.copy(buffer.data_ptr(), zeros.data_ptr(), zeros.numel()) for buffer in buffers]
    assert all(job.wait(60) for job in reversed(jobs))
    assert all(job.done for job in jobs)
    assert all(not buffer[:-1].any() and buffer[-1] == 7 for buffer in buffers)


def test_waiting_lets_other_python_threads_run(op: Any) -> None:
    team = op.Team(1)
    half = 2**28
    buffer = torch.ones(2 * half, dtype=torch.uint8)
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    started = time.perf_counter()
    assert team.copy(buffer.data_ptr(), buffer.data_ptr() + half, half).wait(60)
    ended = time.perf_counter()
    stop.set()
    ticker.join()
    team.close()
    assert sum(started < tick < ended for tick in ticks) >= 3


def test_a_wait_has_a_limit(op: Any) -> None:
    team = op.Team(1)
    half = 2**28
    buffer = torch.empty(2 * half, dtype=torch.uint8)
    job = team.copy(buffer.data_ptr(), buffer.data_ptr() + half, half)
    assert not job.wait(0.0)
    assert job.wait(60)
    team.close()


def test_closing_waits_for_jobs_and_ends_the_threads(op: Any) -> None:
    def threads() -> int:
        names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
        return names.count("tencache-update")

    before = threads()
    team = op.Team(3)
    assert threads() == before + 3
    buffer, zeros = torch.ones(2**26, dtype=torch.uint8), torch.zeros(2**26, dtype=torch.uint8)
    job = team.copy(buffer.data_ptr(), zeros.data_ptr(), buffer.numel())
    team.close()
    team.close()
    assert job.done
    assert not buffer.any()
    assert threads() == before
    with pytest.raises(RuntimeError, match="closed"):
        team.copy(buffer.data_ptr(), zeros.data_ptr(), 1)


@pytest.mark.parametrize("closes", [True, False])
def test_a_forked_child_can_drop_the_team(op: Any, closes: bool) -> None:
    team = op.Team(2)
    time.sleep(0.1)  # until the threads wait for work: what they wait on, a child cannot destroy
    child = os.fork()
    if child == 0:
        if closes:
            team.close()
        del team
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    buffer, zeros = torch.ones(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    assert team.copy(buffer.data_ptr(), zeros.data_ptr(), 100).wait(60)
    team.close()


def test_wrong_arguments_are_named(op: Any, team: Any) -> None:
    scalars = scalars_of(op, Setting(4), 1, BetaPowers((0.9, 0.999)))
    state = State.of(torch.randn(4), torch.bfloat16)
    with pytest.raises(ValueError, match="int8"):
        team.adam([state.run(None)], "int8", "bfloat16", 0, scalars)
    with pytest.raises(ValueError, match="tail"):
        team.adam([state.run(None)], "float32", "bfloat16", 5, scalars)
    with pytest.raises(ValueError, match="address"):
        team.adam([(0, 0, 0, 0, 0, 4)], "float32", "bfloat16", 0, scalars)
    state.remainder, state.marks = torch.zeros(4, dtype=torch.int16), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="address"):
        team.split([state.master_run()])
    with pytest.raises(ValueError, match="one run"):
        team.split([state.master_run()] * 2, "", state.marks_address)
    with pytest.raises(ValueError, match="positive"):
        op.Team(0)


RACES = r"""
#include "team.h"
#include <atomic>
#include <cstdio>

int main()
{
    for (int round = 0; round < 50; ++round) {
        tencache::Team team(4);
        std::vector<std::vector<int>> marks(40, std::vector<int>(97, 0));
        std::vector<std::shared_ptr<tencache::Job>> jobs;
        std::vector<std::thread> callers;
        for (auto& mark : marks) {
            auto job = std::make_shared<tencache::Job>();
            job->n_blocks = mark.size();
            job->run = [&mark](std::size_t index) { ++mark[index]; };
            jobs.push_back(job);
        }
        for (int caller = 0; caller < 2; ++caller) {
            callers.emplace_back([&, caller] {
                for (std::size_t i = caller; i < jobs.size(); i += 2) { team.submit(jobs[i]); }
                for (std::size_t i = caller; i < jobs.size(); i += 2) { team.wait(jobs[i], 60.0); }
            });
        }
        for (auto& caller : callers) { caller.join(); }
        for (const auto& mark : marks) {
            for (int count : mark) {
                if (count != 1) { std::printf("a block ran %d times\n", count); return 1; }
            }
        }
    }
    return 0;
}
"""


def test_thread_sanitizer_finds_nothing_in_the_team(tmp_path: Path) -> None:
    sources = Path(__file__).parent.parent.parent / "ops" / "csrc" / "update"
    main, program = tmp_path / "races.cpp", tmp_path / "races"
    main.write_text(RACES)
    compiler = os.environ.get("CXX") or shutil.which("c++")
    assert compiler, "a C++ compiler builds the op as well"
    command = [compiler, "-std=c++17", "-g", "-O1", "-fsanitize=thread", "-pthread"]
    command += [f"-I{sources}", f"-I{sources.parent}"]
    subprocess.run([*command, str(main), str(sources / "team.cpp"), "-o", str(program)], check=True)
    # Thread sanitizer maps memory at fixed addresses, which address space randomisation may have taken.
    runner = ["setarch", "-R"] if shutil.which("setarch") else []
    done = subprocess.run([*runner, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
