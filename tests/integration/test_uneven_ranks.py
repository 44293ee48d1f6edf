# SPDX-License-Identifier: Apache-2.0
"""Hosts that were not set up alike: training runs and is exact, or every rank says within seconds what differs."""

from __future__ import annotations

from typing import Any

import pytest

from tencache_ds.config import TenCacheConfig

pytestmark = pytest.mark.timeout(240)

MLP = {"model": "mlp"}
IN_RAM = MLP | {"offload_param": "cpu"}
EVERY_OPTION: dict[str, Any] = {
    "host_memory": "8GiB", "gpu_memory": 0, "staging_memory": "30MB", "chunk_size": 2**16, "overlap_step": False,
    "host_path": False, "split_master": False, "nvme_paths": ["on_rank_1"], "io_backend": "posix", "io_lanes": 3,
    "io_request_size": 2**13, "io_timeout_s": 100, "verify": "full", "checkpoint": "async",
    "checkpoint_memory": "1MB", "activations": "on", "activation_memory": "1MB",
    "activation_min_size": 2**10, "gds": "off", "gds_memory": "1MB", "log": "quiet", "poison_buffers": False,
    "allow_faults": True,
}  # fmt: skip
"""Values that rank 1 alone has: whatever reaches a collective is agreed."""
AUTOMATIC = {"tencache": {"host_memory": None}}
AGREE: dict[str, dict[str, Any]] = {
    # What a launcher with another number of slots says on one host, and what a host without the variable says.
    "slots_differ": MLP | AUTOMATIC | {"offload_optimizer": "cpu", "by_rank": {"0": {"variables": {"LOCAL_SIZE": "1"}},
                                                   "1": {"variables": {"LOCAL_SIZE": "100000"}}}},
    "host_memory_differs": MLP | {"by_rank": {"0": {"tencache": {"host_memory": "8GiB"}},
                                              "1": {"tencache": {"host_memory": "600KiB"}}}},
    "host_memory_on_one_rank": MLP | AUTOMATIC | {"by_rank": {"1": {"tencache": {"host_memory": 0}}}},
    "every_option_in_ram": IN_RAM | {"by_rank": {"1": {"tencache": EVERY_OPTION}}},
    "every_option_on_nvme": MLP | {"by_rank": {"1": {"tencache": EVERY_OPTION}}},
    "overlap_on_one_rank": IN_RAM | {"by_rank": {"0": {"tencache": {"overlap_step": False}}}},
    "host_path_on_one_rank": IN_RAM | {"by_rank": {"1": {"tencache": {"host_path": False}}}},
    "steps_watched_on_one_rank": IN_RAM | {"by_rank": {"1": {"circumstance": "watched_step"}}},
    "no_gpu_memory_on_one_rank": MLP | {"circumstance": "device_memory",
                                        "by_rank": {"1": {"tencache": {"gpu_memory": 0}}}},
    "gpu_memory_differs": MLP | {"circumstance": "device_memory",
                                 "by_rank": {"1": {"tencache": {"gpu_memory": "16MB"}}}},
    "triton_on_one_rank": MLP | {"by_rank": {"0": {"circumstance": "device_memory"},
                                             "1": {"circumstance": "no_triton"}}},
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
    "leaves_differ": (
        MLP | {"by_rank": {"1": {"zero": {"leaf_module": {"names": ["layers.1"]}}}}},
        ('"zero_optimization.leaf_module"', "on rank 0", "layers.1", "on rank 1"),
    ),
    "dtype_of_gradients_differs": (
        MLP | {"by_rank": {"1": {"grad_accum_dtype": "fp32"}}},
        ('"data_types.grad_accum_dtype"', "None on rank 0", "fp32 on rank 1"),
    ),
    "frozen_differs": (
        IN_RAM | {"by_rank": {"1": {"freezes_one": True}}},
        ("'layers.1.weight'", "trained, outside the tiers on rank 0", "frozen, outside the tiers on rank 1"),
    ),
    "homes_differ": (
        MLP | {"by_rank": {"1": {"circumstance": "another_home"}}},
        ("'layers.1.weight'", "on NVMe on rank 0", "in host memory on rank 1", "same model"),
    ),
}
NO_SPACE = MLP | {"by_rank": {"0": {"tencache": {"gpu_memory": 0}},
                             "1": {"circumstance": "no_space", "tencache": {"gpu_memory": 0}}}}  # fmt: skip
# Last, for the other rank is left in a collective that nobody completes.
ON_ONE_RANK = MLP | {"by_rank": {"0": {"circumstance": "impatient"}, "1": {"engine": "stock_nvme"}}}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases: list[tuple[str, dict[str, Any], str]] = [("alike", MLP, "stock")]
    cases += [(name, case, "tencache") for name, case in AGREE.items()]
    cases += [(name, case, "tencache") for name, (case, _) in REFUSE.items()]
    cases.append(("no_space_on_one_rank", NO_SPACE, "tencache"))
    return harness.run(
        [*cases, ("on_one_rank", ON_ONE_RANK, "tencache")], ranks=2, program="uneven_cases.py", timeout_s=120
    )


def test_every_option_is_tried() -> None:
    assert EVERY_OPTION.keys() == TenCacheConfig.model_fields.keys()


@pytest.mark.parametrize("name", AGREE)
def test_what_can_be_agreed_on_is(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result(name, "tencache", rank)
        assert result["failure"] == ""
        assert result["losses"] == outcome.result("alike", "stock", rank)["losses"]
        assert result["local_ranks"] == 2
        assert result["resident_nbytes"] == outcome.result(name, "tencache", 0)["resident_nbytes"]


def test_gpu_memory_is_for_all_ranks_or_for_none(outcome: Any) -> None:
    for rank in outcome.ranks:
        assert outcome.result("no_gpu_memory_on_one_rank", "tencache", rank)["gpu_nbytes"] is None
        assert outcome.result("triton_on_one_rank", "tencache", rank)["gpu_nbytes"] is None
        assert outcome.result("gpu_memory_differs", "tencache", rank)["gpu_nbytes"] > 2**22
    assert "GPU memory is not used: the ranks differ in whether they can and may use it" in outcome.finished.log


def test_the_host_path_is_off_for_all_ranks_where_it_is_for_one(outcome: Any) -> None:
    assert "All ranks use DeepSpeed's own host path." in outcome.finished.log


def test_saves_are_synchronous_for_all_ranks_where_they_are_for_one(outcome: Any) -> None:
    assert '"tencache.checkpoint": sync on rank 0' in outcome.finished.log
    assert "All ranks save checkpoints before save_checkpoint() returns." in outcome.finished.log


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


def test_what_fails_on_one_rank_is_an_error_on_every_rank(outcome: Any) -> None:
    theirs, own = (outcome.result("no_space_on_one_rank", "tencache", rank) for rank in outcome.ranks)
    assert own["failure"].startswith("SpaceError: ")
    assert theirs["failure"].startswith("AgreementError: rank 1 cannot go on, and no rank can without it: SpaceError: ")
    assert "are missing" in theirs["failure"]
    assert max(theirs["seconds"], own["seconds"]) < 20


def test_a_rank_without_tencache_is_named(outcome: Any) -> None:
    result = outcome.per_rank[0]["on_one_rank/tencache"]
    for fragment in ("AgreementError", "rank 1 did not respond within 2 s", "run without TenCache", '"offload_engine"'):
        assert fragment in result["failure"]
