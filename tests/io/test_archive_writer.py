# SPDX-License-Identifier: Apache-2.0
"""Archives that a thread of its own writes from copies."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import TenCacheError
from tencache_ds.io import archive_writer
from tencache_ds.io.archive_writer import ArchiveWriter, CopyBuffers
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor, begin_archive, write_archive

pytestmark = pytest.mark.timeout(60)


class Outcome:
    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)


def deferred(numels: list[int]) -> dict[DeferredTensor, torch.Tensor]:
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    return {
        DeferredTensor(index, dtypes[index % 3], numel): torch.arange(numel).to(dtypes[index % 3])
        for index, numel in enumerate(numels)
    }


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    st.lists(st.integers(0, 3000), max_size=4),
    st.booleans(),
    st.integers(0, 20_000),
    st.integers(1, 1000),
)
@settings(max_examples=50, deadline=None)
def test_files_are_those_that_are_written_at_once(
    tmp_path_factory: pytest.TempPathFactory,
    numels: list[int],
    in_memory: list[int],
    keeps: bool,
    most_nbytes: int,
    step: int,
) -> None:
    folder, values, outcome = tmp_path_factory.mktemp("archives"), deferred(numels), Outcome()
    obj = [*values, *(torch.arange(numel, dtype=torch.int16) for numel in in_memory)]

    def fill(write: Any) -> None:
        for start in range(0, max(numels), step):
            for tensor, value in values.items():
                piece = value[start : start + step].clone()
                write(tensor, piece)
                piece.zero_()  # the owner goes on

    write_archive(obj, str(folder / "at_once"), lambda file: fill(file.write), name="a")
    file = begin_archive(obj, str(folder / "later"), name="a", keeps=keeps)
    writer = ArchiveWriter([file], CopyBuffers(most_nbytes), outcome)
    fill(lambda tensor, piece: writer.write(file, tensor, piece))
    writer.end()
    writer.join()
    assert outcome.errors == [None]
    assert (folder / "later").read_bytes() == (folder / "at_once").read_bytes()


def test_copies_take_no_more_memory_than_they_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, most, written, gate = [0], [0], [0], threading.Semaphore(0)
    stock_zeros, stock_write = archive_writer.untouched_zeros, ArchiveFile.write

    def counted(numel: int, dtype: torch.dtype) -> torch.Tensor:
        held[0] += numel
        most[0] = max(most[0], held[0])
        return stock_zeros(numel, dtype)

    def slow(self: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        gate.acquire()
        stock_write(self, tensor, data)
        written[0] += 1

    monkeypatch.setattr(archive_writer, "untouched_zeros", counted)
    monkeypatch.setattr(ArchiveFile, "write", slow)
    (tensor,) = values = deferred([1000])
    file, outcome = begin_archive(list(values), str(tmp_path / "a")), Outcome()
    writer = ArchiveWriter([file], CopyBuffers(1200), outcome)

    def fill() -> None:
        for start in range(0, 1000, 100):
            writer.write(file, tensor, values[tensor][start : start + 100])
        writer.end()

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "three copies of 400 bytes fit"
    assert written[0] == 0
    for _ in range(10):
        gate.release()
    thread.join()
    writer.join()
    assert outcome.errors == [None]
    assert most[0] == 1200
    assert torch.equal(torch.load(tmp_path / "a")[0], values[tensor])


def test_buffers_are_used_again(tmp_path: Path) -> None:
    buffers, freed = CopyBuffers(10_000, kept=True), CopyBuffers(10_000)
    (tensor,) = values = deferred([1000])
    for number, used in enumerate((buffers, buffers, freed)):
        file, outcome = begin_archive(list(values), str(tmp_path / f"{number}")), Outcome()
        writer = ArchiveWriter([file], used, outcome)
        writer.write(file, tensor, values[tensor])
        writer.end()
        writer.join()
        assert outcome.errors == [None]
    assert (buffers.nbytes, freed.nbytes) == (4000, 0)
    buffer = buffers.take(4000)
    assert buffer is not None
    assert torch.equal(buffer.view(torch.float32), values[tensor]), "memory of the copies"
    assert buffers.take(7000) is None
    buffers.put(buffer)
    large = buffers.take(7000)
    assert large is not None
    assert large.numel() == 7000


def test_an_error_of_the_writer_ends_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError("the drive is gone")

    def fail(self: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        raise error

    monkeypatch.setattr(ArchiveFile, "write", fail)
    (tensor,) = values = deferred([1000])
    file, outcome = begin_archive(list(values), str(tmp_path / "a")), Outcome()
    writer = ArchiveWriter([file], CopyBuffers(1), outcome)

    def fill() -> None:
        for start in range(0, 1000, 100):
            writer.write(file, tensor, values[tensor][start : start + 100])

    with pytest.raises(TenCacheError, match="not being written"):
        fill()
    writer.join()
    assert outcome.errors == [error]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_copied_leaves_no_file(tmp_path: Path) -> None:
    error, outcome = TenCacheError("the state cannot be read"), Outcome()
    values = deferred([1000])
    writer = ArchiveWriter([begin_archive(list(values), str(tmp_path / "a"))], CopyBuffers(1000), outcome)
    writer.fail(error)
    writer.join()
    assert outcome.errors == [error]
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_lacks_something_is_an_error(tmp_path: Path) -> None:
    outcome, values = Outcome(), deferred([1000])
    writer = ArchiveWriter([begin_archive(list(values), str(tmp_path / "a"))], CopyBuffers(1000), outcome)
    writer.end()
    writer.join()
    assert "0 of 4000 bytes were written" in str(outcome.errors[0])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reason", ["free", "awaited", "memory", "time"])
def test_the_drive_is_left_to_those_who_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """See [Note: the drive is somebody else's]."""
    in_use, written = [True], threading.Event()
    stock_write = ArchiveFile.write

    def write(self: ArchiveFile, tensor: DeferredTensor, data: torch.Tensor) -> None:
        written.set()
        stock_write(self, tensor, data)

    def drive_in_use(seconds: float) -> bool:
        written.wait(seconds)
        return in_use[0]

    monkeypatch.setattr(ArchiveFile, "write", write)
    if reason == "time":
        monkeypatch.setattr(archive_writer, "MOST_SECONDS_GIVEN", 0.5)
    (tensor,) = values = deferred([1000])
    file, outcome = begin_archive(list(values), str(tmp_path / "a")), Outcome()
    writer = ArchiveWriter([file], CopyBuffers(3000 if reason == "memory" else 10_000), outcome, drive_in_use)
    writer.write(file, tensor, values[tensor][:500])
    assert not written.wait(0.2)
    if reason == "free":
        in_use[0] = False
    elif reason == "awaited":
        threading.Thread(target=writer.join).start()
    elif reason == "memory":
        writer.write(file, tensor, values[tensor][500:])
    assert written.wait(20)
    if reason != "memory":
        writer.write(file, tensor, values[tensor][500:])
    writer.end()
    writer.join()
    assert outcome.errors == [None]
    assert torch.equal(torch.load(tmp_path / "a")[0], values[tensor])
