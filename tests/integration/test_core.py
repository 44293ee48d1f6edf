# SPDX-License-Identifier: Apache-2.0
"""The exactness core: what has to be equal, bit for bit, to the CPU offload of whichever DeepSpeed is installed.

Minutes long, and with nothing newer than the oldest supported packages, so that ``.ci/lines.py`` can run it with every
DeepSpeed line. Each case trains with stock once and with TenCache in each placement; all of one rank count share a
process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1900)

PROGRAM = "core_cases.py"
ENGINES = ("stock", "tencache")
RANKS = (1, 2)

PLACEMENTS: dict[str, dict[str, Any]] = {
    "nvme": {},  # with no host memory for weights and states
    "ram": {"offload_param": "cpu", "offload_optimizer": "cpu", "tencache": {"host_memory": None}},
}

TRAINED: dict[str, dict[str, Any]] = {
    "mlp": {"model": "mlp"},
    "llama": {"model": "llama"},
    "accumulation_clipping": {"model": "llama", "accumulation": 3, "clipping": 0.1},
    "fp32_gradients": {"model": "mlp", "grad_accum_dtype": "fp32", "accumulation": 2},
    "torch_adamw": {"model": "mlp", "optimizer": "torch_adamw"},
    "lora": {"model": "llama", "lora": True},
    "checkpointing_nonreentrant": {"model": "llama_nonreentrant"},
    "checkpointing_reentrant": {"model": "llama_reentrant"},
    "checkpointing_of_deepspeed": {"model": "residual_deepspeed", "action": "checkpoint_with_deepspeed"},
    "moe_leaf": {"model": "moe_leaf"},
}
WITHOUT_HOST_PATH = {"mlp": "ram", "accumulation_clipping": "nvme", "lora": "ram", "moe_leaf": "nvme"}
"""Trainings, each in one placement, with ``"host_path": false``."""

COMMON = {"action": "train", "weights": True, "steps": 6}
GATHERED = {"action": "hold_gathered", "model": "mlp"}

RESUMED: dict[str, dict[str, Any]] = {
    "accumulation_clipping": {"model": "mlp", "accumulation": 2, "clipping": 0.1, "scheduler": True},
    "lora": {"model": "llama", "lora": True},
}
PAIRS = tuple(itertools.product(ENGINES, ENGINES))
"""Who saved, and who loads."""

FAILED = {
    "action": "fail_a_step",
    "name": "core",
    "model": "mlp",
    "weights": True,
    "steps": 5,
    "where": "chunk",
    "at": 6,
    "tencache": {"gpu_memory": 0, "overlap_step": False},
}
UNIVERSAL: dict[str, Any] = {"model": "mlp", "accumulation": 2, "clipping": 0.1, "sub_group_size": 10**9}
"""One sub-group: before 0.18 DeepSpeed's conversion takes the first one for the whole model, and fails."""

Case = tuple[str, dict[str, Any], str]


def training_cases() -> list[Case]:
    cases: list[Case] = []
    for name, case in TRAINED.items():
        cases.append((name, COMMON | case, "stock"))
        cases += [(f"{name}_{place}", COMMON | case | more, "tencache") for place, more in PLACEMENTS.items()]
    for name, place in WITHOUT_HOST_PATH.items():
        more = PLACEMENTS[place]
        without = {"tencache": more.get("tencache", {}) | {"host_path": False}}
        cases.append((f"{name}_{place}_without_host_path", COMMON | TRAINED[name] | more | without, "tencache"))
    cases.append(("gathered", GATHERED, "stock"))
    cases += [(f"gathered_{place}", GATHERED | more, "tencache") for place, more in PLACEMENTS.items()]
    return cases


def checkpoint_cases() -> list[Case]:
    cases: list[Case] = []
    for name, case in RESUMED.items():
        for engine in ENGINES:
            cases.append((f"save_{name}", case | {"action": "save", "checkpoint": f"{name}-{engine}"}, engine))
        for saver, loader in PAIRS:
            cases.append(
                (f"load_{name}_of_{saver}", case | {"action": "load", "checkpoint": f"{name}-{saver}"}, loader)
            )
    return cases


def universal_cases() -> list[Case]:
    cases: list[Case] = []
    for engine in ENGINES:
        there = {"checkpoint": f"universal-{engine}"}
        cases.append(("save_universal", UNIVERSAL | there | {"action": "save"}, engine))
        cases.append((f"convert_{engine}", there | {"action": "make_universal"}, "stock"))
    loading = UNIVERSAL | {"action": "load", "config": {"checkpoint": {"load_universal": True}}}
    for saver, loader in PAIRS:
        cases.append((f"universal_of_{saver}", loading | {"checkpoint": f"universal-{saver}"}, loader))
    return cases


def failing_cases(ranks: int) -> list[Case]:
    """The last rank fails."""
    return [("failed", FAILED, "stock"), ("failed", FAILED | {"rank": ranks - 1}, "tencache")]


@pytest.fixture(scope="module", params=RANKS, ids=[f"ranks{ranks}" for ranks in RANKS])
def core(request: pytest.FixtureRequest, harness: Any) -> Any:
    cases = [*training_cases(), *checkpoint_cases(), *failing_cases(request.param), *universal_cases()]
    return harness.run(cases, ranks=request.param, program=PROGRAM, timeout_s=1800)


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> Callable[[Any], None]:
    """Puts a hash of what stock gave into the report: lines that give other bits than the rest are seen there."""

    def put(result: Any) -> None:
        record_property("stock", hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()[:16])

    return put


@pytest.mark.parametrize("place", PLACEMENTS)
@pytest.mark.parametrize("name", TRAINED)
def test_training(core: Any, name: str, place: str, record: Callable[[Any], None]) -> None:
    for rank in core.ranks:
        stock, ours = core.result(name, "stock", rank), core.result(f"{name}_{place}", "tencache", rank)
        assert ours["class"] == "TenCacheZeroOptimizer_Stage3"
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours["losses"] == stock["losses"]
        assert ours["weights"] == stock["weights"]
        if place == "nvme":
            assert ours["stats"]["resident_weight_nbytes"] == ours["stats"]["resident_state_nbytes"] == 0
            assert ours["stats"]["last_step"]["nbytes"]["nvme_read"] > 0
    record(stock)


@pytest.mark.parametrize("name", WITHOUT_HOST_PATH)
def test_training_without_the_host_path(core: Any, name: str) -> None:
    for rank in core.ranks:
        stock = core.result(name, "stock", rank)
        ours = core.result(f"{name}_{WITHOUT_HOST_PATH[name]}_without_host_path", "tencache", rank)
        assert (ours["losses"], ours["weights"]) == (stock["losses"], stock["weights"])


@pytest.mark.parametrize("place", PLACEMENTS)
def test_weights_held_gathered_over_steps(core: Any, place: str, record: Callable[[Any], None]) -> None:
    for rank in core.ranks:
        stock = core.result("gathered", "stock", rank)
        assert stock["changed"] != stock["released"]
        assert core.result(f"gathered_{place}", "tencache", rank) == stock
    record(stock)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_resumes_exactly_whoever_saved_it(core: Any, name: str, record: Callable[[Any], None]) -> None:
    """With TenCache. Stock does not know from which step Adam's powers were multiplied up: its own resume is not exact
    where that shows, but the same from either checkpoint.
    """
    for rank in core.ranks:
        uninterrupted = core.result(f"save_{name}", "stock", rank)
        assert core.result(f"save_{name}", "tencache", rank) == uninterrupted
        for saver in ENGINES:
            resumed = core.result(f"load_{name}_of_{saver}", "tencache", rank)
            for what in ("losses", "final_weights"):
                assert resumed[what] == uninterrupted[what], f"{what} of {saver}'s checkpoint"
        of_stock, of_tencache = (core.result(f"load_{name}_of_{saver}", "stock", rank) for saver in ENGINES)
        assert of_tencache == of_stock
    record(uninterrupted)


def test_universal_checkpoint(core: Any, record: Callable[[Any], None]) -> None:
    for rank in core.ranks:
        expected = core.result("universal_of_stock", "stock", rank)
        for saver, loader in PAIRS:
            assert core.result(f"universal_of_{saver}", loader, rank) == expected, f"{saver} saved, {loader} loaded"
    record(expected)


def test_a_step_that_failed_is_not_saved(core: Any) -> None:
    for rank in core.ranks:
        stock, ours = (core.result("failed", engine, rank) for engine in ENGINES)
        assert ours["failure"] == ("RuntimeError" if rank == core.ranks[-1] else "TenCacheError")
        assert ours["uses"]["save_checkpoint"] == "VoidStepError"
        assert not ours["saved"]
        assert (ours["losses"], ours["weights"]) == (stock["losses"], stock["weights"])
