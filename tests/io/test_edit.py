# SPDX-License-Identifier: Apache-2.0
"""Extents that a caller changes in the file itself: what it may have, what waits meanwhile, and what is compared."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tencache_ds.errors import CorruptionError, StorageError
from tencache_ds.io import Extent, ExtentEdit, ExtentStore, NativeBackend, PosixBackend, RoutedBackend
from tencache_ds.io.integrity.fingerprint import sampled_fingerprint, whole_fingerprint
from tencache_ds.layout import PAGE_NBYTES
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

N_PAGES = 3
NBYTES = N_PAGES * PAGE_NBYTES


class Files:
    """A store with one written extent."""

    def __init__(self, folder, backend=None, **options) -> None:
        self.backend = backend or PosixBackend(n_lanes=2)
        self.store = ExtentStore(
            str(folder / "store.bin"),
            self.backend,
            growth_nbytes=NBYTES,
            timeout_s=20,
            **({"editable": True} | options),
        )
        self.extent = self.store.allocate(NBYTES, "the state")
        self.store.write(self.extent, aligned(NBYTES, fill=None, seed=1)).wait()

    def edit(self) -> ExtentEdit:
        edit = self.store.edit(self.extent)
        assert edit is not None
        return edit

    def read(self, extent: Extent | None = None) -> torch.Tensor:
        buffer = aligned(NBYTES)
        self.store.read(extent or self.extent, buffer).wait()
        return buffer

    def close(self) -> None:
        self.store.close()
        self.backend.close()


@pytest.fixture(params=["posix", "native", "routed"])
def files(tmp_path, request):
    backend = PosixBackend(n_lanes=2) if request.param == "posix" else NativeBackend(n_lanes=2)
    files = Files(tmp_path, RoutedBackend(backend) if request.param == "routed" else backend)
    yield files
    files.close()


def change(edit: ExtentEdit, *, seed: int = 2) -> torch.Tensor:
    """Replaces the bytes of an extent as its editor should."""
    words = torch.empty(NBYTES, dtype=torch.uint8)
    os.preadv(edit.fd, [words.numpy()], edit.extent.offset)
    edit.words_read[:] = words.view(torch.int64).view(N_PAGES, -1)[:, edit.read_position].numpy()
    new = aligned(NBYTES, fill=None, seed=seed)
    os.pwritev(edit.fd, [new.numpy()], edit.extent.offset)
    edit.words_written[:] = new.view(torch.int64).view(N_PAGES, -1)[:, edit.written_position].numpy()
    return new


def test_what_an_edit_has_written_is_read_and_edited_again(files):
    for seed in range(2, 600):  # more often than a page has words
        edit = files.edit()
        new = change(edit, seed=seed)
        edit.keep()
    assert torch.equal(files.read(), new)
    files.store.write(files.extent, aligned(NBYTES, 7)).wait()
    assert torch.equal(files.read(), aligned(NBYTES, 7))


def test_bytes_count_as_those_of_requests(files):
    before = files.backend.counters.snapshot()
    edit = files.edit()
    change(edit)
    edit.keep()
    files.edit().drop()
    after = files.backend.counters.snapshot()
    assert (after.n_reads - before.n_reads, after.n_writes - before.n_writes) == (1, 1)
    assert after.read_ns > before.read_ns
    assert (after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written) == (NBYTES, NBYTES)


def test_requests_wait_for_the_end_of_an_edit(files):
    edit, buffer = files.edit(), aligned(NBYTES)
    ticket = files.store.read(files.extent, buffer)
    assert files.store.edit(files.extent) is None
    new = change(edit)
    assert not ticket.done
    drained = threading.Thread(target=files.store.drain)
    drained.start()
    drained.join(0.1)
    assert drained.is_alive()
    edit.keep()
    ticket.wait()
    drained.join()
    assert torch.equal(buffer, new)


def test_an_extent_that_is_freed_meanwhile_is_there_until_the_end(files):
    edit = files.edit()
    files.store.free(files.extent)
    assert files.store.nbytes_allocated == NBYTES
    change(edit)
    edit.keep()
    assert files.store.nbytes_allocated == 0


def test_an_edit_without_a_change_leaves_the_extent_as_it_was(files):
    files.edit().drop()
    assert torch.equal(files.read(), aligned(NBYTES, fill=None, seed=1))


@pytest.mark.parametrize("page", range(N_PAGES))
def test_bytes_that_something_else_has_changed_are_found(files, page):
    edit = files.edit()
    offset = edit.extent.offset + page * PAGE_NBYTES + 8 * edit.read_position
    os.pwrite(edit.fd, b"\x00\x01\x02\x03\x04\x05\x06\x07", offset)
    change(edit)
    with pytest.raises(CorruptionError, match=r"the state.*not those of write 1"):
        edit.keep()
    with pytest.raises(CorruptionError):
        files.read()
    assert files.store.edit(files.extent) is None
    files.store.check()
    files.store.write(files.extent, aligned(NBYTES, 7)).wait()
    assert torch.equal(files.read(), aligned(NBYTES, 7))


def test_a_change_that_failed_half_way_is_never_read(files):
    edit = files.edit()
    edit.drop(edit.failed(5))
    with pytest.raises(StorageError, match=r"the state.*Input/output error"):
        files.read()
    files.store.drain()


def test_a_wrong_word_written_is_found_by_the_next_read(files):
    edit = files.edit()
    change(edit)
    edit.words_written[1] += 1
    edit.keep()
    with pytest.raises(CorruptionError):
        files.read()


def test_only_whole_and_finished_extents_are_given_out(files):
    unwritten = files.store.allocate(NBYTES, "unwritten")
    part = files.store.allocate(NBYTES, "part")
    files.store.write(part, aligned(PAGE_NBYTES)).wait()
    assert files.store.edit(unwritten) is None
    assert files.store.edit(part) is None
    files.store.free(unwritten)
    with pytest.raises(ValueError, match="freed"):
        files.store.edit(unwritten)


@pytest.mark.parametrize(
    ("options", "gives_out"),
    [
        ({}, True),
        ({"fingerprint": sampled_fingerprint}, True),
        ({"fingerprint": None}, True),
        ({"fingerprint": whole_fingerprint}, False),  # a word of every page does not tell what each byte was
        ({"editable": False}, False),
    ],
)
def test_where_edits_are_given_out(tmp_path, options, gives_out):
    files = Files(tmp_path, **options)
    edit = files.store.edit(files.extent)
    assert (edit is not None) == files.store.editable == gives_out
    if edit is not None:
        assert edit.words_read.size == edit.words_written.size == (0 if options.get("fingerprint", 1) is None else 3)
        if not edit.words_read.size:
            os.pwritev(edit.fd, [aligned(NBYTES, 9).numpy()], edit.extent.offset)
            edit.keep()
            assert torch.equal(files.read(), aligned(NBYTES, 9))
        else:
            edit.drop()
    files.close()


def test_a_closed_store_gives_out_nothing(tmp_path):
    files = Files(tmp_path)
    files.close()
    with pytest.raises(StorageError, match="closed"):
        files.store.edit(files.extent)
    assert files.backend.counters.snapshot().n_writes == 1
