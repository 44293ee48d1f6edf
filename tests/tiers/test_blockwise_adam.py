# SPDX-License-Identifier: Apache-2.0
"""Adam with 8-bit moments in one pass gives bit for bit what bitsandbytes' CPU kernel gives."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import ConfigError, TenCacheError
from tencache_ds.integration import optimizer_states
from tencache_ds.integration.optimizer_states import EightBitAdam, class_named, nested
from tencache_ds.planning.chunks import SCALE_NUMEL
from tencache_ds.tensors import Scratch
from tencache_ds.tiers.fused_adam import TYPES, BlockwiseAdam
from tencache_ds.tiers.host_update import ArithmeticCores, UnfusedUpdate
from tencache_ds.tiers.sub_group import FIRST, FIRST_SCALE, MARKS, MASTER, REMAINDER, SECOND, SECOND_SCALE
from tencache_ds.tiers.update import SubGroupStep

pytestmark = pytest.mark.timeout(300)

SIZES = st.one_of(
    st.integers(1, 600),
    st.sampled_from(
        [SCALE_NUMEL - 1, SCALE_NUMEL, SCALE_NUMEL + 1, 4096, 32768 - 1, 32768, 32768 + 1, 65536 + 4096 + 3]
    ),
)
VARIANTS = ("avx512", "avx2", "neon")

TIME_SQUARE_ROOTS = """
import time, torch
from tencache_ds.integration.optimizer_states import _codes_of, _square_root
from tencache_ds.tiers.fused_adam import BlockwiseAdam
from tests.tiers.test_blockwise_adam import arithmetic, state_of

torch.set_num_threads(2)
maps, numel = [(values.tolist(), _codes_of(values)) for values in arithmetic()._maps], 2**20
hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
scalars, _ = arithmetic().scalars(1, hyper, 1.0)
state, gradient = state_of(numel, torch.Generator()), torch.ones(numel)
weights = [(0, torch.zeros(numel, dtype=torch.bfloat16))]

def seconds(square_root):
    adam, taken = BlockwiseAdam(1, *maps, square_root), []
    for _ in range(5):
        begin = time.perf_counter()
        assert adam.start(state, gradient, weights, scalars).wait(60)
        taken.append(time.perf_counter() - begin)
    return min(taken)

print(seconds(_square_root()) / seconds((0, 0)))
"""


@functools.cache
def arithmetic() -> EightBitAdam:
    optimizer = bitsandbytes.optim.AdamW8bit([torch.zeros(4096, requires_grad=True)])
    found = EightBitAdam.of(optimizer, [4096], torch.float32)
    assert found is not None
    return found


@functools.cache
def kernel() -> BlockwiseAdam:
    return arithmetic().one_pass(2)


def variants() -> list[str]:
    """Those that this processor has."""
    return [name for name in VARIANTS if kernel()._op.adam_variant()[0] == name or name == "avx2"]


def state_of(numel: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    n_scales = -(-numel // SCALE_NUMEL)
    return {
        MASTER: torch.randn(numel, generator=generator) * 0.02,
        FIRST: torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8),
        SECOND: torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8),
        FIRST_SCALE: torch.rand(n_scales, generator=generator) * (torch.rand(n_scales, generator=generator) > 0.2),
        SECOND_SCALE: torch.rand(n_scales, generator=generator) * 1e-4,
    }


def gradient_of(numel: int, kind: str, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    gradient = torch.randn(numel, generator=generator)
    if kind == "wide":
        gradient *= 10.0 ** torch.randint(-20, 3, (numel,), generator=generator)
    elif kind == "sparse":
        gradient *= torch.rand(numel, generator=generator) > 0.99
    elif kind == "zero":
        gradient.zero_()
    elif kind == "special":
        gradient[:: max(numel // 7, 1)] = float("inf")
        gradient[1 :: max(numel // 5, 1)] = float("nan")
    return gradient.to(dtype)


def weights_of(numel: int, cuts: list[int], dtype: torch.dtype) -> list[tuple[int, torch.Tensor]]:
    edges = sorted({0, numel, *(cut % numel for cut in cuts)})
    return [(low, torch.zeros(high - low, dtype=dtype)) for low, high in zip(edges, edges[1:], strict=False)]


@given(
    numel=SIZES,
    cuts=st.lists(st.integers(0, 10**6), max_size=4),
    dtypes=st.tuples(st.sampled_from(list(TYPES)), st.sampled_from(list(TYPES))),
    gradients=st.lists(st.sampled_from(["normal", "wide", "sparse", "zero"]), min_size=1, max_size=4),
    hyper=st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.0, 1e-5, 3e-4, 1e-2]),
            "betas": st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.5, 0.0)]),
            "eps": st.sampled_from([1e-8, 1e-6]),
            "weight_decay": st.sampled_from([0.0, 0.01, 0.3]),
        }
    ),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-16]),
    first=st.sampled_from([1, 2, 30, 1000, 10**6]),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_bits_are_those_of_bitsandbytes(
    numel: int,
    cuts: list[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    gradients: list[str],
    hyper: dict[str, Any],
    scale: float,
    first: int,
    variant: str,
    seed: int,
) -> None:
    if variant not in variants():
        variant = ""
    generator = torch.Generator().manual_seed(seed)
    theirs = state_of(numel, generator)
    ours = {kind: value.clone() for kind, value in theirs.items()}
    start, adam = arithmetic(), kernel()
    for number, kind in enumerate(gradients, first):
        gradient = gradient_of(numel, kind, dtypes[0], generator)
        unscaled = gradient.float().clone()
        if scale != 1.0:
            unscaled.mul_(scale)
        scalars, _ = start.scalars(number, hyper, scale)
        start(SubGroupStep(0, 0, number, scale, hyper, scalars), theirs, unscaled)
        weights = weights_of(numel, cuts, dtypes[1])
        assert adam.takes(ours, gradient, (weight for _, weight in weights))
        assert adam.start(ours, gradient, weights, scalars, variant=variant).wait(60)
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name
        assert torch.equal(torch.cat([weight for _, weight in weights]), theirs[MASTER].to(dtypes[1]))


@given(
    numel=SIZES,
    cuts=st.lists(st.integers(0, 10**6), max_size=4),
    dtype=st.sampled_from(list(TYPES)),
    gradients=st.lists(st.sampled_from(["normal", "wide", "sparse", "zero", "special"]), min_size=1, max_size=4),
    lr=st.sampled_from([0.0, 1e-5, 1e-2]),
    variant=st.sampled_from(VARIANTS),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_split_master_weights_change_no_bit(
    numel: int,
    cuts: list[int],
    dtype: torch.dtype,
    gradients: list[str],
    lr: float,
    variant: str,
    seed: int,
) -> None:
    if variant not in variants():
        variant = ""
    generator, adam = torch.Generator().manual_seed(seed), kernel()
    whole = state_of(numel, generator)
    lower = torch.tensor([0x8000, 0x8000, 0x7FFF, 0x8001, 0, 0xFFFF], dtype=torch.int32)  # ties, and beside them
    chosen = lower[torch.randint(0, len(lower), (numel,), generator=generator)]
    whole[MASTER] = ((whole[MASTER].view(torch.int32) >> 16 << 16) | chosen).view(torch.float32)
    weight = whole[MASTER].bfloat16()
    split = {kind: value.clone() for kind, value in whole.items() if kind != MASTER}
    split[REMAINDER] = torch.empty(numel, dtype=torch.int16)
    split[MARKS] = torch.empty(SCALE_NUMEL // 8 * -(-numel // SCALE_NUMEL), dtype=torch.uint8)
    assert adam.splits_exactly(whole, split, weight)
    assert adam.split(whole, split, weight).wait(60)
    ours, theirs = (weights_of(numel, cuts, torch.bfloat16) for _ in range(2))
    for first, part in (*ours, *theirs):
        part.copy_(weight[first : first + part.numel()])
    expected = b""
    for number, kind in enumerate(gradients, 1):
        gradient = gradient_of(numel, kind, dtype, generator)
        group = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        scalars, _ = arithmetic().scalars(number, group, 1.0)
        assert adam.takes(split, gradient, (part for _, part in ours))
        job = adam.start(split, gradient, ours, scalars, expected, variant)
        assert job.wait(60)
        assert job.match
        expected = bytes(job.digest)
        assert expected == adam.digest(ours)
        assert adam.start(whole, gradient, theirs, scalars, variant=variant).wait(60)
    new, master = torch.cat([part for _, part in ours]), whole[MASTER].clone()
    whole[MASTER] = torch.empty(numel)
    assert adam.join(whole, split, new).wait(60)
    assert torch.equal(whole[MASTER].view(torch.int32), master.view(torch.int32))
    assert torch.equal(new.view(torch.int16), torch.cat([part for _, part in theirs]).view(torch.int16))
    for kind in (FIRST, SECOND, FIRST_SCALE, SECOND_SCALE):
        assert torch.equal(split[kind].view(torch.uint8), whole[kind].view(torch.uint8)), kind


def test_an_update_of_split_master_weights_needs_the_expected_weights() -> None:
    numel, part = 100_003, 40_000
    state = state_of(numel, torch.Generator().manual_seed(1))
    whole, weight = state.copy(), state.pop(MASTER).bfloat16()
    state[REMAINDER] = torch.empty(numel, dtype=torch.int16)
    state[MARKS] = torch.empty(SCALE_NUMEL // 8 * -(-numel // SCALE_NUMEL), dtype=torch.uint8)
    adam, gradient = kernel(), torch.ones(numel)
    assert adam.split(whole, state, weight).wait(60)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    scalars, _ = arithmetic().scalars(1, group, 1.0)
    weights = [(0, weight[:part]), (part, weight[part:])]
    expected = adam.digest(weights)
    weight.view(torch.int16)[part + 17] += 1
    kept = {kind: value.clone() for kind, value in state.items()}
    job = adam.start(state, gradient, weights, scalars, expected)
    assert job.wait(60)
    assert not job.match
    block = slice(32_768, 2 * 32_768)  # of the changed weight: left as it is
    for kind in (REMAINDER, FIRST):
        assert torch.equal(state[kind][block], kept[kind][block])
        assert not torch.equal(state[kind][:32_768], kept[kind][:32_768])
    with pytest.raises(ValueError, match="has no weight"):
        adam.start(state, gradient, weights[1:], scalars)
    with pytest.raises(ValueError, match="another number of weights"):
        adam.start(state, gradient, weights, scalars, b"12345678")


def test_special_values_are_theirs_too() -> None:
    generator = torch.Generator().manual_seed(3)
    theirs = state_of(3000, generator)
    ours = {kind: value.clone() for kind, value in theirs.items()}
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    gradient = gradient_of(3000, "special", torch.float32, generator)
    scalars, _ = arithmetic().scalars(1, hyper, 1.0)
    arithmetic()(SubGroupStep(0, 0, 1, 1.0, hyper, scalars), theirs, gradient)
    assert kernel().start(ours, gradient, weights_of(3000, [], torch.bfloat16), scalars).wait(60)
    for name, value in theirs.items():
        assert (
            torch.equal(ours[name].nan_to_num(7.0), value.nan_to_num(7.0))
            if value.is_floating_point()
            else (torch.equal(ours[name], value))
        ), name


def test_square_roots_take_one_thread() -> None:
    """With several, as many as torch.set_num_threads was told, Intel's library takes fifteen times as long as the
    rest."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}  # with 1, torch.set_num_threads changes nothing here
    program = [sys.executable, "-c", TIME_SQUARE_ROOTS]
    timed = subprocess.run(program, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert timed.returncode == 0, timed.stderr
    assert float(timed.stdout.split()[-1]) < 4


def test_chunks_that_begin_where_a_scale_does_make_no_difference() -> None:
    generator = torch.Generator().manual_seed(5)
    whole = state_of(5 * 4096 + 100, generator)
    parts = {kind: value.clone() for kind, value in whole.items()}
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for number in (1, 2, 3):
        gradient = torch.randn(5 * 4096 + 100, generator=generator)
        scalars, _ = arithmetic().scalars(number, hyper, 1.0)
        arithmetic()(SubGroupStep(0, 0, number, 1.0, hyper, scalars), whole, gradient)
        for low, high in ((0, 4096), (4096, 3 * 4096), (3 * 4096, 5 * 4096 + 100)):
            scales = slice(low // SCALE_NUMEL, -(-high // SCALE_NUMEL))
            part = {
                kind: value[scales] if kind in (FIRST_SCALE, SECOND_SCALE) else value[low:high]
                for kind, value in parts.items()
            }
            weights = weights_of(high - low, [], torch.bfloat16)
            assert kernel().start(part, gradient[low:high], weights, scalars).wait(60)
    for name, value in whole.items():
        assert torch.equal(parts[name], value), name


@pytest.mark.parametrize("scale", [1.0, 1 / 3, torch.tensor(0.25)])
def test_their_kernel_by_chunks(scale: Any) -> None:
    """What updates chunks where TenCache's own cannot be used."""
    generator = torch.Generator().manual_seed(6)
    theirs = state_of(5000, generator)
    ours = {kind: value.clone() for kind, value in theirs.items()}
    hyper = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    gradient = gradient_of(5000, "normal", torch.bfloat16, generator)
    step = SubGroupStep(0, 0, 1, scale, hyper, arithmetic().scalars(1, hyper, float(scale))[0])
    arithmetic()(
        step, theirs, gradient.float() if isinstance(scale, float) and scale == 1 else gradient.float() * scale
    )
    weights = weights_of(5000, [1234], torch.float16)
    kernel = UnfusedUpdate(arithmetic(), ArithmeticCores(1, lambda sub_group: False), Scratch())
    assert kernel.takes(ours, gradient, weights)
    assert kernel.start(ours, gradient, weights, step, b"") is None
    assert all(torch.equal(ours[kind], value) for kind, value in theirs.items())
    assert torch.equal(torch.cat([weight for _, weight in weights]), theirs[MASTER].to(torch.float16))


def test_a_kernel_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_states, "_codes_of", lambda values: bytes(65536))
    with pytest.raises(TenCacheError, match=r"differs from that of bitsandbytes .* which is used instead"):
        arithmetic().one_pass(1)


@pytest.mark.parametrize(
    ("arguments", "numels", "dtype"),
    [
        ({"min_8bit_size": 5000}, [10_000, 4999], torch.float32),
        ({}, [10_000], torch.bfloat16),
        ({"optim_bits": 32}, [10_000], torch.float32),
    ],
)
def test_what_has_to_be_updated_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], numels: list[int], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(optimizer_states.dist, "get_rank", lambda: 0)
    kind = bitsandbytes.optim.AdamW if "optim_bits" in arguments else bitsandbytes.optim.AdamW8bit
    optimizer = kind([torch.zeros(4096, requires_grad=True)], **arguments)
    assert EightBitAdam.of(optimizer, numels, dtype) is None


def test_an_overridden_parameter_is_updated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_states.dist, "get_rank", lambda: 0)
    optimizer = bitsandbytes.optim.AdamW8bit([torch.zeros(4096, requires_grad=True)])
    # The Trainer's for embeddings, which bitsandbytes does not find among the parameters of ZeRO-3.
    triple = (torch.nn.Embedding(64, 64), "weight", {"optim_bits": 32})
    monkeypatch.setattr(optimizer.mng, "module_weight_config_triple", [triple])
    assert EightBitAdam.of(optimizer, [4096], torch.float32) is not None
    monkeypatch.setattr(optimizer.mng, "pid2config", {1: {"optim_bits": 32}})
    assert EightBitAdam.of(optimizer, [4096], torch.float32) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdamW8bit", "AdamW8bit"),
        ("adamw_8bit", "AdamW8bit"),
        ("adamw_bnb_8bit", "AdamW8bit"),
        ("paged_adamw_8bit", "PagedAdamW8bit"),
        ("Adam8bit", "Adam8bit"),
        ("PAGEDADAM8BIT", "PagedAdam8bit"),
        ("AdamW", None),
        ("lion_8bit", None),
        (None, None),
    ],
)
def test_names_in_a_config(name: str | None, expected: str | None) -> None:
    assert class_named(name) == expected


def test_without_bitsandbytes_the_name_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match='"AdamW8bit" needs bitsandbytes: pip install'):
        optimizer_states.build("AdamW8bit", [torch.zeros(1, requires_grad=True)], {})


def test_an_argument_that_the_class_does_not_know_is_named() -> None:
    with pytest.raises(ConfigError, match='"optimizer.params" of "AdamW8bit": .*learning_rate'):
        optimizer_states.build("AdamW8bit", [torch.zeros(1, requires_grad=True)], {"learning_rate": 1.0})


def test_states_are_nested_as_bitsandbytes_nests_them() -> None:
    param = torch.zeros(4096, requires_grad=True)
    param.grad = torch.ones(4096)
    optimizer = bitsandbytes.optim.AdamW8bit([param])
    optimizer.step()
    expected = optimizer.state_dict()["state"][0]
    assert nested(optimizer, optimizer.state[param]).keys() == expected.keys()
    inner = next(key for key, value in expected.items() if isinstance(value, dict))
    again = nested(optimizer, {key: value for key, value in expected.items() if key != inner} | expected[inner])
    assert {key: set(value) if isinstance(value, dict) else value for key, value in again.items()} == {
        key: set(value) if isinstance(value, dict) else value for key, value in expected.items()
    }
