# SPDX-License-Identifier: Apache-2.0
"""Training and generation without TenCache's host path: DeepSpeed's own functions, with the same bits.

The exactness core has cases without it, too.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)

WITHOUT = {"host_path": False}
RAM = {"offload_param": "cpu", "offload_optimizer": "cpu"}
BESIDE: dict[str, dict[str, Any]] = {
    "ram": {"model": "mlp"} | RAM,
    "nvme": {"model": "mlp", "accumulation": 2, "clipping": 0.1},
}
IN_GPU_MEMORY: dict[str, dict[str, Any]] = {
    "everything": {"model": "post_norm", "weights": True, "steps": 8, "tencache": WITHOUT} | RAM,
    "weights": {"model": "llama", "device_memory": "3MiB", "weights": True, "steps": 8, "tencache": WITHOUT},
}
GENERATE = ["generate", "generate"]
GENERATION: dict[str, dict[str, Any]] = {
    "everything": {"actions": GENERATE, "tencache": WITHOUT} | RAM,
    "part": {"actions": GENERATE, "device_memory": "2MiB", "tencache": WITHOUT},
}


def both(cases: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, case, engine) for name, case in cases.items() for engine in ("stock", "tencache")]


@pytest.fixture(scope="module", params=[1, 2], ids=["ranks1", "ranks2"])
def beside(request: pytest.FixtureRequest, harness: Any) -> Any:
    return harness.run(both(BESIDE), ranks=request.param, program="host_path_cases.py", timeout_s=300)


@pytest.fixture(scope="module")
def in_gpu_memory(harness: Any) -> Any:
    return harness.run(both(IN_GPU_MEMORY), program="gpu_memory_cases.py", timeout_s=300)


@pytest.fixture(scope="module")
def generation(harness: Any) -> Any:
    return harness.run(both(GENERATION), program="inference_cases.py", timeout_s=300)


@pytest.mark.parametrize("name", BESIDE)
def test_engines_with_and_without_it_train_beside_each_other(beside: Any, name: str) -> None:
    for rank in beside.ranks:
        stock, ours = beside.result(name, "stock", rank)["stock"], beside.result(name, "tencache", rank)
        assert len(set(stock["losses"])) > 1, "the case does not train"
        for switched in ("on", "off"):
            assert ours[switched]["losses"] == stock["losses"]
            assert ours[switched]["weights"] == stock["weights"]


@pytest.mark.parametrize("name", BESIDE)
def test_without_it_deepspeeds_own_functions_are_called(beside: Any, name: str) -> None:
    called = {switched: beside.result(name, "tencache")[switched]["called"] for switched in ("on", "off")}
    modules = {switched: {each.partition(".")[0] for each in names} for switched, names in called.items()}
    quick = {"fetches.partition", "gradients._copy_collected", "gradients.complete"}
    if len(beside.ranks) > 1:
        quick.add("gathers.gather")
    assert "module_hooks" in modules["on"]
    assert quick <= set(called["on"])
    # What is left asks whether it is switched off, and calls DeepSpeed.
    assert modules["off"] <= {"__init__", "parts", "fetches", "gradients", "gathers", "suspended_hooks"}
    skipped = {
        "fetches.partition",
        "fetches.release",
        "fetches._gather_from_ranks",
        "gradients.complete",
        "gathers.gather",
    }
    assert not skipped & set(called["off"])


def test_the_activation_line_says_so(beside: Any) -> None:
    lines = [line for line in beside.finished.log.splitlines() if " is active with DeepSpeed" in line]
    assert ["with DeepSpeed's own host path" in line for line in lines] == [False, True] * len(BESIDE)


@pytest.mark.parametrize("name", IN_GPU_MEMORY)
def test_weights_in_gpu_memory_are_gathered_for_each_use(in_gpu_memory: Any, name: str) -> None:
    stock, ours = (in_gpu_memory.result(name, engine) for engine in ("stock", "tencache"))
    assert ours["losses"] == stock["losses"]
    assert len(set(stock["losses"])) > 1, "the case does not train"
    assert ours["weights"] == stock["weights"]
    assert ours["stats"]["gpu_weight_nbytes"] > 0
    assert set(ours["modules_without_hooks"]) == {0}


@pytest.mark.parametrize("name", GENERATION)
def test_generation(generation: Any, name: str) -> None:
    stock, ours = (generation.result(name, engine) for engine in ("stock", "tencache"))
    assert ours["seen"] == stock["seen"]
    assert min(ours["gpu_weight_nbytes"]) > 2**20
