# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.config import (
    DEFAULT_ACTIVATIONS,
    Activations,
    Checkpoint,
    Gds,
    IoBackend,
    Log,
    Share,
    TenCacheConfig,
    Verify,
    options_from,
    parse_size,
)
from tencache_ds.errors import ConfigError

UNITS = {"B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4} | {
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "TiB": 1024**4,
}


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (0, 0),
        (4294967296, 2**32),
        (4e9, 4 * 10**9),
        ("0", 0),
        ("4294967296", 2**32),
        ("4e9", 4 * 10**9),
        ("4GiB", 2**32),
        ("4 GB", 4 * 10**9),
        ("  1.5 KiB ", 1536),
        ("500mb", 500 * 10**6),
        ("1.5e3kb", 1_500_000),
    ],
)
def test_sizes(given, nbytes):
    parsed = parse_size(given)
    assert parsed == nbytes
    assert type(parsed) is int


@given(st.integers(0, 2**20), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]), st.booleans())
def test_every_unit_in_any_case(count, unit, space, lower):
    text = f"{count}{space}{unit.lower() if lower else unit}"
    assert parse_size(text) == int(float(count) * UNITS[unit])


@pytest.mark.parametrize(
    "given", ["", "GiB", "4 XB", "-4GiB", "4 GiB per rank", "1..5MB", "0x10", True, None, [4], {"GiB": 4}]
)
def test_what_is_not_a_size(given):
    with pytest.raises(ValueError, match="not a size") as caught:
        parse_size(given)
    assert repr(given) in str(caught.value)


@pytest.mark.parametrize("given", [0.5, 1.5, "1.5", "0.0001KB", "2.5B"])
def test_no_part_of_a_byte(given):
    with pytest.raises(ValueError, match="not a whole number of bytes"):
        parse_size(given)


@pytest.mark.parametrize("given", [-1, -0.5, float("nan"), float("inf"), float("-inf")])
def test_numbers_that_cannot_be_sizes(given):
    with pytest.raises(ValueError, match="cannot be"):
        parse_size(given)


@pytest.mark.parametrize("section", [None, {}, {"host_memory": None, "io_lanes": None, "verify": None}])
def test_omitted_and_null_mean_automatic(section):
    assert options_from(section) == TenCacheConfig()


def test_defaults():
    options = TenCacheConfig()
    assert options.host_memory is None
    assert options.staging_memory is None
    assert options.chunk_size is None
    assert options.io_backend == IoBackend.auto
    assert options.io_lanes is None
    assert options.io_request_size == 8 * 2**20
    assert options.io_timeout_s == 600.0
    assert options.verify == Verify.sampled
    assert options.activations == DEFAULT_ACTIVATIONS
    assert options.activation_memory is None
    assert options.gds == Gds.auto
    assert options.gds_memory is None
    assert options.overlap_step is True
    assert options.host_path is True
    assert options.poison_buffers is False


def test_activations_are_automatic_off_or_on():
    # DeepSpeed's models take "auto" for the default, whatever that is.
    assert [options_from({"activations": value}).activations for value in Activations] == list(Activations)
    assert options_from({"activations": "auto", "chunk_size": "1MiB"}).chunk_size == 2**20
    with pytest.raises(ConfigError, match=r"cannot be True: Input should be \'auto\', \'off\' or \'on\'"):
        options_from({"activations": True})


def test_every_option_takes_effect():
    given = {
        "host_memory": "4GiB",
        "gpu_memory": "8GiB",
        "staging_memory": "1 GB",
        "chunk_size": "1MiB",
        "overlap_step": False,
        "split_master": True,
        "host_path": False,
        "nvme_paths": ["/b", "/c"],
        "io_backend": "posix",
        "io_lanes": 3,
        "io_request_size": 2**16,
        "io_timeout_s": 5,
        "verify": "off",
        "checkpoint": "async",
        "checkpoint_memory": "6GiB",
        "activations": "on",
        "activation_memory": "3GiB",
        "activation_min_size": "2MiB",
        "gds": "on",
        "gds_memory": "512MiB",
        "log": "quiet",
        "poison_buffers": True,
        "allow_faults": True,
    }
    assert given.keys() == TenCacheConfig.model_fields.keys()
    options = options_from(json.loads(json.dumps(given)))
    assert options.host_memory == 2**32
    assert options.gpu_memory == 2**33
    assert options.overlap_step is False
    assert options.split_master is True
    assert options.host_path is False
    assert options.activations == Activations.on
    assert options.activation_memory == 3 * 2**30
    assert options.activation_min_size == 2**21
    assert options.log == Log.quiet
    assert options.staging_memory == 10**9
    assert options.chunk_size == 2**20
    assert options.nvme_paths == ["/b", "/c"]
    assert options.io_backend == IoBackend.posix
    assert options.io_lanes == 3
    assert options.io_request_size == 2**16
    assert options.io_timeout_s == 5.0
    assert options.verify == Verify.off
    assert options.checkpoint == Checkpoint.asynchronous
    assert options.checkpoint_memory == 6 * 2**30
    assert options.gds == Gds.on
    assert options.gds_memory == 2**29
    assert options.poison_buffers is True
    assert options.allow_faults is True


def test_memory_may_be_a_share():
    options = options_from({"host_memory": "62.5%", "gpu_memory": " 40 % "})
    assert options.host_memory == Share(0.625)
    assert options.gpu_memory == Share(0.4)
    assert options_from({"host_memory": "0%"}).host_memory == 0


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("host_memory", "four", "4GiB"),
        ("host_memory", -1, "size"),
        ("host_memory", 16, "'16GiB'"),
        ("host_memory", 1e30, "1024 PiB"),
        ("host_memory", "101%", "0% to 100%"),
        ("gpu_memory", "many", "4GiB"),
        ("gpu_memory", True, "number of bytes"),
        ("io_lanes", True, "not numbers"),
        ("io_timeout_s", False, "not numbers"),
        ("io_request_size", 2**31, str(2**30)),
        ("staging_memory", True, "number of bytes"),
        ("chunk_size", 2**16 - 1, str(2**16)),
        ("chunk_size", 2**30 + 1, str(2**30)),
        ("nvme_paths", "/b", "valid list"),
        ("io_backend", "gds", "'native'"),
        ("io_backend", "gds", "'aio'"),
        ("io_backend", "gds", "'posix'"),
        ("io_lanes", 0, "1"),
        ("io_lanes", 65, "64"),
        ("io_lanes", "many", "integer"),
        ("io_request_size", 4095, "4096"),
        ("io_timeout_s", 0.9, "greater than or equal to 1"),
        ("io_timeout_s", "soon", "number"),
        ("verify", "always", "'sampled'"),
        ("gds", True, "'auto'"),
        ("gds", "posix", "'on'"),
        ("gds_memory", "all", "4GiB"),
        ("poison_buffers", "perhaps", "boolean"),
    ],
)
def test_a_bad_value_names_key_given_and_allowed(key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        options_from({key: value})
    message = str(caught.value)
    assert f'"tencache.{key}"' in message
    assert repr(value) in message
    assert allowed in message


def test_an_unknown_option_lists_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        options_from({"host_ram": "4GiB"})
    message = str(caught.value)
    assert 'unknown option "tencache.host_ram"' in message
    assert "'4GiB'" in message
    assert all(name in message for name in TenCacheConfig.model_fields)


@pytest.mark.parametrize(
    ("given", "meant"), [("host_memry", "host_memory"), ("Host-Memory", "host_memory"), ("io_lane", "io_lanes")]
)
@pytest.mark.parametrize("value", ["4GiB", None, "auto"])  # what means automatic does not hide a wrong name
def test_an_unknown_option_that_is_nearly_one(given, meant, value):
    with pytest.raises(ConfigError, match=f'unknown option "tencache.{given}".* Did you mean "{meant}"'):
        options_from({given: value})


def test_all_mistakes_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        options_from({"io_lanes": 0, "verify": "always", "host_ram": 1})
    assert all(f"tencache.{key}" in str(caught.value) for key in ("io_lanes", "verify", "host_ram"))


@pytest.mark.parametrize("section", [True, "auto", 4, [], ["io_lanes"]])
def test_the_section_must_be_an_object(section):
    with pytest.raises(ConfigError) as caught:
        options_from(section)
    assert '"tencache"' in str(caught.value)
    assert repr(section) in str(caught.value)
