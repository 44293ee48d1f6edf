# SPDX-License-Identifier: Apache-2.0
"""Limits of a rank's memory, against simulated runs: everything that moves takes both places meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.placement.places import Place
from tencache_ds.planning.budget import (
    OVERHEAD_NBYTES,
    WRITES_BEHIND_NBYTES,
    MemoryNeeds,
    OwnShard,
    PeakMemory,
    memory_of_own_weights,
    peak_memory,
)
from tencache_ds.planning.forecast import Training, forecast, peak_of_forecast
from tencache_ds.profiling.hardware import Hardware, StorageRates

pytestmark = pytest.mark.timeout(60)

MIB, GIB = 2**20, 2**30
CHUNK = 5
SIZES = st.integers(0, 60)


class Run:
    """One rank's memory, as the tiers handle it: state in chunks of equal size, other things as a whole."""

    def __init__(self, needs: MemoryNeeds) -> None:
        self.needs = needs
        self.n = {
            Place.HOST: needs.state_host // CHUNK,
            Place.GPU: needs.state_gpu // CHUNK,
            Place.NVME: needs.state_nvme // CHUNK,
        }
        self.gpu_weights = self.gpu_gradients = 0
        self.freed = 0
        self.late_staging = 0
        self.host_peak = self.gpu_peak = self.pinned_peak = 0
        self.look()

    def host(self) -> int:
        return self.needs.weights_host + self.needs.gradients - self.freed + self.n[Place.HOST] * CHUNK

    def look(self, moving_to_host: int = 0, moving_to_gpu: int = 0) -> None:
        needs = self.needs
        staging = needs.staging + self.late_staging
        self.host_peak = max(self.host_peak, self.host() + staging + needs.update + needs.bounces + moving_to_host)
        gpu = self.gpu_weights + self.gpu_gradients + self.n[Place.GPU] * CHUNK
        self.gpu_peak = max(self.gpu_peak, gpu + moving_to_gpu + needs.gpu_staging)
        pinned = needs.weights_host * needs.weights_pinned + needs.gradients * needs.gradients_pinned
        self.pinned_peak = max(self.pinned_peak, pinned - self.freed + staging * needs.staging_pinned + needs.bounces)

    def move(self, old: Place, new: Place) -> None:
        """One chunk, if there is one and it may."""
        needs = self.needs
        if old is new or not self.n[old] or (new is Place.NVME and not needs.state_may_go_to_nvme):
            return
        if new is Place.GPU:
            gpu = self.gpu_weights + self.gpu_gradients + self.n[Place.GPU] * CHUNK
            if needs.gpu_limit is None or gpu + CHUNK > needs.gpu_limit:
                return
        if new is Place.HOST and needs.state_may_go_to_nvme and self.host() + CHUNK > needs.host_budget:
            return
        if new is Place.NVME:
            self.late_staging = needs.late_staging
        self.look(CHUNK if new is Place.HOST else 0, CHUNK if new is Place.GPU else 0)
        self.n[old] -= 1
        self.n[new] += 1
        self.look()

    def others_to_gpu(self) -> None:
        """Weights and gradients, whose host memory goes too if something else needs it."""
        needs = self.needs
        gpu = self.n[Place.GPU] * CHUNK + needs.gpu_weights + needs.gradients
        if needs.gpu_limit is not None and gpu <= needs.gpu_limit:
            self.gpu_weights, self.gpu_gradients = needs.gpu_weights, needs.gradients
            self.freed = needs.gradients
            self.look()

    def others_back(self) -> None:
        """As far as there is room for them: state makes it."""
        while (
            self.needs.state_may_go_to_nvme and self.n[Place.HOST] and self.host() > self.needs.host_budget - self.freed
        ):
            self.move(Place.HOST, Place.NVME)
        self.freed = self.gpu_weights = self.gpu_gradients = 0
        self.look()


@st.composite
def needs(draw: st.DrawFn) -> MemoryNeeds:
    nvme = draw(st.booleans())
    n_host, n_gpu, n_nvme = (draw(st.integers(0, 8)) for _ in range(3))
    weights, gradients = draw(SIZES), draw(SIZES)
    gpu_limit = draw(st.none() | st.integers(0, 200))
    n_gpu = 0 if gpu_limit is None else min(n_gpu, gpu_limit // CHUNK)
    return MemoryNeeds(
        weights_host=weights,
        weights_building=draw(SIZES),
        weights_nvme=draw(SIZES),
        largest_weight=draw(SIZES),
        gradients=gradients,
        state_host=n_host * CHUNK,
        state_gpu=n_gpu * CHUNK,
        state_nvme=n_nvme * CHUNK if nvme else 0,
        state_may_go_to_nvme=nvme,
        largest_chunk=CHUNK,
        update=draw(SIZES),
        host_budget=draw(st.integers(0, 200)),
        staging=draw(SIZES),
        late_staging=draw(SIZES),
        bounces=draw(SIZES) if gpu_limit is not None else 0,
        gpu_weights=draw(st.integers(0, 80)),
        gpu_limit=gpu_limit,
        gpu_staging=draw(SIZES),
        weights_pinned=draw(st.booleans()),
        gradients_pinned=draw(st.booleans()),
        staging_pinned=draw(st.booleans()),
    )


MOVES = st.lists(
    st.tuples(st.sampled_from(Place), st.sampled_from(Place)) | st.sampled_from(["to_gpu", "back"]), max_size=60
)


@given(needs(), MOVES)
def test_no_run_exceeds_its_limits(needed: MemoryNeeds, moves: list[tuple[Place, Place] | str]) -> None:
    limits, run = peak_memory(needed), Run(needed)
    for move in moves:
        if move == "to_gpu":
            run.others_to_gpu()
        elif move == "back":
            run.others_back()
        else:
            run.move(*move)
    assert run.host_peak <= limits.host_nbytes - OVERHEAD_NBYTES
    assert run.pinned_peak <= limits.pinned_nbytes
    assert run.gpu_peak <= limits.gpu_nbytes
    building = max(needed.weights_building, needed.weights_host) + min(needed.weights_nvme, WRITES_BEHIND_NBYTES)
    assert building <= limits.host_nbytes - OVERHEAD_NBYTES


@given(needs())
def test_limits_are_reached(needed: MemoryNeeds) -> None:
    """By what is there at the start alone, where nothing can move; so they are not loose."""
    needed = replace(needed, gpu_limit=None, state_gpu=0, bounces=0, state_may_go_to_nvme=False, late_staging=0)
    needed = replace(needed, state_nvme=0, weights_building=0, weights_nvme=0)
    run, limits = Run(needed), peak_memory(needed)
    assert limits.host_nbytes == run.host_peak + CHUNK + OVERHEAD_NBYTES
    assert limits.pinned_nbytes == run.pinned_peak
    assert limits.gpu_nbytes == needed.gpu_staging


def test_a_model_in_ram() -> None:
    needed = MemoryNeeds(
        weights_host=2 * GIB, gradients=2 * GIB, state_host=12 * GIB, largest_chunk=MIB, gpu_weights=2 * GIB,
        gpu_limit=80 * GIB, weights_pinned=True, gradients_pinned=True,
    )  # fmt: skip
    assert peak_memory(needed) == PeakMemory(16 * GIB + MIB + OVERHEAD_NBYTES, 4 * GIB, 16 * GIB)
    assert peak_memory(replace(needed, gpu_limit=3 * GIB)).gpu_nbytes == 3 * GIB + 2 * MIB
    assert peak_memory(replace(needed, gpu_limit=None)).gpu_nbytes == 0


def test_memory_that_weights_leave_takes_state_from_nvme_up_to_the_budget() -> None:
    needed = MemoryNeeds(gradients=GIB, state_nvme=12 * GIB, state_may_go_to_nvme=True, host_budget=4 * GIB)
    assert peak_memory(needed).host_nbytes == 4 * GIB + OVERHEAD_NBYTES
    sharing = replace(needed, weights_sharing_pages=MIB)
    assert peak_memory(sharing).host_nbytes == 4 * GIB + MIB + OVERHEAD_NBYTES
    assert peak_memory(replace(needed, host_budget=0)).host_nbytes == GIB + OVERHEAD_NBYTES
    assert peak_memory(replace(needed, host_budget=99 * GIB)).host_nbytes == 13 * GIB + OVERHEAD_NBYTES


def test_shards_that_torch_pins_take_powers_of_two_until_they_have_moved() -> None:
    shards = [OwnShard(3 * MIB, True), OwnShard(4 * MIB, True), OwnShard(5 * MIB, False)]
    pinned = memory_of_own_weights(shards, pinned=True)
    assert (pinned.kept, pinned.building) == (15 * MIB, (4 + 4 + 8) * MIB + 7 * MIB)
    plain = memory_of_own_weights(shards, pinned=False)
    assert (plain.kept, plain.building) == (12 * MIB, 16 * MIB)
    assert memory_of_own_weights([], pinned=True).building == 0


DRIVE = StorageRates(
    read_bytes_per_s=2e9, write_bytes_per_s=2e9, mixed_bytes_per_s=2e9, request_nbytes=2**20, lanes=8, direct=True,
    filesystem="ext4",
)  # fmt: skip
MACHINE = Hardware(cpu="a CPU", cores=16, memory_nbytes=2**37, storage=DRIVE, cpu_adam_params_per_s=5e9)
BILLIONS = Training(numel=8 * 10**9, ranks=2, tokens_per_step=4096)


def of_forecast(budget: int, **changes: object) -> PeakMemory:
    at_start = forecast(BILLIONS, budget * BILLIONS.ranks, MACHINE)
    arguments: dict[str, object] = {"gpu_limit": 0, "chunk": 32 * MIB, "may_use_nvme": True, "pinned": False}
    return peak_of_forecast(BILLIONS, at_start, host_budget=budget, **(arguments | changes))  # type: ignore[arg-type]


def test_a_forecast_without_room_in_ram() -> None:
    gradients = 8 * 10**9
    peak = of_forecast(0, pinned=True)
    # 13 chunks, and the staging buffers of weights.
    assert peak.host_nbytes == gradients + 13 * 32 * MIB + 768 * MIB + OVERHEAD_NBYTES
    assert peak.pinned_nbytes == gradients + 12 * 32 * MIB + 768 * MIB
    assert peak.gpu_nbytes == 0


def test_a_forecast_with_all_in_ram() -> None:
    everything = 64 * 10**9
    peak = of_forecast(80 * GIB, may_use_nvme=False)
    assert peak.host_nbytes == everything + 32 * MIB + OVERHEAD_NBYTES
    assert of_forecast(80 * GIB, may_use_nvme=False, gpu_limit=8 * GIB).gpu_nbytes == 8 * GIB + 64 * MIB
    assert of_forecast(80 * GIB, may_use_nvme=False, gpu_limit=800 * GIB).gpu_nbytes == everything


@given(st.integers(0, 100 * GIB), st.integers(0, 100 * GIB), st.booleans(), st.booleans())
def test_a_forecast_covers_its_places(budget: int, gpu: int, nvme: bool, pinned: bool) -> None:
    peak = of_forecast(budget, gpu_limit=gpu, may_use_nvme=nvme, pinned=pinned)
    placed = forecast(BILLIONS, budget * 2, MACHINE, gpu_budget_nbytes=2 * gpu)
    assert peak.host_nbytes * 2 >= placed.host_nbytes
    assert peak.gpu_nbytes * 2 >= placed.gpu_nbytes
    assert peak.pinned_nbytes <= peak.host_nbytes
