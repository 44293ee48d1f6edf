# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import ConfigError
from tencache_ds.planning.forecast import Demand, Resource, bound, storage_seconds
from tencache_ds.profiling.hardware import Hardware, StorageRates

NUMEL = 1_336_000_000
"""The model of the table below: bounds in seconds on an H200 with a disk of 3.6 or a tmpfs of 31 GB/s."""

RATE_NAMES = (
    "h2d_bytes_per_s",
    "d2h_bytes_per_s",
    "cpu_adam_params_per_s",
    "gpu_adam_params_per_s",
    "matmul_flops_per_s",
)


def storage(read: float, write: float | None = None, mixed: float | None = None) -> StorageRates:
    return StorageRates(
        read_bytes_per_s=read,
        write_bytes_per_s=read if write is None else write,
        mixed_bytes_per_s=read if mixed is None else mixed,
        request_nbytes=8 << 20,
        lanes=8,
        direct=True,
        filesystem="ext4",
    )


def h200(rates: StorageRates | None = None) -> Hardware:
    return Hardware(
        cpu="Xeon",
        cores=16,
        memory_nbytes=128 << 30,
        gpu="H200",
        gpus=1,
        gpu_memory_nbytes=141 << 30,
        storage=rates,
        h2d_bytes_per_s=55.5e9,
        d2h_bytes_per_s=55.4e9,
        cpu_adam_params_per_s=5.9e9,
        gpu_adam_params_per_s=118e9,
        matmul_flops_per_s=700e12,
    )


def demand(**fields) -> Demand:
    return Demand(**{"numel": NUMEL, "tokens_per_step": 4 * 512, **fields})


DISK, TMPFS = storage(3.6e9), storage(31e9)
SPLIT = {"optimizer_state_nbytes_per_param": 10.0}
PLACEMENTS = [
    # what, read and written bytes per parameter, seconds on the disk and on tmpfs
    ("stock", {"weights_nvme": 1, "optimizer_nvme": 1, "gradient_nvme_nbytes": 4}, 20, 18, 14.1, 1.6),
    ("no gradient spill", {"weights_nvme": 1, "optimizer_nvme": 1}, 16, 14, 11.1, 1.3),
    ("weights in RAM", {"optimizer_nvme": 1}, 12, 12, 8.9, 1.0),
    ("split master", {"optimizer_nvme": 1, **SPLIT}, 10, 10, 7.4, 0.9),
    ("a quarter resident", {"optimizer_nvme": 0.75, **SPLIT}, 7.5, 7.5, 5.6, 0.6),
    ("half resident", {"optimizer_nvme": 0.5, **SPLIT}, 5, 5, 3.7, 0.4),
]


@pytest.mark.parametrize(
    ("fields", "read", "written", "disk_s", "tmpfs_s"),
    [row[1:] for row in PLACEMENTS],
    ids=[row[0] for row in PLACEMENTS],
)
def test_the_table_of_bounds(fields, read, written, disk_s, tmpfs_s):
    asked = demand(**fields)
    assert asked.nvme_read_nbytes == pytest.approx(read * NUMEL)
    assert asked.nvme_write_nbytes == pytest.approx(written * NUMEL)
    for rates, seconds in ((DISK, disk_s), (TMPFS, tmpfs_s)):
        limit = bound(asked, h200(rates))
        assert limit.limit is Resource.NVME
        assert round(limit.seconds, 1) == seconds


def test_the_cpu_tier_of_the_table():
    """CPU Adam 0.23 s, weights to the GPU twice 0.10 s, gradients back 0.05 s, the GPU less than that."""
    limit = bound(demand(), h200(DISK))
    assert limit.limit is Resource.CPU
    expected = {Resource.NVME: 0.0, Resource.H2D: 0.10, Resource.D2H: 0.05, Resource.CPU: 0.23, Resource.GPU: 0.02}
    assert {resource: round(seconds, 2) for resource, seconds in limit.by_resource.items()} == expected


def test_micro_steps_fetch_weights_again_and_write_them_once():
    asked = demand(weights_nvme=0.5, optimizer_nvme=0.25, micro_steps=4)
    assert asked.nvme_read_nbytes == (0.5 * 2 * 2 * 4 + 0.25 * 12) * NUMEL
    assert asked.nvme_write_nbytes == (0.5 * 2 + 0.25 * 12) * NUMEL
    assert asked.h2d_nbytes == 2 * 2 * 4 * NUMEL
    assert asked.d2h_nbytes == 2 * NUMEL


def test_ranks_share_nvme_and_cpu_and_have_gpus_of_their_own():
    fields = {"weights_nvme": 1, "optimizer_nvme": 1}
    one = bound(demand(**fields), h200(DISK)).by_resource
    four = bound(demand(ranks_on_host=4, **fields), h200(DISK)).by_resource
    for shared in (Resource.NVME, Resource.CPU):
        assert four[shared] == one[shared]
    for own in (Resource.H2D, Resource.D2H, Resource.GPU):
        assert four[own] == pytest.approx(one[own] / 4)


def test_hosts_share_nothing():
    fields = {"weights_nvme": 1, "optimizer_nvme": 0.5, "optimizer_gpu": 0.5}
    one = bound(demand(**fields), h200(DISK)).by_resource
    three = bound(demand(hosts=3, **fields), h200(DISK)).by_resource
    assert three == pytest.approx({resource: seconds / 3 for resource, seconds in one.items()})


def test_everything_on_the_gpu_moves_nothing():
    limit = bound(demand(weights_gpu=1, optimizer_gpu=1), h200(DISK))
    idle = (Resource.NVME, Resource.H2D, Resource.D2H, Resource.CPU)
    assert [limit.by_resource[resource] for resource in idle] == [0.0] * 4
    assert limit.limit is Resource.GPU
    assert limit.seconds == pytest.approx(6 * NUMEL * 2048 / 700e12 + NUMEL / 118e9)


def test_weights_updated_elsewhere_cross_the_bus_once():
    updated_on_cpu = demand(weights_gpu=1)
    assert (updated_on_cpu.h2d_nbytes, updated_on_cpu.d2h_nbytes) == (2 * NUMEL, 2 * NUMEL)
    updated_on_gpu = demand(optimizer_gpu=1)
    assert (updated_on_gpu.h2d_nbytes, updated_on_gpu.d2h_nbytes) == (4 * NUMEL, 2 * NUMEL)


def test_recomputed_activations_cost_a_third_more_arithmetic():
    assert demand().flops == 6 * NUMEL * 2048
    assert demand(activation_recompute=True).flops == 8 * NUMEL * 2048


def test_without_a_gpu_the_ranks_of_a_host_train_on_the_same_cores():
    hardware = Hardware(cpu="EPYC", cores=2, memory_nbytes=1 << 34, matmul_flops_per_s=1e12)
    limit = bound(demand(ranks_on_host=2), hardware)
    assert limit.by_resource == {Resource.GPU: 6 * NUMEL * 2048 / 1e12}


@pytest.mark.parametrize("name", [*RATE_NAMES, "storage"])
def test_an_unknown_rate_leaves_its_part_out(name):
    asked = demand(weights_nvme=1, optimizer_nvme=0.5, optimizer_gpu=0.5)
    known = bound(asked, h200(DISK))
    unknown = bound(asked, h200(DISK).model_copy(update={name: None}))
    assert unknown.seconds <= known.seconds
    assert all(seconds <= known.by_resource[resource] for resource, seconds in unknown.by_resource.items())
    assert unknown.by_resource != known.by_resource
    only = Hardware(cpu="", cores=1, memory_nbytes=1, **{name: getattr(h200(DISK), name)})
    assert len(bound(asked, only).by_resource) == 1


def test_no_known_rate_is_an_error():
    with pytest.raises(ConfigError, match="no rate of this machine is known"):
        bound(demand(), Hardware(cpu="", cores=1, memory_nbytes=1))


@pytest.mark.parametrize(
    "fields",
    [
        {"numel": 0},
        {"ranks_on_host": 0},
        {"hosts": 0},
        {"micro_steps": 0},
        {"weight_fetches_per_micro_step": 0},
        {"tokens_per_step": -1},
        {"weights_nvme": 1.1},
        {"weights_nvme": -0.1},
        {"optimizer_gpu": math.nan},
        {"weights_nvme": 0.6, "weights_gpu": 0.6},
        {"optimizer_nvme": 0.6, "optimizer_gpu": 0.6},
        {"gradient_nbytes": math.inf},
    ],
    ids=str,
)
def test_impossible_demands_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        demand(**fields)


@pytest.mark.parametrize(
    ("read", "written", "rates", "seconds"),
    [
        (4e9, 2e9, storage(4e9, 2e9, 4e9), 1.0),  # duplex: equal amounts are limited by the writes
        (2e9, 2e9, storage(4e9, 2e9, 4e9), 1.0),
        (4e9, 4e9, storage(4e9, 4e9, 4e9), 2.0),  # additive
        (6e9, 2e9, storage(4e9, 4e9, 4e9), 2.0),
        (3e9, 3e9, storage(4e9, 4e9, 6e9), 1.0),  # between: the mixed rate itself
        (4e9, 2e9, storage(4e9, 4e9, 16e9 / 3), 1.25),  # half of the shorter time fits beside the longer
        (4e9, 4e9, storage(4e9, 4e9, 2e9), 2.0),  # bad at mixing: one after the other
        (4e9, 4e9, storage(4e9, 4e9, 9e9), 1.0),  # faster than both together: noise
        (0.0, 8e9, storage(4e9, 2e9, 1e9), 4.0),
        (0.0, 0.0, storage(4e9, 4e9, 4e9), 0.0),
    ],
)
def test_duplex_and_additive_devices(read, written, rates, seconds):
    assert storage_seconds(read, written, rates) == pytest.approx(seconds)


RATE = st.floats(1e8, 1e12)
STORAGES = st.builds(storage, RATE, RATE, RATE)
NBYTES = st.floats(0, 1e12)
FACTOR = st.floats(1.0, 10.0)
SLACK = 1 + 1e-9


@given(NBYTES, NBYTES, STORAGES)
def test_storage_time_is_between_side_by_side_and_one_after_the_other(read, write, rates):
    read_s, write_s = read / rates.read_bytes_per_s, write / rates.write_bytes_per_s
    assert max(read_s, write_s) <= storage_seconds(read, write, rates) * SLACK
    assert storage_seconds(read, write, rates) <= (read_s + write_s) * SLACK


@given(NBYTES, NBYTES, STORAGES, FACTOR)
def test_storage_time_falls_with_the_rates_and_grows_with_every_byte(read, write, rates, factor):
    seconds = storage_seconds(read, write, rates)
    mixed = rates.mixed_bytes_per_s * factor
    assert storage_seconds(read, write, rates.model_copy(update={"mixed_bytes_per_s": mixed})) <= seconds * SLACK
    # A faster device is one that is faster at everything. One direction alone, with the same mixed rate, would mean
    # that the two disturb each other more.
    faster = storage(rates.read_bytes_per_s * factor, rates.write_bytes_per_s * factor, mixed)
    assert storage_seconds(read, write, faster) == pytest.approx(seconds / factor)
    assert seconds <= storage_seconds(read * factor, write, rates) * SLACK
    assert seconds <= storage_seconds(read, write * factor, rates) * SLACK


@given(STORAGES, st.floats(1, 1e12))
def test_equal_amounts_go_at_the_mixed_rate_where_a_device_can_have_it(rates, nbytes):
    limits = [nbytes / rates.read_bytes_per_s, nbytes / rates.write_bytes_per_s]
    expected = min(sum(limits), max(*limits, 2 * nbytes / rates.mixed_bytes_per_s))
    assert storage_seconds(nbytes, nbytes, rates) == pytest.approx(expected)


@st.composite
def demands(draw) -> Demand:
    shares = {}
    for kind in ("weights", "optimizer"):
        shares[f"{kind}_nvme"] = draw(st.floats(0, 1))
        shares[f"{kind}_gpu"] = draw(st.floats(0, 1 - shares[f"{kind}_nvme"]))
    return Demand(
        numel=draw(st.integers(1, 10**12)),
        tokens_per_step=draw(st.integers(0, 10**7)),
        ranks_on_host=draw(st.integers(1, 8)),
        hosts=draw(st.integers(1, 4)),
        micro_steps=draw(st.integers(1, 16)),
        optimizer_state_nbytes_per_param=draw(st.sampled_from([6.0, 10.0, 12.0])),
        gradient_nbytes=draw(st.sampled_from([2.0, 4.0])),
        activation_recompute=draw(st.booleans()),
        **shares,
    )


@st.composite
def machines(draw) -> Hardware:
    rates = {name: draw(st.none() | RATE) for name in RATE_NAMES}
    gpu = draw(st.sampled_from([None, "H200"]))
    return Hardware(cpu="", cores=1, memory_nbytes=1, gpu=gpu, storage=draw(STORAGES), **rates)


@given(demands(), machines())
def test_the_bound_is_the_longest_of_the_resources(asked, hardware):
    limit = bound(asked, hardware)
    assert limit.seconds == max(limit.by_resource.values()) == limit.by_resource[limit.limit]
    assert all(0 <= seconds < math.inf for seconds in limit.by_resource.values())


@given(demands(), machines(), FACTOR, st.sampled_from(RATE_NAMES))
def test_no_faster_part_makes_a_step_longer(asked, hardware, factor, name):
    rate = getattr(hardware, name)
    if rate is None:
        return
    faster = bound(asked, hardware.model_copy(update={name: rate * factor}))
    for resource, seconds in bound(asked, hardware).by_resource.items():
        assert faster.by_resource[resource] <= seconds * SLACK


@given(demands(), machines(), st.floats(0, 1), st.sampled_from(["weights_nvme", "optimizer_nvme"]))
def test_less_on_nvme_never_makes_a_step_longer(asked, hardware, part, name):
    less = bound(replace(asked, **{name: getattr(asked, name) * part}), hardware)
    assert less.seconds <= bound(asked, hardware).seconds * SLACK


@given(demands(), machines(), st.floats(0, 1))
def test_more_weights_on_the_gpu_never_take_longer_to_fetch(asked, hardware, part):
    more = replace(asked, weights_gpu=asked.weights_gpu + (1 - asked.weights_nvme - asked.weights_gpu) * part)
    assert more.h2d_nbytes <= asked.h2d_nbytes * SLACK
    assert more.d2h_nbytes <= asked.d2h_nbytes * SLACK


@given(demands(), machines(), st.integers(2, 5))
def test_a_step_takes_as_long_as_its_model_is_large(asked, hardware, times):
    larger = bound(replace(asked, numel=asked.numel * times), hardware)
    assert larger.seconds == pytest.approx(bound(asked, hardware).seconds * times)


def test_imports_neither_torch_nor_deepspeed():
    check = (
        "import sys, tencache_ds.planning.forecast\n"
        "found = {'torch', 'deepspeed'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)
