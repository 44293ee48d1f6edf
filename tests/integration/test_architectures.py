# SPDX-License-Identifier: Apache-2.0
"""Models of many architectures, with weights in RAM or on NVMe, equal stock CPU offload bit for bit: each has its own
ways of using a module twice, of returning weights, of leaving layers out, of adding up what it has used several times.

A few of them, on one rank; tests marked ``long`` train all, on one rank and on two: some minutes.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.architectures import ARCHITECTURES, BUILT_WHOLE
from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(900)

A_FEW = ("albert", "gpt_oss", "mamba", "opt", "swin", "t5")
LONG = {*ARCHITECTURES} - {*A_FEW}
SMALL = ("convnext", "mobilenet_v2", "swin")
"""Without weights that would go to NVMe."""

RAM = {"offload_param": "cpu", "offload_optimizer": "cpu"}


LONG_ADAPTED = {*ARCHITECTURES} - {"deepseek_v3", "mamba", "t5"}
ADAPTER_RANKS = (128, 64, 8)
"""In turn; adapters of the first are on NVMe too."""


def case_of(name: str, places: str) -> dict[str, Any]:
    case = {
        "model": f"transformers/{name}", "zero_init": name not in BUILT_WHOLE, "steps": 4, "accumulation": 2,
        "clipping": 0.1, "sub_group_size": 60_000, "persistence": 100, "weights": True,
    }  # fmt: skip
    if places == "adapted":
        rank = ADAPTER_RANKS[ARCHITECTURES.index(name) % len(ADAPTER_RANKS)]
        case |= {"lora": True, "lora_rank": rank, "steps": 3, "tencache": {"chunk_size": 2**20}}
        case |= {"prefetch": 10**6, "max_live": 10**7}  # with less, stock fails where adapters wrap experts
    return case | (RAM if places == "ram" else {})


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=lambda ranks: f"{ranks}_ranks")
def trained(harness: Any, request: pytest.FixtureRequest) -> Any:
    chosen = wanted(request.config, ARCHITECTURES, LONG)
    cases = [(name, case_of(name, "ram"), "stock") for name in chosen]
    cases += [(f"{name} {places}", case_of(name, places), "tencache") for name in chosen for places in ("ram", "nvme")]
    for name in wanted(request.config, ARCHITECTURES, LONG_ADAPTED):
        cases += [(f"{name} adapted", case_of(name, "adapted"), engine) for engine in ("stock", "tencache")]
    return harness.run(cases, ranks=request.param, timeout_s=800)


@pytest.mark.parametrize("places", ["ram", "nvme"])
@pytest.mark.parametrize("name", marked(ARCHITECTURES, LONG))
def test_an_architecture(trained: Any, name: str, places: str) -> None:
    for rank in trained.ranks:
        stock, ours = trained.result(name, "stock", rank), trained.result(f"{name} {places}", "tencache", rank)
        assert ours["initial_weights"] == stock["initial_weights"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours["losses"] == stock["losses"]
        assert ours["weights"] == stock["weights"]
        if places == "nvme" and len(trained.ranks) == 1 and name not in (*BUILT_WHOLE, *SMALL):
            assert ours["stats"]["stored_weight_nbytes"] > 0


@pytest.mark.parametrize("name", marked(ARCHITECTURES, LONG_ADAPTED))
def test_adapters_in_fp32_beside_it(trained: Any, name: str) -> None:
    for rank in trained.ranks:
        stock, ours = (trained.result(f"{name} adapted", engine, rank) for engine in ("stock", "tencache"))
        assert ours["initial_weights"] == stock["initial_weights"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours["losses"] == stock["losses"]
        assert ours["weights"] == stock["weights"]
