# SPDX-License-Identifier: Apache-2.0
"""Archives that a thread of its own writes from copies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tencache_ds.errors import SpaceError, StorageError, TenCacheError
from tencache_ds.io import archive_writer, torch_archive
from tencache_ds.io.archive_writer import ArchiveWriter, CopyBuffers, write_archive
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor, begin_archive

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
    st.integers(1, 3000),
    st.sampled_from([4096, 5000, 2**20]),
)
@settings(max_examples=100, deadline=None)
def test_files_are_those_that_are_written_without_copies(
    tmp_path_factory: pytest.TempPathFactory,
    numels: list[int],
    in_memory: list[int],
    keeps: bool,
    most_nbytes: int,
    step: int,
    least_direct: int,
) -> None:
    """In the background and at once, through the page cache and past it."""
    folder, values, outcome = tmp_path_factory.mktemp("archives"), deferred(numels), Outcome()
    obj = [*values, *(torch.arange(numel, dtype=torch.int16) for numel in in_memory)]

    def fill(write: Any) -> None:
        for start in range(0, max(numels), step):
            for tensor, value in values.items():
                piece = value[start : start + step].clone()
                write(tensor, piece)
                piece.zero_()  # the owner goes on

    file = begin_archive(obj, str(folder / "alone"), name="a")
    fill(file.write)
    file.finish()
    with smallest_direct_write(least_direct):
        file = begin_archive(obj, str(folder / "later"), name="a", keeps=keeps)
        writer = ArchiveWriter([file], CopyBuffers(most_nbytes), outcome)
        fill(lambda tensor, piece: writer.write(file, tensor, piece))
        writer.end()
        writer.join()

        def fill_at_once(file: ArchiveFile, write: Any) -> None:
            fill(lambda tensor, piece: write(file, tensor, piece))

        write_archive(obj, str(folder / "at_once"), fill_at_once, CopyBuffers(most_nbytes), name="a")
    assert outcome.errors == [None]
    assert (folder / "later").read_bytes() == (folder / "alone").read_bytes()
    assert (folder / "at_once").read_bytes() == (folder / "alone").read_bytes()


@contextlib.contextmanager
def smallest_direct_write(nbytes: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (torch_archive, archive_writer):
            stack.enter_context(mock.patch.object(module, "LEAST_DIRECT_NBYTES", nbytes))
        yield


class Writes:
    """Counts the bytes that files take, past the page cache (O_DIRECT) and through it; may refuse the first."""

    def __init__(self, refusal: int = 0) -> None:
        self.direct = self.cached = 0
        self._refusal = refusal

    def pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        direct = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        if direct and self._refusal:
            raise OSError(self._refusal, os.strerror(self._refusal))
        n_written = self._stock(descriptor, data[: max(len(data) - 8192, 4096)], offset)  # a short one
        if direct:
            self.direct += n_written
        else:
            self.cached += n_written
        return n_written

    _stock = staticmethod(os.pwrite)


@pytest.mark.parametrize("refusal", [0, errno.EINVAL, errno.EOPNOTSUPP])
def test_on_a_block_device_all_but_the_ends_goes_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    writes, outcome, values = Writes(refusal), Outcome(), deferred([3_000_001, 700_003])
    monkeypatch.setattr(torch_archive.os, "pwrite", writes.pwrite)
    file = begin_archive([torch.ones(3), *values], str(tmp_path / "a"))
    writer = ArchiveWriter([file], CopyBuffers(10_000_000), outcome)
    for start in range(0, 3_000_001, 600_001):
        for tensor, value in values.items():
            writer.write(file, tensor, value[start : start + 600_001])
    writer.end()
    writer.join()
    assert outcome.errors == [None]
    for result, value in zip(torch.load(tmp_path / "a")[1:], values.values(), strict=True):
        assert torch.equal(result, value)
    with zipfile.ZipFile(tmp_path / "a") as archive:
        assert archive.testzip() is None
    on_device = os.major(os.stat(tmp_path).st_dev) != 0
    if on_device and not refusal:
        assert writes.direct > 0.95 * (writes.direct + writes.cached)
    else:
        assert writes.direct == 0
    assert not file._output._takes_direct or not refusal


def test_another_error_past_the_page_cache_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_archive.os, "major", lambda device: 8)
    monkeypatch.setattr(torch_archive.os, "pwrite", Writes(errno.ENOSPC).pwrite)
    (tensor,) = values = deferred([1_000_000])
    with pytest.raises(SpaceError, match=r"write of a checkpoint failed at .*No space left on device"):
        write_archive(
            list(values), str(tmp_path / "a"), lambda file, write: write(file, tensor, values[tensor]), CopyBuffers(1)
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [StorageError("read", "scratch", 0, 4096, "gone", errno=5), KeyboardInterrupt()])
def test_an_error_of_the_caller_leaves_no_file(tmp_path: Path, error: BaseException) -> None:
    (tensor,) = values = deferred([1000])

    def fill(file: ArchiveFile, write: Any) -> None:
        write(file, tensor, values[tensor][:500])
        raise error

    with pytest.raises(type(error)):
        write_archive(list(values), str(tmp_path / "a"), fill, CopyBuffers(10_000))
    assert list(tmp_path.iterdir()) == []


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
