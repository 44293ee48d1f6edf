# SPDX-License-Identifier: Apache-2.0
"""Hosts that were not set up alike: training runs and is exact, or every rank says within seconds what differs."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(240)

MLP = {"model": "mlp"}
AUTOMATIC = {"tencache": {"host_memory": None}}
AGREE: dict[str, dict[str, Any]] = {
    # What a launcher with another number of slots says on one host, and what a host without the variable says.
    "slots_differ": MLP | AUTOMATIC | {"offload_optimizer": "cpu", "by_rank": {"0": {"variables": {"LOCAL_SIZE": "1"}},
                                                   "1": {"variables": {"LOCAL_SIZE": "100000"}}}},
    "host_memory_differs": MLP | {"by_rank": {"0": {"tencache": {"host_memory": "8GiB"}},
                                              "1": {"tencache": {"host_memory": "600KiB"}}}},
    "host_memory_on_one_rank": MLP | AUTOMATIC | {"by_rank": {"1": {"tencache": {"host_memory": 0}}}},
}  # fmt: skip
REFUSE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "prefetch_differs": (
        MLP | {"by_rank": {"1": {"prefetch": 1000}}},
        ('"zero_optimization.stage3_prefetch_bucket_size"', "300000 on rank 0", "1000 on rank 1", "same config"),
    ),
    "device_differs": (
        MLP | {"by_rank": {"1": {"offload_param": "cpu"}}},
        ('"zero_optimization.offload_param.device"', "nvme on rank 0", "cpu on rank 1"),
    ),
    "homes_differ": (
        MLP | {"by_rank": {"1": {"circumstance": "another_home"}}},
        ("'layers.1.weight'", "on NVMe on rank 0", "in host memory on rank 1", "same model"),
    ),
}
# Last, for the other rank is left in a collective that nobody completes.
ON_ONE_RANK = MLP | {"by_rank": {"0": {"circumstance": "impatient"}, "1": {"engine": "stock_nvme"}}}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases: list[tuple[str, dict[str, Any], str]] = [("alike", MLP, "stock")]
    cases += [(name, case, "tencache") for name, case in AGREE.items()]
    cases += [(name, case, "tencache") for name, (case, _) in REFUSE.items()]
    return harness.run(
        [*cases, ("on_one_rank", ON_ONE_RANK, "tencache")], ranks=2, program="uneven_cases.py", timeout_s=120
    )


@pytest.mark.parametrize("name", AGREE)
def test_what_can_be_agreed_on_is(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        assert result["failure"] == ""
        assert result["losses"] == outcome.result("alike", "stock", rank)["losses"]
        assert result["local_ranks"] == 2
        assert result["resident_nbytes"] == outcome.result(name, "tencache", 0)["resident_nbytes"]


def test_the_smallest_figure_counts_and_is_announced(outcome: Any) -> None:
    everything = outcome.result("slots_differ", "tencache")["resident_nbytes"]
    assert 0 < outcome.result("host_memory_differs", "tencache")["resident_nbytes"] < everything
    assert '"tencache.host_memory" differs between ranks: 8589934592 bytes on rank 0' in outcome.finished.log
    assert "614400 bytes on rank 1" in outcome.finished.log


@pytest.mark.parametrize("name", REFUSE)
def test_what_cannot_is_an_error_on_every_rank(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        assert result["failure"].startswith("AgreementError: the ranks differ in ")
        for fragment in REFUSE[name][1]:
            assert fragment in result["failure"]
        assert result["seconds"] < 20


def test_a_rank_without_tencache_is_named(outcome: Any) -> None:
    result = outcome.per_rank[0]["on_one_rank/tencache"]
    for fragment in ("AgreementError", "rank 1 did not respond within 2 s", "run without TenCache", '"offload_engine"'):
        assert fragment in result["failure"]
