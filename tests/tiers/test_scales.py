# SPDX-License-Identifier: Apache-2.0
"""State with one value for several elements goes with the chunks of these, wherever they live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.errors import TenCacheError
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.placement.places import Place
from tencache_ds.planning.chunks import GRANULE_NUMEL, SCALE_NUMEL, cut_sub_group
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.sub_group import FIRST, FIRST_SCALE, MASTER, SubGroupSpec
from tests.tiers.conftest import TIMEOUT_S, Storage, numbers

pytestmark = pytest.mark.timeout(60)

KINDS = ((MASTER, torch.float32), (FIRST, torch.uint8))
SCALES = ((FIRST_SCALE, torch.float32),)
NUMELS = (3 * GRANULE_NUMEL + SCALE_NUMEL + 7, 5, 2 * GRANULE_NUMEL)
CHUNK_NBYTES = 5 * GRANULE_NUMEL + PAGE_NBYTES
PLACES: dict[str, tuple[Place, ...]] = {
    "whole": (),
    "stored": (Place.NVME,),
    "resident": (Place.HOST,),
    "mixed": (Place.HOST, Place.NVME),
}


class Bench:
    def __init__(self, folder: Path, home: str) -> None:
        self.storage = Storage(folder, (SizeClass(CHUNK_NBYTES, 3),))
        specs = []
        for numel in NUMELS:
            n_chunks = -(-numel // GRANULE_NUMEL)
            places = (PLACES[home] * n_chunks)[:n_chunks] if PLACES[home] else None
            specs.append(SubGroupSpec(numel, KINDS, places, scales=SCALES))
        self.tier = OptimizerStateTier(
            specs,
            store=self.storage.store,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=TIMEOUT_S,
        )
        self.dense = []
        for index, numel in enumerate(NUMELS):
            n_scales = -(-numel // SCALE_NUMEL)
            self.dense.append(
                {
                    MASTER: numbers(numel, torch.float32, 10 * index),
                    FIRST: numbers(numel, torch.float32, 10 * index + 1).to(torch.uint8),
                    FIRST_SCALE: numbers(n_scales, torch.float32, 10 * index + 2),
                }
            )
            self.tier.replace(index, self.dense[index])

    def check(self) -> None:
        """Every kind is there whole, and each chunk shows its own scales."""
        for index, expected in enumerate(self.dense):
            found = self.tier.borrow(index)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[kind], value) for kind, value in expected.items())
        seen = [0] * len(NUMELS)

        def visit(chunk, views):
            low, high = chunk.start, chunk.start + chunk.numel
            assert chunk.start == seen[chunk.sub_group]
            expected = self.dense[chunk.sub_group]
            assert torch.equal(views[FIRST], expected[FIRST][low:high])
            assert torch.equal(views[FIRST_SCALE], expected[FIRST_SCALE][low // SCALE_NUMEL : -(-high // SCALE_NUMEL)])
            seen[chunk.sub_group] = high

        self.tier.scan(visit)
        assert tuple(seen) == NUMELS


@pytest.fixture(params=PLACES)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, request.param)
    yield bench
    bench.tier.close()
    bench.storage.close()


def test_whole_and_by_chunks(bench: Bench) -> None:
    bench.check()
    assert bench.tier.kinds(0) == (MASTER, FIRST, FIRST_SCALE)
    assert bench.tier.numel(0, FIRST_SCALE) == 50


def test_changes_by_chunks(bench: Bench) -> None:
    chunks = [chunk for index in range(len(NUMELS)) for chunk in bench.tier.chunks(index)]
    bench.tier.begin_pass(chunks)
    for chunk in chunks:
        with bench.tier.using(chunk) as used:
            for view in used.views.values():
                view.add_(1)
    for values in bench.dense:
        for value in values.values():
            value.add_(1)
    bench.check()


@pytest.mark.parametrize("target", [Place.NVME, Place.HOST])
def test_moves(bench: Bench, target: Place) -> None:
    bench.tier.relocate({index: [target] * len(bench.tier.chunks(index)) for index in range(len(NUMELS))})
    bench.check()


def test_what_is_not_given_becomes_zero(bench: Bench) -> None:
    bench.dense[0] |= {MASTER: bench.dense[0][MASTER] + 1}
    bench.tier.replace(0, {MASTER: bench.dense[0][MASTER]})
    for kind in (FIRST, FIRST_SCALE):
        bench.dense[0][kind].zero_()
    bench.check()


def test_elements_of_a_scale_do_not_exist(bench: Bench) -> None:
    assert torch.equal(bench.tier.read(0, FIRST, 300, 9), bench.dense[0][FIRST][300:309])
    with pytest.raises(KeyError, match="'absmax1' is not kept per element"):
        bench.tier.read(0, FIRST_SCALE, 0, 9)
    with pytest.raises(KeyError, match="'absmax1' is not kept per element"):
        bench.tier.write(0, {FIRST_SCALE: torch.ones(9)})
    bench.check()


def test_scales_of_another_number_are_refused(bench: Bench) -> None:
    with pytest.raises(TenCacheError, match=r"lengths .*'absmax1': 49.* expected .*'absmax1': 50"):
        bench.tier.replace(0, bench.dense[0] | {FIRST_SCALE: torch.ones(49)})
    bench.check()


@given(st.integers(0, 30 * GRANULE_NUMEL), st.integers(0, 2**18), st.integers(1, 3))
def test_chunks_have_room_for_the_scales_of_their_elements(numel: int, chunk_nbytes: int, n_scales: int) -> None:
    scales = [(f"scale{index}", 4) for index in range(n_scales)]
    chunks = cut_sub_group(0, numel, [("master", 4), ("first", 1)], chunk_nbytes, scales=scales)
    assert sum(chunk.numel for chunk in chunks) == numel
    for chunk in chunks:
        assert chunk.start % GRANULE_NUMEL == 0
        end = 0
        for piece in chunk.pieces:
            assert piece.offset >= end
            assert piece.offset % PAGE_NBYTES == 0
            end = piece.offset + piece.nbytes
        assert end <= chunk.nbytes
        for name, itemsize in scales:
            assert chunk.piece(name).nbytes == -(-chunk.numel // SCALE_NUMEL) * itemsize
    assert all(
        chunk.nbytes - 2 * n_scales * PAGE_NBYTES <= max(chunk_nbytes, 5 * GRANULE_NUMEL + 1) for chunk in chunks
    )
