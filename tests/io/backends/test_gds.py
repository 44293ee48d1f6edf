# SPDX-License-Identifier: Apache-2.0
"""GPUDirect Storage: what needs no GPU on ordinary memory, the rest (marked) with KvikIO on a GPU."""

from __future__ import annotations

import errno
import itertools
import os
import threading

import pytest
import torch

from tencache_ds.errors import CorruptionError, SpaceError, StorageError
from tencache_ds.io import ExtentStore, GdsBackend, Operation, PosixBackend, RoutedBackend, Submission
from tencache_ds.io.backends.gds import compatibility_mode, errno_in, missing_kvikio, obstacle, plain_cause, try_gds
from tencache_ds.io.integrity import gathered_words, sampled_fingerprint
from tencache_ds.io.wrappers.faults import FaultBackend, parse_faults
from tencache_ds.memory import BufferPool, DeviceArena, Locking
from tencache_ds.memory.arena import POISON_BYTE
from tencache_ds.planning.size_classes import SizeClass
from tests.io.conftest import aligned
from tests.io.device_files import PlainDeviceFile, new_kind

pytestmark = pytest.mark.timeout(120)

P = 4096
MIB = 1 << 20
TIMEOUT_S = 30.0
CPU = torch.device("cpu")


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return aligned(nbytes, fill=None, seed=seed)


@pytest.fixture
def backend(files):
    backend = GdsBackend(CPU, n_lanes=3, request_nbytes=4 * P, open_file=files)
    yield backend
    backend.close()


# Transfers and errors


@pytest.mark.parametrize("n_pages", [1, 4, 5, 40])
def test_what_is_written_is_read(backend, path, n_pages):
    os.truncate(path, (n_pages + 2) * P)
    written, read = random_bytes(n_pages * P, 1), aligned(n_pages * P)
    backend.submit(Submission(Operation.WRITE, path, 2 * P, written)).wait(TIMEOUT_S)
    backend.submit(Submission(Operation.READ, path, 2 * P, read)).wait(TIMEOUT_S)
    assert torch.equal(read, written)
    assert backend.counters.bytes_read == backend.counters.bytes_written == n_pages * P


def test_short_transfers_are_continued(path):
    with new_kind(longest=1000, short_at_end=True) as files:
        backend = GdsBackend(CPU, n_lanes=2, request_nbytes=4 * P, open_file=files)
        written, read = random_bytes(9 * P, 2), aligned(9 * P)
        backend.submit(Submission(Operation.WRITE, path, 0, written)).wait(TIMEOUT_S)
        backend.submit(Submission(Operation.READ, path, 0, read)).wait(TIMEOUT_S)
        backend.close()
    assert torch.equal(read, written)


@pytest.mark.parametrize("short_at_end", [True, False], ids=["driver", "compatibility mode"])
def test_a_file_that_ends_early(path, short_at_end):
    os.truncate(path, P + 100)
    with new_kind(short_at_end=short_at_end) as files:
        backend = GdsBackend(CPU, open_file=files)
        with pytest.raises(StorageError) as caught:
            backend.submit(Submission(Operation.READ, path, 0, aligned(4 * P), tag="weight 7")).wait(TIMEOUT_S)
        backend.close()
    error = caught.value
    assert f"file ends after {P + 100} bytes, {P + 100} of {4 * P} bytes were read" in str(error)
    assert (error.operation, error.path, error.offset, error.nbytes, error.tag) == ("read", path, 0, 4 * P, "weight 7")


@pytest.mark.parametrize("operation", list(Operation))
def test_a_file_that_is_gone_is_not_made(backend, tmp_path, operation):
    gone = str(tmp_path / "gone")
    with pytest.raises(StorageError) as caught:
        backend.submit(Submission(operation, gone, P, aligned(P), tag="weight 7")).wait(TIMEOUT_S)
    assert caught.value.errno == errno.ENOENT
    assert (caught.value.offset, caught.value.nbytes, caught.value.tag) == (P, P, "weight 7")
    assert not os.path.exists(gone)


@pytest.mark.parametrize(
    ("text", "number", "kind"),
    [
        ("KvikIO failure at: /src/io.hpp:1: POSIX error on pread: Input/output error", errno.EIO, StorageError),
        ("KvikIO failure at: /src/io.hpp:1: POSIX error on pwrite: No space left on device", errno.ENOSPC, SpaceError),
        ("cuFile error at: /src/error.hpp:9: GPUDirect Storage driver not loaded", None, StorageError),
        ("CUDA error at: /src/x.cpp:2: CUDA_ERROR_INVALID_CONTEXT(invalid device context)", None, StorageError),
    ],
)
def test_errors_of_kvikio_are_typed(path, text, number, kind):
    with new_kind(failing=text) as files:
        backend = GdsBackend(CPU, open_file=files)
        with pytest.raises(StorageError) as caught:
            backend.submit(Submission(Operation.WRITE, path, 0, aligned(P), tag="w")).wait(TIMEOUT_S)
        backend.close()
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert "/src/" not in str(caught.value)
    assert text.split(": ", 2)[2] in str(caught.value)


def test_the_longest_text_gives_the_errno():
    assert errno_in("Unable to open file. No such file or directory") == errno.ENOENT
    assert errno_in("something else") is None
    assert plain_cause(RuntimeError("")) == "RuntimeError"


def test_files_stay_open_until_they_are_forgotten(backend, files, path):
    os.truncate(path, 4 * P)
    for _ in range(3):
        backend.submit(Submission(Operation.READ, path, 0, aligned(4 * P))).wait(TIMEOUT_S)
    backend.submit(Submission(Operation.WRITE, path, 0, aligned(P))).wait(TIMEOUT_S)
    assert files.n_opened == {"r": 1, "r+": 1}
    backend.forget(path)
    assert files.n_open == 0
    os.unlink(path)
    with pytest.raises(StorageError, match="No such file"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(P))).wait(TIMEOUT_S)


def test_a_file_in_use_is_closed_by_the_last_transfer(path):
    inside, go_on = threading.Event(), threading.Event()

    class Held(PlainDeviceFile):
        n_opened: dict[str, int] = {}

        def raw_read(self, buf, size, file_offset):
            inside.set()
            assert go_on.wait(TIMEOUT_S)
            return super().raw_read(buf, size, file_offset)

    os.truncate(path, P)
    backend = GdsBackend(CPU, n_lanes=1, open_file=Held)
    ticket = backend.submit(Submission(Operation.READ, path, 0, aligned(P)))
    assert inside.wait(TIMEOUT_S)
    backend.forget(path)
    assert Held.n_open == 1
    go_on.set()
    ticket.wait(TIMEOUT_S)
    backend.close()
    assert Held.n_open == 0


def test_host_memory_is_refused_where_gpu_memory_is_due(files, path):
    backend = GdsBackend(torch.device("cuda", 0), open_file=files)
    with pytest.raises(ValueError, match="on the CUDA, not 1-D torch.uint8 on cpu"):
        backend.submit(Submission(Operation.READ, path, 0, aligned(P)))
    backend.close()


def test_without_kvikio_there_is_no_backend(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "kvikio", None)
    with pytest.raises(ImportError):
        GdsBackend(CPU)


# Fingerprints


@pytest.mark.parametrize("n_pages", [1, 7, 100])
def test_words_gathered_on_the_device_are_those_of_the_host(n_pages):
    buffer = random_bytes(n_pages * P, 4)
    for position in (0, 1, 197, 511):
        words = buffer.numpy().view("uint64").reshape(-1, 512)[:, position]
        assert (gathered_words(buffer, position) == words).all()


# The trial


def trial(folder, files, *, nbytes: int = 2 * MIB, **options):
    return try_gds(
        str(folder / "trial.bin"),
        CPU,
        lambda: PosixBackend(2),
        lambda: GdsBackend(CPU, n_lanes=2, open_file=files),
        locking=Locking.NONE,
        request_nbytes=MIB,
        timeout_s=TIMEOUT_S,
        nbytes=nbytes,
        **({"compatibility": lambda: ""} | options),
    )


def test_a_round_trip_that_works(tmp_path, files):
    result = trial(tmp_path, files)
    assert (result.problem, result.compatibility) == ("", "")
    assert result.gds_bytes_per_s > 0
    assert result.staged_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_slower_way_is_found(tmp_path):
    class Slow(PlainDeviceFile):
        n_opened: dict[str, int] = {}

        def raw_read(self, buf, size, file_offset):
            threading.Event().wait(0.05)
            return super().raw_read(buf, size, file_offset)

    result = trial(tmp_path, Slow, compatibility=lambda: "no driver")
    assert result.compatibility == "no driver"
    assert result.gds_bytes_per_s < result.staged_bytes_per_s


def test_a_round_trip_that_changes_bytes(tmp_path):
    with new_kind(wrong=True) as files:
        result = trial(tmp_path, files)
    assert "differs from the data written" in result.problem
    assert list(tmp_path.iterdir()) == []


def test_a_round_trip_that_fails(tmp_path):
    with new_kind(failing="KvikIO failure at: /src/io.hpp:1: POSIX error on pread: Input/output error") as files:
        result = trial(tmp_path, files)
    assert "round trip" in result.problem
    assert "Input/output error" in result.problem
    assert list(tmp_path.iterdir()) == []


def test_a_kvikio_that_cannot_be_used(tmp_path, files):
    def broken() -> str:
        raise RuntimeError("libcufile.so.0: cannot open shared object file")

    assert "libcufile" in trial(tmp_path, files, compatibility=broken).problem


def test_what_speaks_against_gds_before_a_trial(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not a CUDA GPU" in obstacle(False, "sampled")
    assert '"tencache.verify"' in obstacle(True, "full")
    assert "pip install 'tencache-ds[gds-cu1" in obstacle(True, "sampled")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert obstacle(True, "sampled") == ""
    assert missing_kvikio() == ""


# On a GPU

BUSY_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture
def cuda():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def gpu_arena(cuda):
    arena = DeviceArena(cuda)
    yield arena
    torch.cuda.synchronize()
    arena.close()


@pytest.fixture
def gds(cuda):
    backend = GdsBackend(cuda, n_lanes=4, request_nbytes=MIB)
    yield backend
    backend.close()


def on_gpu(arena: DeviceArena, host: torch.Tensor) -> torch.Tensor:
    buffer = arena.allocate(host.numel(), "test")
    buffer.copy_(host)
    torch.cuda.synchronize()
    return buffer


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_mode_is_said():
    print("compatibility mode:", compatibility_mode() or "no, GPUDirect Storage works")
    assert missing_kvikio() == ""


@pytest.mark.gpu
@pytest.mark.gds
@pytest.mark.parametrize(
    ("nbytes", "n_lanes"), [(P, 1), (P, 8), (MIB - P, 4), (33 * MIB + 3 * P, 1), (33 * MIB + 3 * P, 8)]
)
def test_gpu_round_trip_both_ways(cuda, gpu_arena, path, nbytes, n_lanes):
    backend = GdsBackend(cuda, n_lanes=n_lanes, request_nbytes=MIB)
    os.truncate(path, nbytes + P)
    written = random_bytes(nbytes, n_lanes)
    backend.submit(Submission(Operation.WRITE, path, P, on_gpu(gpu_arena, written), tag="w")).wait(TIMEOUT_S)
    with open(path, "rb") as file:
        file.seek(P)
        assert file.read() == written.numpy().tobytes()
    read = gpu_arena.allocate(nbytes, "test")
    backend.submit(Submission(Operation.READ, path, P, read, tag="w")).wait(TIMEOUT_S)
    assert torch.equal(read.cpu(), written)
    assert backend.counters.bytes_read == backend.counters.bytes_written == nbytes
    backend.close()


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_many_requests_at_the_same_time(gds, gpu_arena, path):
    pieces = [random_bytes((1 + seed % 5) * MIB // 2, seed) for seed in range(24)]
    offsets = list(itertools.accumulate((piece.numel() for piece in pieces), initial=0))
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece.numpy().tobytes())
    buffers = [gpu_arena.allocate(piece.numel(), "test") for piece in pieces]
    tickets = [
        gds.submit(Submission(Operation.READ, path, offset, buffer))
        for offset, buffer in zip(offsets[:-1], buffers, strict=True)
    ]
    for ticket in tickets:
        ticket.wait(TIMEOUT_S)
    assert all(torch.equal(buffer.cpu(), piece) for buffer, piece in zip(buffers, pieces, strict=True))


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_truncated_and_removed_files(gds, gpu_arena, path):
    buffer = gpu_arena.allocate(4 * MIB, "test")
    os.truncate(path, MIB + 100)
    with pytest.raises(StorageError, match=f"file ends after {MIB + 100} bytes") as caught:
        gds.submit(Submission(Operation.READ, path, 0, buffer, tag="weight 7")).wait(TIMEOUT_S)
    assert caught.value.tag == "weight 7"
    gds.forget(path)
    os.unlink(path)
    for operation in Operation:
        with pytest.raises(StorageError) as caught:
            gds.submit(Submission(operation, path, 0, buffer)).wait(TIMEOUT_S)
        assert caught.value.errno == errno.ENOENT
    assert not os.path.exists(path)
    assert (torch.ones(4, device="cuda") + 1).tolist() == [2.0] * 4  # no error is left behind for the next kernel


@pytest.mark.gpu
def test_gpu_fingerprints_are_those_of_the_host(gpu_arena):
    host = random_bytes(300 * P, 5)
    buffer = on_gpu(gpu_arena, host)
    for generation in (0, 1, 511, 10**6):
        assert sampled_fingerprint(buffer, generation) == sampled_fingerprint(host, generation)


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_a_lost_write_is_found_and_a_read_that_went_wrong_is_healed(cuda, gpu_arena, tmp_path):
    import kvikio

    wrong_reads = iter([False, True, False])

    class Forgetful(kvikio.CuFile):
        def raw_read(self, buf, size, file_offset):
            n = super().raw_read(buf, size, file_offset)
            if next(wrong_reads, False):
                buf.zero_()
                torch.cuda.synchronize()
            return n

    routed = RoutedBackend(PosixBackend(2))
    backend = FaultBackend(routed, ())
    routed.add_device(GdsBackend(cuda, n_lanes=2, open_file=Forgetful), gpu_arena.owns)
    store = ExtentStore(str(tmp_path / "store"), backend, timeout_s=TIMEOUT_S)
    extent = store.allocate(MIB, "weight 7")
    first, second = random_bytes(MIB, 6), random_bytes(MIB, 7)
    buffer = gpu_arena.allocate(MIB, "test")
    store.write(extent, first).wait()
    for n_healed in (0, 1, 1):
        store.read(extent, buffer).wait()
        assert torch.equal(buffer.cpu(), first)
        assert store.n_healed_reads == n_healed
    backend.inject(parse_faults("op=write,kind=torn,times=1"))
    store.write(extent, second).wait()
    with pytest.raises(CorruptionError, match="the bytes are not those of write 2"):
        store.read(extent, buffer).wait()
    store.write(extent, second).wait()
    store.read(extent, buffer).wait()
    assert torch.equal(buffer.cpu(), second)
    store.close()
    backend.close()


def copies_through_slots(gds, pool: BufferPool, path: str, release_early: bool) -> list[bool]:
    """Reads patterns into slots and copies them on a stream that is busy; whether each copy is right."""
    n_files, nbytes = 30 if not release_early else 4, 4 * MIB
    with open(path, "wb") as file:
        for index in range(n_files):
            file.write(bytes([index + 1]) * nbytes)
    stream = torch.cuda.Stream()
    copies = []
    for index in range(n_files):
        lease = pool.lease(nbytes, f"weight {index}", "read", timeout_s=TIMEOUT_S)
        gds.submit(Submission(Operation.READ, path, index * nbytes, lease.buffer)).wait(TIMEOUT_S)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
            copies.append(lease.buffer.clone())
            event = torch.cuda.Event()
            event.record()
        if release_early:
            lease.release()
        else:
            lease.release_after(event)
    torch.cuda.synchronize()
    return [bool((copy == index + 1).all()) for index, copy in enumerate(copies)]


@pytest.fixture
def gpu_pool(gpu_arena):
    pool = BufferPool(gpu_arena, [SizeClass(4 * MIB, 2)], poison=True)
    yield pool
    pool.close(timeout_s=30)


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_a_slot_is_not_read_into_before_its_copy_is_done(gds, gpu_pool, path):
    assert all(copies_through_slots(gds, gpu_pool, path, release_early=False))
    assert gpu_pool.stats().n_waits > 0
    gpu_pool.assert_idle()


@pytest.mark.gpu
@pytest.mark.gds
def test_gpu_control_a_slot_given_back_too_early_is_overwritten(gds, gpu_pool, path):
    assert not all(copies_through_slots(gds, gpu_pool, path, release_early=True))


@pytest.mark.gpu
def test_gpu_memory_is_quiet_when_it_is_handed_out(gpu_arena, gpu_pool):
    stream = torch.cuda.current_stream()
    torch.cuda._sleep(10 * BUSY_CYCLES)
    busy = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    del busy  # torch's allocator may hand the same memory out again at once, with the fill still to come
    buffer = gpu_arena.allocate(64 * MIB, "test")
    assert stream.query()
    assert buffer.data_ptr() % P == 0
    torch.cuda._sleep(10 * BUSY_CYCLES)
    lease = gpu_pool.lease(P, "w", "test")
    slot = lease.slot.tensor
    lease.release()
    assert stream.query(), "the fill with poison may still be pending"
    assert bool((slot == POISON_BYTE).all())


@pytest.mark.gpu
@pytest.mark.gds
@pytest.mark.timeout(60)
def test_gpu_trial(cuda, tmp_path):
    result = try_gds(
        str(tmp_path / "trial.bin"),
        cuda,
        lambda: PosixBackend(8),
        lambda: GdsBackend(cuda, n_lanes=8),
        locking=Locking.CUDA,
        request_nbytes=8 * MIB,
        timeout_s=TIMEOUT_S,
    )
    print(result)
    assert result.problem == ""
    assert result.gds_bytes_per_s > 1e8
    assert result.staged_bytes_per_s > 1e8
    assert list(tmp_path.iterdir()) == []
