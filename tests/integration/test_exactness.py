# SPDX-License-Identifier: Apache-2.0
"""Training with TenCache on NVMe gives bit for bit the losses and weights of stock CPU offload.

What ``test_core.py`` compares is not compared again here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tencache_ds.io import BACKENDS
from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(840)

TWENTY = ("mlp", "random_skip", "llama")
"""Train for twenty steps; the others as long as it takes until each step is like the one before it."""

MODELS: dict[str, dict[str, Any]] = {
    name: {"model": name, "weights": True, "steps": 20 if name in TWENTY else 6}
    for name in (
        "mlp",
        "random_skip",
        "unused",
        "tied",
        "external",
        "llama",
        "post_norm",
        "vit",
    )
}
MUON: dict[str, Any] = {"muon": True, "model": "llama", "offload_param": "cpu", "weights": True, "steps": 6}
WITHOUT_OFFLOAD = MUON | {"offload_param": "none", "offload_optimizer": "none"}

MODELS["unused"]["weight_decay"] = 0.0  # so that a weight without a gradient should not change at all

TRAINING: dict[str, dict[str, Any]] = {
    "accumulation_random_skip": {"model": "random_skip", "accumulation": 2, "steps": 6},
    "compiled": {"model": "llama", "compiled": True, "steps": 4},
    "compiled_random_skip": {"model": "random_skip", "compiled": True, "steps": 6},
    "fp32": {"model": "mlp", "precision": "fp32", "steps": 6},
    "two_groups_scheduler": {
        "model": "gpt2",
        "optimizer": "two_groups",
        "scheduler": True,
        "weights": True,
        "steps": 8,
    },
    "lion": {"model": "mlp", "optimizer": "lion", "steps": 6},
    "cpu_adagrad": {"model": "mlp", "optimizer": "cpu_adagrad", "steps": 6},
    # One chunk of the whole model, which CPU Lion's second state enlarges.
    "lion_by_name": {
        "model": "mlp",
        "steps": 4,
        "sub_group_size": 10**9,
        "tencache": {"chunk_size": None},
        "config": {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}},
    },
    "torch_adafactor": {"model": "mlp", "steps": 5, "optimizer": "torch.optim.Adafactor"},
    "torch_rmsprop_in_ram": {
        "model": "mlp",
        "steps": 5,
        "optimizer": "torch.optim.RMSprop",
        "offload_optimizer": "cpu",
    },
    "torch_adamw": {"model": "tied", "optimizer": "torch_adamw", "steps": 6},
    "torch_sgd": {"model": "mlp", "optimizer": "torch_sgd", "steps": 6},
    "eight_bit": {
        "model": "llama",
        "optimizer": "bitsandbytes.optim.AdamW8bit",
        "offload_param": "cpu",
        "weights": True,
        "steps": 6,
    },
    "eight_bit_by_name": {
        "model": "gpt2",
        "by_name": "adamw_8bit",
        "optimizer": "bitsandbytes.optim.AdamW8bit",
        "optimizer_params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "sub_group_size": 10**9,
        "offload_param": "cpu",
        "offload_optimizer": "cpu",
        "accumulation": 2,
        "clipping": 0.1,
        "weights": True,
        "steps": 6,
    },
    "eight_bit_in_two_places": {
        "model": "mlp",
        "optimizer": "bitsandbytes.optim.PagedAdam8bit",
        "sub_group_size": 10**9,
        "scheduler": True,
        "steps": 6,
        "tencache": {"host_memory": "6MiB", "chunk_size": 2**16},
    },
    "eight_bit_on_nvme": {"model": "post_norm", "optimizer": "bitsandbytes.optim.Adam8bit", "steps": 4},
    "eight_bit_but_for_a_sub_group": {
        "model": "mlp",
        "optimizer": "bitsandbytes.optim.AdamW8bit",
        "optimizer_params": {"min_8bit_size": 200_000},
        "steps": 4,
    },
    "muon": MUON | {"tencache": {"host_memory": "6MiB"}},  # some momentum in RAM, the rest and all else on NVMe
    "muon_in_ram": MUON
    | {
        "model": "gpt2",
        "offload_param": "nvme",
        "offload_optimizer": "cpu",
        "accumulation": 2,
        "clipping": 0.5,
        "scheduler": True,
        "persistence": 10**6,
    },
    # Some chunks of the optimizer's state in RAM and the others on NVMe; some sub-groups where it takes them whole.
    "state_in_two_places": {
        "model": "llama",
        "accumulation": 2,
        "clipping": 0.1,
        "steps": 6,
        "tencache": {"host_memory": "12MiB", "chunk_size": 2**18},
    },
    "sub_groups_in_two_places": {
        "model": "mlp",
        "optimizer": "torch_adamw",
        "sub_group_size": 3 * 10**5,
        "steps": 6,
        "tencache": {"host_memory": "12MiB"},
    },
    "initialized_whole": {"model": "gpt2", "zero_init": False, "steps": 6},
    "weights_in_ram": {"model": "post_norm", "offload_param": "cpu", "steps": 6},
    "weights_on_device": {"model": "llama", "offload_param": "none", "steps": 6},
    "optimizer_in_ram": {"model": "llama", "offload_optimizer": "cpu", "steps": 6},
    # On several ranks gathered by DeepSpeed.
    "gathers_one_by_one": {"model": "gpt2", "steps": 4, "zero": {"stage3_allgather_sequential": True}},
    "gathers_by_all_reduce": {"model": "mlp", "steps": 4, "zero": {"stage3_use_all_reduce_for_fetch_params": True}},
}
TWO_RANK_TRAINING = (
    "two_groups_scheduler",
    "torch_adamw",
    "lion",
    "eight_bit",
    "eight_bit_by_name",
    "muon",
    "state_in_two_places",
    "gathers_one_by_one",
    "gathers_by_all_reduce",
)
LONG = {"llama", "compiled"}
"""The core trains it for fewer steps; and tracing a model of transformers takes most of a minute, while
``compiled_random_skip`` is traced in seconds."""
LONG_ON_TWO_RANKS = {"mlp", "llama", "post_norm", "vit", "torch_adamw", "lion"}
"""The core trains on two ranks for fewer steps, and with torch's AdamW. Neither the layers of a model nor Lion's update
know of ranks."""

FP16: dict[str, dict[str, Any]] = {
    "fp16": {"model": "mlp", "precision": "fp16", "weights": True},
    "fp16_llama": {"model": "llama", "precision": "fp16", "accumulation": 2, "clipping": 0.1},
    "fp16_overflow": {"model": "mlp", "precision": "fp16", "scale_power": 32},
}
"""For GPUs: DeepSpeed's CPU accelerator has no fp16. The last one skips its first steps."""

NO_GPU = {"gpu_memory": 0}
"""Where a GPU has memory left, everything would go there, and no byte would be counted."""

SETTINGS: dict[str, dict[str, Any]] = {
    "most_ahead": {"prefetch": 10**9, "max_live": 10**9, "reuse": 10**9},
    "persistence_none_small_sub_groups_odd_chunks": {
        "persistence": 0,
        "sub_group_size": 10**5,
        "tencache": {"chunk_size": 100_003},
    },
    "persistence_most_one_lane_no_verification": {
        "persistence": 10**6,
        "tencache": {"io_lanes": 1, "verify": "off"},
    },
    "staging_least": {"smallest_staging": True},
    "staging_least_no_prefetch": {"smallest_staging": True, "prefetch": 0, "max_live": 1},
    "staging_least_sub_group_large": {"smallest_staging": True, "sub_group_size": 10**9, "max_live": 10**9},
    **{
        f"{backend}_small_requests": {"tencache": {"io_backend": backend, "io_request_size": 2**16, "io_lanes": 3}}
        for backend in BACKENDS
    },
    "whole_sub_group_chunks": {"tencache": {"chunk_size": "1GiB"}, "sub_group_size": 10**9},
    "host_memory_automatic": {"tencache": {"host_memory": None}},
    "host_memory_none": {"tencache": NO_GPU},
    "host_memory_partial": {"tencache": {"host_memory": "1MiB"} | NO_GPU},
    "host_memory_large": {"tencache": {"host_memory": "8GiB"} | NO_GPU},
    "host_memory_for_state": {"tencache": {"host_memory": "20MiB", "chunk_size": 2**18} | NO_GPU},
    "host_memory_for_state_least_staging": {
        "smallest_staging": True,
        "sub_group_size": 10**9,
        "tencache": {"host_memory": "24MiB", "chunk_size": 2**18} | NO_GPU,
    },
    "split_master_weights": {"offload_param": "cpu", "tencache": NO_GPU},
    "whole_master_weights": {"offload_param": "cpu", "tencache": {"split_master": False} | NO_GPU},
}
"""Several values in one case, as far as nothing is asserted of one alone; generated configs train more of them."""
SETTINGS_CASE: dict[str, Any] = {"model": "llama", "steps": 5}

TRAFFIC: dict[str, dict[str, Any]] = {
    backend: {
        "model": "mlp_wide",
        "steps": 5,
        "sub_group_size": 10**9,
        "measure_traffic": True,
        "tencache": {"io_backend": backend, "chunk_size": None},
    }
    for backend in BACKENDS
}


def both(cases: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any], str]]:
    return [(name, case, engine) for name, case in cases for engine in ("stock", "tencache")]


@pytest.fixture(scope="module")
def one_rank(harness: Any, pytestconfig: pytest.Config) -> Any:
    names = wanted(pytestconfig, MODELS | TRAINING, LONG)
    cases = both((name, (MODELS | TRAINING)[name]) for name in names)
    return harness.run([*cases, ("muon_without_offload", WITHOUT_OFFLOAD, "stock")], timeout_s=800)


@pytest.fixture(scope="module")
def settings(harness: Any) -> Any:
    cases: list[tuple[str, dict[str, Any], str]] = [("settings", SETTINGS_CASE, "stock")]
    cases += [(f"settings_{name}", SETTINGS_CASE | case, "tencache") for name, case in SETTINGS.items()]
    cases += [(f"traffic_{name}", case, "tencache") for name, case in TRAFFIC.items()]
    return harness.run(cases, timeout_s=800)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    names = wanted(pytestconfig, [*MODELS, *TWO_RANK_TRAINING], LONG_ON_TWO_RANKS)
    cases = both((name, (MODELS | TRAINING)[name]) for name in names)
    return harness.run([*cases, ("muon_without_offload", WITHOUT_OFFLOAD, "stock")], ranks=2, timeout_s=800)


@pytest.fixture(scope="module")
def half_precision(harness: Any) -> Any:
    return harness.run(both(FP16.items()), timeout_s=200)


def assert_same(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        stock, ours = (outcome.result(name, engine, rank) for engine in ("stock", "tencache"))
        assert ours["class"] == "TenCacheZeroOptimizer_Stage3"
        assert ours["losses"] == stock["losses"]
        assert len(set(stock["losses"])) > 1, "the case does not train"
        assert ours.get("weights") == stock.get("weights")
        assert ours["initial_weights"] == stock["initial_weights"]


@pytest.mark.parametrize(
    ("run", "name"),
    [(run, name) for run in ("one_rank", "two_ranks") for name in ("eight_bit", "eight_bit_by_name", "muon")]
    + [("one_rank", "eight_bit_in_two_places")],
)
def test_the_update_goes_on_during_the_next_forward_pass(run: str, name: str, request: pytest.FixtureRequest) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        assert outcome.result(name, "tencache", rank)["hidden_share"] > 0.5


@pytest.mark.parametrize("name", marked([*MODELS, *TRAINING], LONG))
def test_one_rank(one_rank: Any, name: str) -> None:
    assert_same(one_rank, name)


@pytest.mark.parametrize("name", marked(["compiled", "compiled_random_skip"], LONG))
def test_the_compiler_traces_nothing_but_the_hooks_of_modules(one_rank: Any, name: str) -> None:
    """Other threads change what the rest works on. Where layers are skipped, DeepSpeed gathers weights at their use."""
    hooks = {"gather_for_forward", "release_after_forward", "gather_for_backward", "release_after_backward"}
    assert set(one_rank.result(name, "tencache")["traced"]) == hooks


@pytest.mark.parametrize("name", marked([*MODELS, *TWO_RANK_TRAINING], LONG_ON_TWO_RANKS))
def test_two_ranks(two_ranks: Any, name: str) -> None:
    assert_same(two_ranks, name)


@pytest.mark.parametrize("run", ["one_rank", "two_ranks"])
def test_muon_trains_as_without_offload(run: str, request: pytest.FixtureRequest) -> None:
    outcome = request.getfixturevalue(run)
    for rank in outcome.ranks:
        ours, alone = outcome.result("muon", "tencache", rank), outcome.result("muon_without_offload", "stock", rank)
        assert (ours["losses"], ours["weights"]) == (alone["losses"], alone["weights"])


def test_muon_moves_what_is_on_nvme_once_there_and_back(one_rank: Any) -> None:
    """Four to six bytes of a matrix's parameter, twelve of Adam's: embeddings, the head, and what is no matrix."""
    result = one_rank.result("muon", "tencache")
    stats, numel = result["stats"], result["numel"]
    moved = stats["last_step"]["nbytes"]
    assert moved["nvme_read"] == moved["nvme_write"] == stats["stored_nbytes"]
    assert 4 < moved["nvme_read"] / numel < 12
    assert 0 < stats["resident_state_nbytes"] < numel  # half of momentum


@pytest.mark.gpu
@pytest.mark.parametrize("name", FP16)
def test_half_precision(half_precision: Any, name: str) -> None:
    assert_same(half_precision, name)


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_a_weight_without_gradient_does_not_move(ranks: str, request: pytest.FixtureRequest) -> None:
    result = request.getfixturevalue(ranks).result("unused", "tencache")
    before, after = result["initial_weights"], result["weights"]
    assert before["never.weight"] == after["never.weight"]
    assert before["never.bias"] == after["never.bias"]
    assert before["layers.0.weight"] != after["layers.0.weight"]


@pytest.mark.parametrize("name", SETTINGS)
def test_no_setting_changes_the_losses(settings: Any, name: str) -> None:
    ours = settings.result(f"settings_{name}", "tencache")
    assert ours["losses"] == settings.result("settings", "stock")["losses"]


def test_resident_weights_are_not_read(settings: Any) -> None:
    everything = settings.result("settings_host_memory_large", "tencache")["stats"]
    part = settings.result("settings_host_memory_partial", "tencache")["stats"]
    nothing = settings.result("settings_host_memory_none", "tencache")["stats"]
    assert everything["resident_weight_nbytes"] > part["resident_weight_nbytes"] > nothing["resident_weight_nbytes"]
    reads = [stats["last_step"]["nbytes"]["nvme_read"] for stats in (everything, part, nothing)]
    assert reads == sorted(reads)
    assert len(set(reads)) == 3
    assert sum(everything["last_step"]["accesses"][kind] for kind in ("prefetched", "late", "demand")) == 0


def test_optimizer_state_uses_the_host_memory_that_weights_and_gradients_leave(settings: Any) -> None:
    everything = settings.result("settings_host_memory_large", "tencache")["stats"]
    assert everything["stored_nbytes"] == 0
    assert everything["last_step"]["nbytes"]["nvme_read"] == everything["last_step"]["nbytes"]["nvme_write"] == 0
    chunk_nbytes, gradient_nbytes = 2**18, everything["resident_weight_nbytes"]
    for name, host_nbytes in (
        ("host_memory_for_state", 20 * 2**20),
        ("host_memory_for_state_least_staging", 24 * 2**20),
    ):
        result = settings.result(f"settings_{name}", "tencache")["stats"]
        assert result["resident_weight_nbytes"] == everything["resident_weight_nbytes"]
        left = host_nbytes - result["resident_weight_nbytes"] - gradient_nbytes - result["resident_state_nbytes"]
        assert 0 <= left < 2 * chunk_nbytes
        moved = result["last_step"]["nbytes"]
        assert moved["nvme_read"] == moved["nvme_write"] == result["stored_nbytes"] > 0


def test_split_master_weights_save_two_bytes_per_parameter(settings: Any) -> None:
    for kind, nbytes in (("split", 10), ("whole", 12)):
        result = settings.result(f"settings_{kind}_master_weights", "tencache")
        moved = result["stats"]["last_step"]["nbytes"]
        assert moved["nvme_read"] == moved["nvme_write"] == result["stats"]["stored_nbytes"]
        assert moved["nvme_read"] / result["numel"] == pytest.approx(nbytes, rel=0.01)


def test_split_master_weights_of_8_bit_adam_save_a_third(one_rank: Any) -> None:
    """6.03 bytes per parameter if they were whole; pieces of small chunks are filled up to pages."""
    result = one_rank.result("eight_bit", "tencache")
    moved = result["stats"]["last_step"]["nbytes"]
    assert moved["nvme_read"] == moved["nvme_write"] == result["stats"]["stored_nbytes"]
    assert moved["nvme_read"] / result["numel"] == pytest.approx(4.16, rel=0.08)


@pytest.mark.parametrize("backend", TRAFFIC)
def test_nvme_bytes_per_parameter_and_step(settings: Any, backend: str) -> None:
    result = settings.result(f"traffic_{backend}", "tencache")
    assert result["stats"]["io_backend"] == backend
    traffic = result["traffic"]
    per_parameter = traffic["counted_nbytes"] / traffic["steps"] / result["numel"]
    print(f"{backend}: {per_parameter:.2f} bytes per parameter and step on NVMe")
    assert per_parameter <= 30.5
    assert traffic["kernel_nbytes"] == pytest.approx(traffic["counted_nbytes"], rel=0.01)
