# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused at the start, with an error that names the key, the reason and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(240)

PROGRAM = "error_cases.py"
ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "auto", "select_interval": "auto", "update_interval": 4,
           "full_warm_up_rounds": 0, "overlap_step": True}  # fmt: skip


def zero(**changes: Any) -> dict[str, Any]:
    return {"change": {"zero_optimization": changes}}


def options(**changes: Any) -> dict[str, Any]:
    return {"change": {"tencache": changes}}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "unknown_engine": (
        {"change": {"offload_engine": "fastcache"}},
        ("ConfigError", '"offload_engine"', "'fastcache'", '"tencache"'),
    ),
    "unknown_engine_by_alias": (
        {"change": {"offload_engine": None, "zero_optimization": {"offload_engine": "fastcache"}}},
        ("ConfigError", '"zero_optimization.offload_engine"', "'fastcache'"),
    ),
    "unknown_option": (options(host_memry="4GiB"), ("ConfigError", '"tencache.host_memry"', "4GiB", "host_memory")),
    "bad_size": (options(host_memory="lots"), ("ConfigError", '"tencache.host_memory"', "'lots'", "4GiB")),
    "bad_backend": (options(io_backend="rocket"), ("ConfigError", '"tencache.io_backend"', "'rocket'", "posix")),
    "too_many_lanes": (options(io_lanes=1000), ("ConfigError", '"tencache.io_lanes"', "1000", "64")),
    "options_not_an_object": ({"change": {"tencache": 5}}, ("ConfigError", '"tencache"', "5")),
    "stage_2": (
        {"change": {"zero_optimization": {"stage": 2, "offload_param": None}} , "zero_init": False},
        ("ConfigError", '"zero_optimization.stage"', "2", "Set it to 3"),
    ),
    "zenflow": (zero(zenflow=ZENFLOW), ("ConfigError", '"zero_optimization.zenflow"', "Remove one of the two")),
    "super_offload": (
        zero(offload_optimizer={"device": "cpu", "super_offload": True}),
        ("ConfigError", '"zero_optimization.offload_optimizer.super_offload"'),
    ),
    "async_with_another_writer": (
        {"change": {"tencache": {"checkpoint": "async"}, "checkpoint": {"writer": {"type": "fast"}}}},
        ("ConfigError", '"tencache.checkpoint": "async"', '"checkpoint.writer"', "Remove one of the two"),
    ),
    "async_without_archives": (
        {"change": {"tencache": {"checkpoint": "async"}, "checkpoint": {"checkpoint_serialization": False}}},
        ("ConfigError", '"tencache.checkpoint": "async"', '"checkpoint.checkpoint_serialization": false'),
    ),
    "bad_checkpoint": (options(checkpoint="asynk"), ("ConfigError", '"tencache.checkpoint"', "'asynk'", "async")),
    "deepcompile": ({"change": {"compile": {"deepcompile": True}}}, ("ConfigError", '"compile.deepcompile"')),
    "twin_flow": (
        zero(offload_optimizer={"ratio": 0.5}),
        ("ConfigError", '"zero_optimization.offload_optimizer.ratio"', "1.0"),
    ),
    "hpz": (zero(zero_hpz_partition_size=2), ("ConfigError", '"zero_optimization.zero_hpz_partition_size"')),
    "nothing_to_offload": (
        zero(offload_param=None, offload_optimizer=None),
        ("ConfigError", "nothing to offload", '"zero_optimization.offload_param.device"'),
    ),
    "no_nvme_path_for_weights": (
        zero(offload_param={"nvme_path": None}),
        ("ConfigError", '"zero_optimization.offload_param.nvme_path"', "missing"),
    ),
    "no_nvme_path_for_the_optimizer": (
        zero(offload_optimizer={"nvme_path": None}),
        ("ConfigError", '"zero_optimization.offload_optimizer.nvme_path"', "missing"),
    ),
    "nvme_path_below_a_file": (
        zero(offload_param={"nvme_path": "cases.json/nvme"}),
        ("ConfigError", '"zero_optimization.offload_param.nvme_path"', "cases.json/nvme", "Not a directory"),
    ),
    "nvme_path_is_a_file": (
        zero(offload_param={"nvme_path": "cases.json"}),
        ("ConfigError", '"zero_optimization.offload_param.nvme_path"', "cases.json"),
    ),
    "nvme_path_cannot_be_made": (
        zero(offload_optimizer={"nvme_path": "/proc/tencache"}),
        ("ConfigError", '"zero_optimization.offload_optimizer.nvme_path"', "/proc/tencache"),
    ),
    "nvme_path_not_writable": (
        {"change": {"zero_optimization": {"offload_param": {"nvme_path": "foreign"}}}, "circumstance": "foreign"},
        ("ConfigError", '"zero_optimization.offload_param.nvme_path"', "foreign", "not writable"),
    ),
    "further_path_below_a_file": (
        options(nvme_paths=["further", "cases.json/nvme"]),
        ("ConfigError", '"tencache.nvme_paths[1]"', "cases.json/nvme", "Not a directory"),
    ),
    "further_path_is_empty": (options(nvme_paths=[""]), ("ConfigError", '"tencache.nvme_paths[0]"', "an empty name")),
    "further_path_cannot_be_made": (
        options(nvme_paths=["/proc/tencache"]),
        ("ConfigError", '"tencache.nvme_paths[0]"', "/proc/tencache"),
    ),
    "further_path_twice": (
        options(nvme_paths=["further", "further/../further"]),
        ("ConfigError", '"tencache.nvme_paths[1]"', 'the same folder as "tencache.nvme_paths[0]"'),
    ),
    "further_path_is_the_nvme_path": (
        options(nvme_paths=["nvme"]),
        ("ConfigError", '"tencache.nvme_paths[0]"', 'same folder as "zero_optimization.offload_optimizer.nvme_path"'),
    ),
    "further_paths_and_nothing_on_nvme": (
        {
            "change": {
                "zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
                "tencache": {"nvme_paths": ["further"]},
            }
        },
        ("ConfigError", '"tencache.nvme_paths"', "nothing would be stored there"),
    ),
    "too_little_space_on_all_paths": (
        {"change": {"tencache": {"nvme_paths": ["further"]}}, "circumstance": "little_space"},
        ("SpaceError", "on 2 paths together", "missing", "tencache.nvme_paths"),
    ),
    "too_little_space": (
        {"circumstance": "little_space"},
        ("SpaceError", "MiB", "missing", "zero_optimization.offload_optimizer.nvme_path"),
    ),
    "files_cannot_grow": (
        {"circumstance": "small_files"},
        ("SpaceError", ".bin", "this process may write 1048576 per file; raise `ulimit -f`"),
    ),
    "no_file_can_be_opened": ({"circumstance": "few_descriptors"}, ("ulimit -n", "too many files are open")),
    "no_thread_can_be_started": (
        {"circumstance": "few_threads", "change": {"tencache": {"io_backend": "posix"}}},
        ("ProcessLimitError", "only 2 of 8 I/O lanes could be started", "ulimit -u", '"tencache.io_lanes"'),
    ),
    "faults_left_over": (
        {"circumstance": "faults_left_over"},
        ("ConfigError", "TENCACHE_FAULTS is set", '"tencache": {"allow_faults": true}', "unset TENCACHE_FAULTS"),
    ),
    "misspelt_engine_within_zero": (
        zero(offload_engin="tencache"),
        ("ConfigError", '"zero_optimization.offload_engin"', 'Did you mean "offload_engine"'),
    ),
    "queue_too_deep": (
        {"change": {"aio": {"queue_depth": 10**9}}}, ("ConfigError", '"aio.queue_depth"', "from 1 to 65536"),
    ),
    "nvme_path_with_a_variable": (
        zero(offload_param={"nvme_path": "$HOME/nvme"}),
        ("ConfigError", '"zero_optimization.offload_param.nvme_path"', "'$HOME/nvme'", "Write the full path"),
    ),
    "too_little_staging_memory": (
        options(staging_memory=4096),
        ("ConfigError", '"tencache.staging_memory"', "4096", "at least", '"tencache.chunk_size"'),
    ),
    "gds_for_weights_that_are_not_on_nvme": (
        {"change": {"zero_optimization": {"offload_param": {"device": "cpu"}}, "tencache": {"gds": "on"}}},
        ("ConfigError", '"tencache.gds"', '"zero_optimization.offload_param.device" is "cpu"'),
    ),
    "gds_and_every_byte_verified": (
        options(gds="on", verify="full"),
        ("ConfigError", '"tencache.gds": "on"', '"tencache.verify": "full"', '"sampled"'),
    ),
    "gds_without_a_gpu": (options(gds="on"), ("ConfigError", '"tencache.gds" is "on"', "not a CUDA GPU", '"auto"')),
    "memory_cannot_be_locked": (
        {"circumstance": "memlock", "change": {"tencache": {"io_backend": "aio"}}},
        ("LockedMemoryError", "ulimit"),
    ),
    "lbfgs": ({"change": {"optimizer": {"type": "LBFGS"}}}, ("ConfigError", "LBFGS", "closure", "another optimizer")),
}  # fmt: skip
if torch.cuda.is_available():
    # Memory registered with CUDA does not count against the limit on locked memory.
    del REFUSED["memory_cannot_be_locked"]
    del REFUSED["gds_without_a_gpu"]
WORKS: dict[str, dict[str, Any]] = {
    "null_options": {"change": {"tencache": None}},
    "without_permission_to_lock": {"circumstance": "memlock"},
    "without_pinned_memory": zero(offload_param={"pin_memory": False}, offload_optimizer={"pin_memory": False}),
    "both_keys": zero(offload_engine="tencache"),
    "afterwards": {},
}


@pytest.fixture(scope="module")
def outcome(harness: Any) -> Any:
    cases = [(name, case, "tencache") for name, (case, _) in REFUSED.items()]
    cases += [(name, case, "tencache") for name, case in WORKS.items()]
    return harness.run([*cases, ("afterwards", {}, "stock")], program=PROGRAM, timeout_s=150)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(outcome: Any, name: str) -> None:
    result = outcome.result(name, "tencache")
    print(result["failure"])
    for fragment in REFUSED[name][1]:
        assert fragment in result["failure"]
    assert result["threads"] == []
    assert result["scratch"] == [], "nothing may be left on the disk"


@pytest.mark.parametrize("name", WORKS)
def test_works(outcome: Any, name: str) -> None:
    result = outcome.result(name, "tencache")
    assert result["failure"] == ""
    assert result["losses"] == outcome.result("afterwards", "stock")["losses"]
    assert result["scratch"] == []


def test_backend_without_permission_to_lock(outcome: Any) -> None:
    assert outcome.result("without_permission_to_lock", "tencache")["io_backend"] == "native"
