# SPDX-License-Identifier: Apache-2.0
"""Master weights that are split over the model's weights, beside a tier that keeps them whole."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import StorageError, TenCacheError
from tencache_ds.observability.counters import Link
from tencache_ds.placement.places import Place
from tencache_ds.planning.adam_scalars import BetaPowers, adam_scalars
from tencache_ds.planning.size_classes import SizeClass
from tencache_ds.tiers.fused_adam import BlockwiseAdam, FusedAdam
from tencache_ds.tiers.optimizer_state import OptimizerStateTier
from tencache_ds.tiers.split_master import SplitMasters, changed_unnoticed
from tencache_ds.tiers.sub_group import EXP_AVG_SQ, MARKS, MASTER, REMAINDER, SCALES_OF_8_BITS, SECOND, SubGroupSpec
from tests.tiers.conftest import TIMEOUT_S, Storage
from tests.tiers.test_blockwise_adam import arithmetic

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

NUMEL = 2 * 4096 + 100
N_CHUNKS = 3
CHUNK_NBYTES = 12 * 4096
ON_NVME = (Place.NVME,) * N_CHUNKS


class Weights:
    """The model's: two tensors whose border lies within a chunk. Odd numbers, denormals and infinities among them."""

    def __init__(self) -> None:
        values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
        values[::7] *= 1e-39
        values[5::1000] = float("inf")
        self.parts = values.to(torch.bfloat16).split([5000, NUMEL - 5000])
        self.in_memory = True

    def of(self, chunk: Any) -> list[tuple[int, torch.Tensor]]:
        actual, first = [], 0
        for part in self.parts:
            low, high = max(first, chunk.start), min(first + part.numel(), chunk.start + chunk.numel)
            if low < high:
                actual.append((low - chunk.start, part[low - first : high - first]))
            first += part.numel()
        return actual

    def rounded(self, chunk: Any) -> list[tuple[int, torch.Tensor]] | None:
        return self.of(chunk) if self.in_memory else None

    def being_changed(self, chunk: Any) -> bool:
        return False


def scalars_of(number: int, adam: FusedAdam) -> Any:
    """The inputs of a step."""
    betas = (0.9, 0.999)
    if isinstance(adam, BlockwiseAdam):
        group = {"lr": 1e-3, "betas": betas, "eps": 1e-8, "weight_decay": 0.01}
        return arithmetic().scalars(number, group, 1.0)[0]
    return adam_scalars(
        lr=1e-3,
        betas=betas,
        powers=BetaPowers(betas).at(number, betas),
        eps=1e-8,
        weight_decay=0.01,
        decoupled=True,
        bias_correction=True,
        scale=1.0,
    )


class Bench:
    """A tier that holds Adam's state of weights, not yet updated."""

    def __init__(
        self,
        folder: Path,
        adam: FusedAdam,
        *,
        split: bool,
        weights: Weights | None = None,
        place: Place = Place.NVME,
        in_memory: bool = False,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.adam, self.weights, self.n_steps = adam, weights or Weights(), 0
        dtypes = adam.state_dtypes
        kinds = tuple((kind, dtype) for kind, dtype in dtypes.items() if kind not in SCALES_OF_8_BITS)
        scales = tuple((kind, dtype) for kind, dtype in dtypes.items() if kind in SCALES_OF_8_BITS)
        self.square = SECOND if scales else EXP_AVG_SQ
        self.n_splittable = N_CHUNKS - 1 if scales else N_CHUNKS  # marks of 100 elements would take a page
        self.storage = Storage(folder, (SizeClass(CHUNK_NBYTES, 3),))
        self.tier = OptimizerStateTier(
            [SubGroupSpec(NUMEL, kinds, (place,) * N_CHUNKS, scales=scales)],
            store=self.storage.store,
            pool=lambda: self.storage.pool,
            counters=self.storage.counters,
            chunk_nbytes=CHUNK_NBYTES,
            timeout_s=TIMEOUT_S,
            masters=SplitMasters(adam, self.weights, in_memory=in_memory) if split else None,
        )
        for chunk in self.tier.chunks(0):
            if self.tier.start_split(chunk):
                continue
            used = self.tier.overwrite(chunk, fresh=True)
            for first, weight in self.weights.of(chunk):
                used.views[MASTER][first : first + weight.numel()] = weight
            self.tier.put(used)

    @property
    def n_split(self) -> int:
        actual = []
        for chunk in self.tier.chunks(0):
            used = self.tier.take(chunk, split=True)
            actual.append(REMAINDER in used.views)
            self.tier.put(used, changed=False)
        return sum(actual)

    def update(self) -> None:
        self.n_steps += 1
        gradient = torch.randn(NUMEL, generator=torch.Generator().manual_seed(self.n_steps)).to(torch.bfloat16)
        if self.n_steps > 2:
            gradient[77::1500] = float("nan")
        scalars = scalars_of(self.n_steps, self.adam)
        self.tier.begin_pass(self.tier.chunks(0))
        for chunk in self.tier.chunks(0):
            used = self.tier.take(chunk, split=True)
            part = gradient[chunk.start : chunk.start + chunk.numel]
            job = self.adam.start(used.views, part, self.weights.of(chunk), scalars, used.digest)
            assert job.wait(TIMEOUT_S)
            if not job.match:
                self.tier.drop(used)
                raise changed_unnoticed(chunk)
            used.digest = job.digest
            self.tier.put(used)

    def do(self, operation: str, first: int) -> None:
        chunk = self.tier.chunks(0)[first // 4096]
        if operation == "update":
            self.update()
        elif operation == "write master weights":
            numel = min(300, NUMEL - first)
            self.tier.write(0, {MASTER: self.tier.read(0, MASTER, first, numel) * 0.75}, first)
        elif operation == "write moments":
            numel = min(300, NUMEL - first)
            self.tier.write(0, {self.square: self.tier.read(0, self.square, first, numel) * 3}, first)
        elif operation == "keep all":
            self.tier.keep(0, self.tier.borrow(0))
        elif operation == "change a weight":
            self.tier.join([chunk])
            self.weights.of(chunk)[0][1][0] = 17.0
        elif operation == "move to and fro":
            home = self.tier.places(0)
            away = Place.NVME if home[0] is Place.HOST else Place.HOST
            moved = tuple(away if each is chunk else old for each, old in zip(self.tier.chunks(0), home, strict=True))
            for places in (moved, home):
                self.tier.relocate({0: places})
        elif operation == "split again":
            for each in self.tier.chunks(0):
                self.tier.split(each)
        else:
            self.tier.join(self.tier.chunks(0))
            self.weights.in_memory = operation == "weights return"

    def value(self) -> list[torch.Tensor]:
        return [value.view(torch.uint8) for value in (*self.tier.borrow(0).values(), *self.weights.parts)]

    def close(self) -> None:
        self.tier.close()
        self.storage.close()


OPERATIONS = (
    "update",
    "write master weights",
    "write moments",
    "keep all",
    "change a weight",
    "move to and fro",
    "split again",
    "weights leave",
    "weights return",
)


@pytest.fixture(scope="module", params=["fp32", "8 bits"])
def adam(request: pytest.FixtureRequest) -> Any:
    adam = FusedAdam(1) if request.param == "fp32" else arithmetic().one_pass(1)
    yield adam
    adam.close()


@pytest.fixture
def split(adam: FusedAdam, tmp_path: Path) -> Any:
    bench = Bench(tmp_path, adam, split=True)
    yield bench
    bench.close()


@pytest.mark.parametrize(("place", "in_memory"), [(Place.NVME, False), (Place.NVME, True), (Place.HOST, True)])
@settings(max_examples=25, deadline=None)
@given(
    operations=st.lists(
        st.tuples(st.just("update") | st.sampled_from(OPERATIONS), st.integers(0, NUMEL - 1)), min_size=1, max_size=9
    )
)
def test_nothing_that_is_done_with_it_sees_a_difference(
    adam: FusedAdam, place: Place, in_memory: bool, operations: list[tuple[str, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        benches = [
            Bench(Path(folder) / name, adam, split=name == "split", place=place, in_memory=in_memory)
            for name in ("split", "whole")
        ]
        try:
            for operation, first in operations:
                for bench in benches:
                    bench.do(operation, first)
                    bench.storage.assert_idle()
                for values in zip(*(bench.value() for bench in benches), strict=True):
                    assert all(torch.equal(value, values[0]) for value in values), operation
        finally:
            for bench in benches:
                bench.close()


def stored_nbytes(adam: FusedAdam, *, split: bool) -> int:
    """Two chunks of 4096 elements, and one of 100 with a page of each kind."""
    if isinstance(adam, BlockwiseAdam):  # scales, and marks, have a page even in the larger ones
        return 2 * ((2 + 1 + 1 + 2 + 1) if split else (4 + 1 + 1 + 2)) * 4096 + 5 * 4096
    return 2 * (10 if split else 12) * 4096 + 3 * 4096


def test_an_update_moves_two_bytes_less_for_each_parameter(split: Bench) -> None:
    assert split.n_split == split.n_splittable
    split.update()  # of fresh chunks, which are not written before
    split.tier.drain()
    whole = stored_nbytes(split.adam, split=True)
    for _ in range(3):
        before = dict(split.storage.counters.total().nbytes)
        n_bytes_written = split.storage.backend.counters.bytes_written
        split.update()
        split.tier.drain()
        moved = {link: split.storage.counters.total().nbytes[link] - before.get(link, 0) for link in before}
        assert moved[Link.NVME_READ] == moved[Link.NVME_WRITE] == whole
        assert split.storage.backend.counters.bytes_written - n_bytes_written == whole


@pytest.mark.parametrize("is_split", [True, False])
def test_of_fresh_chunks_nothing_but_whole_master_weights_is_written_and_read(
    adam: FusedAdam, tmp_path: Path, is_split: bool
) -> None:
    bench = Bench(tmp_path, adam, split=is_split)
    try:
        n_whole = N_CHUNKS - bench.n_splittable if is_split else N_CHUNKS
        fresh = 4096 * (4 * n_whole - 3 if n_whole else 0)  # the last chunk has a page for 100 elements
        assert bench.storage.counters.total().nbytes[Link.NVME_WRITE] == fresh
        assert [kind for kind, value in bench.tier.borrow(0).items() if value.any()] == [MASTER]
        before = dict(bench.storage.counters.total().nbytes)
        bench.update()
        moved = {link: bench.storage.counters.total().nbytes[link] - before[link] for link in before}
        expected = fresh, stored_nbytes(adam, split=is_split)
        assert (moved[Link.NVME_READ], moved[Link.NVME_WRITE]) == expected
    finally:
        bench.close()


def test_master_weights_that_equal_the_weights_have_remainders_of_zero(adam: FusedAdam) -> None:
    """Whatever their bits are, except for one NaN, whose remainder holds its upper half."""
    bits = torch.arange(2**16 - 1, dtype=torch.int32)
    weights = [(0, bits.to(torch.int16).view(torch.bfloat16))]
    whole = {kind: torch.zeros(bits.numel(), dtype=dtype) for kind, dtype in adam.state_dtypes.items()}
    parts = {REMAINDER: torch.zeros(bits.numel(), dtype=torch.int16)}
    if isinstance(adam, BlockwiseAdam):
        parts[MARKS] = torch.zeros(2**13, dtype=torch.uint8)
    assert adam.join(whole, parts, weights[0][1]).wait(TIMEOUT_S)
    assert torch.equal(whole.pop(MASTER).view(torch.int32), bits << 16)
    assert not any(value.any() for value in whole.values())
    masters = SplitMasters(adam, Weights())
    assert masters.remainders_are_zero(weights)
    weights.append((bits.numel(), torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)))
    assert not masters.remainders_are_zero(weights)


def test_a_fresh_chunk_with_another_remainder_is_written(adam: FusedAdam, tmp_path: Path) -> None:
    weights = Weights()
    weights.parts[1].view(torch.int16)[0] = -1
    bench = Bench(tmp_path, adam, split=True, weights=weights)
    try:
        assert bench.n_split == bench.n_splittable - 1
        expected = torch.cat([part.view(torch.int16) for part in weights.parts]).int() << 16
        assert torch.equal(bench.tier.read(0, MASTER).view(torch.int32), expected)
    finally:
        bench.close()


def test_in_memory_they_take_as_little(adam: FusedAdam, tmp_path: Path) -> None:
    bench = Bench(tmp_path, adam, split=True, place=Place.HOST, in_memory=True)
    try:
        chunks = bench.tier.chunks(0)
        least = stored_nbytes(adam, split=True)
        assert bench.n_split == bench.n_splittable
        assert bench.tier.resident_nbytes == sum(map(bench.tier.host_nbytes_of, chunks)) == least
        bench.update()
        bench.tier.borrow(0)
        assert bench.tier.resident_nbytes == least
        bench.tier.join(chunks[:1])
        assert bench.tier.resident_nbytes == least + chunks[0].nbytes - bench.tier.host_nbytes_of(chunks[1])
        assert bench.n_split == bench.n_splittable - 1
        bench.update()
        assert bench.tier.resident_nbytes == least
        bench.tier.keep(0, bench.tier.borrow(0))
        assert bench.tier.resident_nbytes == least
        bench.tier.relocate({0: ON_NVME})
        assert bench.tier.resident_nbytes == 0
        assert bench.tier.in_memory_nbytes == least
        assert [bench.tier.host_nbytes_of(chunk) for chunk in chunks] == [
            bench.tier.nbytes_of(chunk) for chunk in chunks
        ]
        bench.tier.relocate({0: (Place.HOST,) * N_CHUNKS})
        assert bench.tier.resident_nbytes == least
    finally:
        bench.close()


def test_what_cannot_be_written_to_nvme_stays_in_memory(
    adam: FusedAdam, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, adam, split=True, place=Place.HOST, in_memory=True)
    try:
        bench.update()
        before = bench.value()

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise StorageError("write", "a drive", 0, 0, "no")

        with monkeypatch.context() as patch:
            patch.setattr(bench.storage.store, "write", fails)
            patch.setattr(bench.storage.store, "allocate", fails)
            with pytest.raises(StorageError):
                bench.tier.relocate({0: ON_NVME})
        assert all(torch.equal(new, old) for new, old in zip(bench.value(), before, strict=True))
        bench.update()
        assert bench.n_split == bench.n_splittable
    finally:
        bench.close()


def test_what_was_joined_is_split_by_the_next_update(split: Bench) -> None:
    chunks = split.tier.chunks(0)
    split.tier.join(chunks[:2])
    assert split.n_split == split.n_splittable - 2
    split.weights.of(chunks[1])[0][1].fill_(2.0)
    split.update()
    assert split.n_split == split.n_splittable


USES: dict[str, Callable[[Bench], Any]] = {
    "update": Bench.update,
    "read": lambda bench: bench.tier.read(0, MASTER),
    "move": lambda bench: bench.tier.relocate({0: ON_NVME if bench.tier.resident_nbytes else (Place.HOST,) * N_CHUNKS}),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", [Place.NVME, Place.HOST])
def test_weights_that_changed_unnoticed_are_an_error(adam: FusedAdam, tmp_path: Path, place: Place, use: str) -> None:
    split = Bench(tmp_path, adam, split=True, place=place, in_memory=True)
    chunk = split.tier.chunks(0)[1]
    split.weights.of(chunk)[0][1][5] += 1
    with pytest.raises(TenCacheError, match=r"elements from 4096.*GatheredParameters"):
        USES[use](split)
    split.tier.drain()
    split.close()
    split.storage.assert_idle()
