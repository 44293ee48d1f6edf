# SPDX-License-Identifier: Apache-2.0
"""Configs as users write them, and as they should not: what each value means is known, so each outcome can be judged.

A config begins right in every key. Up to two mistakes are then made in it: a value that cannot be, a key that is
misspelt, two options that contradict each other.
"""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st


class Absent(enum.Enum):
    """In the place of a value: the key is not written."""

    ABSENT = enum.auto()


ABSENT = Absent.ABSENT

MANY_COMPONENTS = "x" + "/x" * 3000
WRONG_PATHS = ["", "  ", "~", "~/nvme", "$SCRATCH/nvme", "${TMPDIR}", "/tmp/$USER/x", "nvme ", "\tnvme", "a\0b",
               "a\ud800b", MANY_COMPONENTS, "y" * 300, "none", "auto", "null", "/proc/tencache", "/dev/null",
               "/dev/null/x", None, 5, True, ["nvme"], {"path": "nvme"}]  # fmt: skip
RIGHT_PATHS = ["nvme", "./nvme", "nvme/deeper/still", "with blank", "größe", "a$", "100%", "x" * 200, "d/" * 600 + "d"]

SIZES = [(2**20, 2**20), ("1MiB", 2**20), ("1.5 MB", 1_500_000), (1e6, 10**6), ("2097152", 2**21), (None, None),
         ("auto", None), (ABSENT, None)]  # fmt: skip
WRONG_SIZES = [True, False, -1, "-1", "x", "4 XB", "", [], {}, 1.5, "1.5", "0.5B", float("nan"), float("inf"), 1e30,
               10**40, "4GiB/rank", "0x10", "1e999"]  # fmt: skip
FLAGS = [(True, True), (False, False), (ABSENT, None)]
WRONG_FLAGS = ["perhaps", 2, -1, 0.5, [], {}, "", None]

# Of each key: the values that are right, each with what it means (None: the default), and values that are wrong.
OPTIONS: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "host_memory": ([*SIZES, (0, 0), ("0", 0), ("1TiB", 2**40)], [*WRONG_SIZES, 16, 64, "512", 65535]),
    "staging_memory": ([*SIZES, ("1TiB", 2**40)], WRONG_SIZES),
    "gds_memory": (SIZES, WRONG_SIZES),
    "chunk_size": (
        [(2**16, 2**16), ("256KiB", 2**18), (262_144.0, 2**18), (None, None), ("auto", None), (ABSENT, None)],
        [*WRONG_SIZES, 2**16 - 1, "2GiB"],
    ),
    "io_request_size": (
        [(4096, 4096), ("64KiB", 2**16), (None, None), (ABSENT, None)],
        [*WRONG_SIZES, 0, 4095, 6000, "2GiB"],
    ),
    "io_lanes": (
        [(1, 1), (8, 8), (64, 64), ("4", 4), (3.0, 3), (None, None), (ABSENT, None)],
        [True, False, 0, -1, 65, 10**12, 1.5, "many", "", [], {}, float("nan")],
    ),
    "io_timeout_s": (
        [(60, 60.0), (600.5, 600.5), ("120", 120.0), (86400, 86400.0), (None, None), (ABSENT, None)],
        [True, False, 0, -1, 86401, "soon", "", [], float("nan"), float("inf"), -float("inf")],
    ),
    "nvme_paths": (
        [([], []), (["second"], ["second"]), (["second", "third"], ["second", "third"]), (None, None), (ABSENT, None)],
        ["second", 5, True, {"a": 1}, [5], [None], [["second"]], ["second", "./second"],
         *([path] for path in WRONG_PATHS if isinstance(path, str))],
    ),
    "io_backend": (
        [("auto", None), ("native", "native"), ("posix", "posix"), (None, None), (ABSENT, None)],
        ["gds", "Native", "", True, 1, [], {}],
    ),
    "verify": (
        [("off", "off"), ("sampled", "sampled"), ("full", "full"), (None, None), (ABSENT, None)],
        ["always", True, False, 0, "", []],
    ),
    "gds": ([("auto", None), ("off", "off"), (None, None), (ABSENT, None)], ["yes", True, False, 1, "", [], "on"]),
    "host_path": ([*FLAGS, (None, None)], ["perhaps", 2, -1, 0.5, [], {}, ""]),
    "poison_buffers": ([*FLAGS, (None, None)], ["perhaps", 2, -1, 0.5, [], {}, ""]),
    "allow_faults": ([*FLAGS, (None, None)], ["perhaps", 2, -1, 0.5, [], {}, ""]),
}  # fmt: skip
AIO: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "block_size": (
        [(4096, 4096), (1048576, 2**20), (1e6 * 4.096, 4096000), (ABSENT, None)],
        ["x", "1048576", "1M", None, 0, -4096, 1000, 4097, True, 1.5, 2**31, 10**12, [], "auto", float("nan")],
    ),
    "queue_depth": (
        [(1, 1), (32, 32), (8.0, 8), (ABSENT, None)],
        [None, 0, -1, 1e9, 10**9, "8", "x", True, False, 2.5, [], {}, "auto", float("inf")],
    ),
    "intra_op_parallelism": ([(1, 1), (4, 4), (ABSENT, None)], [None, 0, -1, "4", "x", True, 10**6, 1.5, []]),
    "single_submit": ([*FLAGS, ("true", True), ("false", False), ("False", False)], WRONG_FLAGS),
    "overlap_events": ([*FLAGS, ("true", True), ("false", False)], WRONG_FLAGS),
    "use_gds": ([(False, False), (ABSENT, None)], ["perhaps", "false", "true", 1, [], None]),
    "num_threads": ([(8, None), (ABSENT, None)], []),
}
_COUNTS = [(ABSENT, None), (100_000, 100_000), (5e5, 500_000), ("auto", None)]
_WRONG_COUNTS = [-1, "x", "", None, [], {}, 1.5, float("nan"), float("inf")]
ZERO: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "stage": ([(3, 3)], [0, 1, 2, 4, -1, "x", None, [], 2.5, ABSENT]),
    "sub_group_size": ([*_COUNTS, (1, 1), (10**12, 10**12)], _WRONG_COUNTS),
    "stage3_max_live_parameters": ([*_COUNTS, (0, 0)], _WRONG_COUNTS),
    "stage3_prefetch_bucket_size": ([*_COUNTS, (0, 0)], _WRONG_COUNTS),
    "stage3_max_reuse_distance": ([*_COUNTS, (0, 0)], _WRONG_COUNTS),
    "stage3_param_persistence_threshold": ([*_COUNTS, (0, 0), (10**9, 10**9)], _WRONG_COUNTS),
    "reduce_bucket_size": ([*_COUNTS, (10_000, 10_000)], [*_WRONG_COUNTS, 0]),
    "overlap_comm": ([*FLAGS], ["perhaps", 2, [], {}, ""]),
    "contiguous_gradients": ([*FLAGS], ["perhaps", 2, [], {}, "", None]),
    "round_robin_gradients": ([*FLAGS], ["perhaps", 2, [], {}, "", None]),
}
_BUFFERS: dict[str, tuple[list[tuple[Any, Any]], list[Any]]] = {
    "pin_memory": ([*FLAGS], WRONG_FLAGS),
    "buffer_count": ([(ABSENT, None), (0, 0), (5, 5), (1e2, 100)], _WRONG_COUNTS),
}
OFFLOAD: dict[str, dict[str, tuple[list[tuple[Any, Any]], list[Any]]]] = {
    "offload_param": _BUFFERS | {
        "buffer_size": ([(ABSENT, None), (1e8, 10**8)], _WRONG_COUNTS),
        "max_in_cpu": ([(ABSENT, None), (0, 0), (1e9, 10**9)], _WRONG_COUNTS),
    },
    "offload_optimizer": _BUFFERS | {
        "pipeline_read": ([*FLAGS], WRONG_FLAGS),
        "pipeline_write": ([*FLAGS], WRONG_FLAGS),
        "fast_init": ([*FLAGS], WRONG_FLAGS),
        "ratio": ([(ABSENT, None), (1.0, 1.0), (1, 1.0)], [0.5, 0, 0.0, -1, 2, "x", None, [], float("nan")]),
        "super_offload": ([(ABSENT, None), (False, False)], [True, "perhaps", 2, [], None]),
        "cpuadam_cores_perc": ([(ABSENT, None), (0.5, 0.5)], [-1, 2, "x", None, []]),
    },
}  # fmt: skip
WRONG_SECTIONS = [5, True, "x", [], ["x"], 1.5]
UNKNOWN = {
    "": ["offload_engin", "offload-engine", "OffloadEngine", "offloading_engine", "ten_cache", "tencahe"],
    "zero_optimization": ["offload_engin", "offload-engine", "tencache", "tencahe", "stage3", "offload_params"],
    "zero_optimization.offload_param": ["offload_engine", "tencache", "device_", "nvme_paths"],
    "zero_optimization.offload_optimizer": ["offload_engine", "tencache", "buffer_size", "max_in_cpu"],
    "tencache": ["host_memry", "hostMemory", "nvme_path", "strict", "lanes", "model_config", "io-lanes", ""],
    "aio": ["block_sise", "queue_dept", "single_submits", "overlap_event"],
}
LARGEST_LANES_IN_TRAINING = 8
TRAINING = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True}, "steps_per_print": 10**9}


@dataclass
class Generated:
    """A config, what its values mean, and which of its keys cannot be meant."""

    config: dict[str, Any]
    means: dict[tuple[str, ...], Any] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)

    def section(self, *path: str) -> dict[str, Any]:
        result = self.config
        for part in path:
            result = result[part]
        return result

    def write(self, path: tuple[str, ...], value: Any) -> None:
        section = self.section(*path[:-1])
        section.pop(path[-1], None)
        if value is not ABSENT:
            section[path[-1]] = value

    def is_whole(self, *path: str) -> bool:
        """Whether the section is still one, after the mistakes made so far."""
        value: Any = self.config
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return isinstance(value, dict)


def _right(draw: Any, generated: Generated, section: tuple[str, ...], keys: Any) -> None:
    for key, (values, _) in keys.items():
        value, meaning = draw(st.sampled_from(values))
        generated.write((*section, key), copy.deepcopy(value))
        if meaning is not None:
            generated.means[(*section, key)] = meaning


def _places() -> dict[tuple[str, ...], list[Any]]:
    """Every key that a wrong value can be written for."""
    places = {("zero_optimization", key): wrong for key, (_, wrong) in ZERO.items()}
    for name, keys in OFFLOAD.items():
        places |= {("zero_optimization", name, key): wrong for key, (_, wrong) in keys.items()}
        places[("zero_optimization", name, "device")] = ["disk", "NVME", "", 5, True, [], None]
        places[("zero_optimization", name, "nvme_path")] = [*WRONG_PATHS, ABSENT]
        places[("zero_optimization", name)] = WRONG_SECTIONS
    places |= {("tencache", key): wrong for key, (_, wrong) in OPTIONS.items()}
    places |= {("aio", key): wrong for key, (_, wrong) in AIO.items() if wrong}
    places |= {("tencache",): WRONG_SECTIONS, ("aio",): WRONG_SECTIONS}
    places[("zero_optimization",)] = [*WRONG_SECTIONS, ABSENT, None]
    places[("offload_engine",)] = ["TenCache", "fastcache", "", 5, True, [], {}]
    return places


PLACES = _places()


@st.composite
def configs(draw: Any, most_mistakes: int = 2, for_training: bool = False) -> Generated:
    """Configs that ask for TenCache; relative paths are relative to the working directory.

    Args:
        most_mistakes: how many may be made in one.
        for_training: with a batch size, an optimizer and a precision.
    """
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {}, "tencache": {}, "aio": {}}
    generated = Generated(config)
    _right(draw, generated, ("zero_optimization",), ZERO)
    _right(draw, generated, ("tencache",), OPTIONS)
    _right(draw, generated, ("aio",), AIO)
    devices = draw(st.sampled_from([("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme"), ("cpu", "cpu"), (None, "nvme"),
                                    ("nvme", None), ("none", "cpu")]))  # fmt: skip
    for (name, keys), device in zip(OFFLOAD.items(), devices, strict=True):
        if device is None:
            continue
        section = {"device": device}
        config["zero_optimization"][name] = section
        generated.means[("zero_optimization", name, "device")] = device
        _right(draw, generated, ("zero_optimization", name), keys)
        if device == "nvme" or draw(st.booleans()):
            section["nvme_path"] = draw(st.sampled_from(RIGHT_PATHS))
            generated.means[("zero_optimization", name, "nvme_path")] = section["nvme_path"]
    if "nvme" not in devices:
        config["tencache"].pop("nvme_paths", None)
        generated.means.pop(("tencache", "nvme_paths"), None)
    where = draw(st.sampled_from(["zero", "top", "both"]))
    if where != "zero":
        config["offload_engine"] = "tencache"
    if where != "top":
        config["zero_optimization"]["offload_engine"] = "tencache"
    if for_training:
        config |= TRAINING
        config["tencache"]["io_lanes"] = min(int(config["tencache"].get("io_lanes") or 2), LARGEST_LANES_IN_TRAINING)
    for _ in range(draw(st.integers(0, most_mistakes))):
        _make_mistake(draw, generated)
    return generated


def _make_mistake(draw: Any, generated: Generated) -> None:
    if draw(st.integers(0, 3)) == 0:
        section = draw(st.sampled_from(list(UNKNOWN)))
        path = tuple(section.split(".")) if section else ()
        key = draw(st.sampled_from(UNKNOWN[section]))
        if generated.is_whole(*path):
            generated.section(*path)[key] = draw(st.sampled_from(["tencache", None, 1, {}])) if key else 1
            generated.mistakes.append(key)
        return
    path = draw(st.sampled_from(list(PLACES)))
    if not generated.is_whole(*path[:-1]):
        return
    if path[-1] == "nvme_path" and generated.section(*path[:-1]).get("device") != "nvme":
        return  # a path that is not used may be anything
    if path == ("zero_optimization",) and "offload_engine" not in generated.config:
        return  # nothing would ask for TenCache any more
    generated.write(path, copy.deepcopy(draw(st.sampled_from(PLACES[path]))))
    generated.mistakes.append(path[-1])
