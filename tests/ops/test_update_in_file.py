# SPDX-License-Identifier: Apache-2.0
"""Adam on state in a file, against the same on state in memory: bits, words of the pages, and transfers that fail."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.ops.tencache_update import load_tencache_update
from tencache_ds.planning.adam_scalars import BetaPowers
from tests.ops.test_update import Setting, State, digest, gradients_of, scalars_of

pytestmark = pytest.mark.timeout(300)  # the first run builds the op

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
BLOCK_NUMEL = 32768


@pytest.fixture(scope="module")
def team() -> Any:
    team = load_tencache_update().Team(3)
    yield team
    team.close()


class FileState:
    """The state of a chunk in a file, behind others."""

    def __init__(self, fd: int, offset: int, kinds: list[torch.Tensor]) -> None:
        self.fd, self.offset, self.pieces, self.nbytes = fd, offset, [], 0
        for kind in kinds:
            self.pieces.append(self.nbytes)
            os.pwrite(fd, kind.numpy().tobytes(), offset + self.nbytes)
            self.nbytes += round_up(kind.nbytes)
        os.ftruncate(fd, max(os.fstat(fd).st_size, offset + self.nbytes))
        self.words_read, self.words_written = np.zeros((2, self.nbytes // PAGE_NBYTES), dtype=np.uint64)

    def words(self, position: int) -> np.ndarray:
        pages = np.frombuffer(os.pread(self.fd, self.nbytes, self.offset), dtype=np.uint64).reshape(-1, 512)
        return pages[:, position].copy()

    def copy_to(self, kinds: list[torch.Tensor]) -> None:
        for kind, piece in zip(kinds, self.pieces, strict=True):
            data = bytearray(os.pread(self.fd, kind.nbytes, self.offset + piece))
            kind.copy_(torch.frombuffer(data, dtype=kind.dtype))

    def adam(self, team: Any, runs: list[tuple[int, ...]], *arguments: Any, fd: int | None = None) -> Any:
        file = load_tencache_update().StateFile(
            fd=self.fd if fd is None else fd,
            offset=self.offset,
            pieces=self.pieces,
            words_read=self.words_read.ctypes.data,
            read_position=3,
            words_written=self.words_written.ctypes.data,
            written_position=511,
        )
        return team.adam([(0, 0, 0, *run[3:]) for run in runs], *arguments, file=file)


@pytest.fixture
def fd(tmp_path: Path) -> Any:
    fd = os.open(tmp_path / "state", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(
    ("numel", "gradient", "weight", "split"),
    [
        *((100, torch.bfloat16, torch.bfloat16, split) for split in (False, True)),
        *((BLOCK_NUMEL, torch.bfloat16, torch.bfloat16, split) for split in (False, True)),
        *((3 * BLOCK_NUMEL + 1029, torch.bfloat16, torch.bfloat16, split) for split in (False, True)),
        *((BLOCK_NUMEL + 17, torch.float32, torch.bfloat16, split) for split in (False, True)),
        (2 * BLOCK_NUMEL + 5, torch.float16, torch.float16, False),
        (BLOCK_NUMEL + 1, torch.float32, torch.float32, False),
    ],
)
def test_state_in_a_file_equals_state_in_memory(
    team: Any, fd: int, numel: int, gradient: torch.dtype, weight: torch.dtype, split: bool
) -> None:
    op, setting = load_tencache_update(), Setting(numel, gradient, weight, weight_decay=0.01, scale=0.5)
    generator, powers = torch.Generator().manual_seed(5), BetaPowers((0.9, 0.999))
    master = torch.randn(numel, generator=generator)
    # Chunks beside each other in one file, updated at the same time.
    pairs = [(State.of(master * factor, weight), State.of(master * factor, weight)) for factor in (1.0, 0.5, 3.0, 0.1)]
    files = []
    for mine, theirs in pairs:
        if split:
            mine.split(team)
            theirs.split(team)
        kinds = [mine.remainder if split else mine.master, mine.exp_avg, mine.exp_avg_sq]
        offset = 4 * PAGE_NBYTES + sum(file.nbytes for file in files)
        files.append(FileState(fd, offset, kinds))
    middle = numel // 3
    for number in range(1, setting.steps + 1):
        values, scalars = gradients_of(setting, number, generator), scalars_of(op, setting, number, powers)
        types = (NAMES[gradient], NAMES[weight], numel % 16, scalars)
        jobs, t_start_ns = [], time.perf_counter_ns()
        for (mine, theirs), file in zip(pairs, files, strict=True):
            before, expected = file.words(3), digest(team, mine.weight) if split else b""
            run = mine.split_run if split else mine.run
            runs = [run(values, 0, middle), run(values, middle, numel)]
            jobs.append((file.adam(team, runs, *types, split, expected), before))
            run = theirs.split_run if split else theirs.run
            assert team.adam([run(values, 0, numel)], *types, split).wait(60)
        for (job, before), (mine, theirs), file in zip(jobs, pairs, files, strict=True):
            assert job.wait(60)
            assert job.match
            assert job.error == 0
            assert 0 < job.transfer_ns < job.end_ns - t_start_ns
            assert job.digest == (digest(team, mine.weight) if split else b"")
            assert np.array_equal(file.words_read, before)
            assert np.array_equal(file.words_written, file.words(511))
            file.copy_to([mine.remainder if split else mine.master, mine.exp_avg, mine.exp_avg_sq])
            if split:
                assert torch.equal(mine.remainder, theirs.remainder)
            assert mine.differing(theirs) == 0
    assert os.pread(fd, 4 * PAGE_NBYTES, 0) == bytes(4 * PAGE_NBYTES)


def test_nothing_is_written_if_one_block_has_other_weights(team: Any, fd: int) -> None:
    op, numel = load_tencache_update(), 2 * BLOCK_NUMEL + 100
    state = State.of(torch.randn(numel), torch.bfloat16).split(team)
    file = FileState(fd, 0, [state.remainder, state.exp_avg, state.exp_avg_sq])
    before, expected = os.pread(fd, file.nbytes, 0), digest(team, state.weight)
    state.weight[-1] += 1.0
    weights = state.weight.clone()
    gradient, scalars = torch.ones(numel).bfloat16(), scalars_of(op, Setting(numel), 1, BetaPowers((0.9, 0.999)))
    runs = [state.split_run(gradient, 0, numel)]
    job = file.adam(team, runs, "bfloat16", "bfloat16", 0, scalars, True, expected)
    assert job.wait(60)
    assert not job.match
    assert job.error == 0
    assert os.pread(fd, file.nbytes, 0) == before
    assert torch.equal(state.weight, weights)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_a_transfer_that_fails_ends_the_job_with_its_errno(team: Any, fd: int, tmp_path: Path, flags: int) -> None:
    op, numel = load_tencache_update(), BLOCK_NUMEL + 100
    state = State.of(torch.randn(numel), torch.bfloat16)
    file = FileState(fd, 0, [state.master, state.exp_avg, state.exp_avg_sq])
    gradient, scalars = torch.ones(numel).bfloat16(), scalars_of(op, Setting(numel), 1, BetaPowers((0.9, 0.999)))
    arguments = ([state.run(gradient)], "bfloat16", "bfloat16", 0, scalars, False, b"")
    other = os.open(tmp_path / "state", flags)
    job = file.adam(team, *arguments, fd=other)
    assert job.wait(60)
    assert job.error == errno.EBADF
    os.close(other)
    os.ftruncate(fd, file.nbytes - PAGE_NBYTES)
    job = file.adam(team, *arguments)
    assert job.wait(60)
    assert job.error == errno.EIO


def test_wrong_arguments_are_named(team: Any, fd: int) -> None:
    op, state = load_tencache_update(), State.of(torch.randn(100), torch.bfloat16)
    file = FileState(fd, 0, [state.master, state.exp_avg, state.exp_avg_sq])
    gradient, scalars = torch.ones(100).bfloat16(), scalars_of(op, Setting(100), 1, BetaPowers((0.9, 0.999)))
    runs = [state.run(gradient)]
    with pytest.raises(ValueError, match="int8"):
        file.adam(team, runs, "int8", "bfloat16", 0, scalars, False, b"")
    with pytest.raises(ValueError, match="bfloat16"):
        file.adam(team, runs, "bfloat16", "float16", 0, scalars, True, b"")
    with pytest.raises(ValueError, match="digest"):
        file.adam(team, runs, "bfloat16", "bfloat16", 0, scalars, True, b"12345678" * 2)
    with pytest.raises(ValueError, match="tail"):
        file.adam(team, runs, "bfloat16", "bfloat16", 101, scalars, False, b"")
