# SPDX-License-Identifier: Apache-2.0
"""Files of ``torch.save`` whose tensors need not be in memory: laid out first, filled incrementally in any order.

The format is a ZIP archive of uncompressed records: the pickled object, and one record per storage. ``torch.save``
needs each storage whole in memory, and its ``skip_data`` leaves wrong checksums behind (and needs torch 2.6). Here the
lengths determine the layout, bytes are written to their positions as they arrive, and headers and checksums are written
last: an unfinished file is not a valid archive.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import fcntl
import functools
import io
import os
import pickle
import queue
import struct
import sys
import threading
import zlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tencache_ds.errors import SpaceError, StorageError, TenCacheError
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.tensors import empty

PICKLE_PROTOCOL = 2
FORMAT_VERSION = b"3\n"
STORAGE_ALIGNMENT_NBYTES = 64
"""Alignment of a storage in the file, that of ``torch.save``: what ``torch.load(mmap=True)`` returns is aligned too."""

LEAST_DIRECT_NBYTES = 2**20
"""From which on bytes may go past the page cache, a page at least. Fewer are quicker in it: the kernel writes them
later."""

_WRITE_NBYTES = 64 * 2**20
_LEAST_BESIDE_NBYTES = 2**20
_ZIP64_LIMIT = 0xFFFFFFFF
_FIRST_OF_JANUARY_1980 = 0x0021


@dataclass(frozen=True, slots=True, eq=False)
class DeferredTensor:
    """Stands in an object for a 1-D tensor whose bytes are written after the object's structure.

    Attributes:
        key: identifies it to the writer of the bytes.
        dtype: dtype of the tensor.
        numel: its elements.
        requires_grad: as loaded.
    """

    key: Hashable
    dtype: torch.dtype
    numel: int
    requires_grad: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize

    def __reduce__(self) -> Any:
        storage = _DeferredStorage(self)
        hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
        arguments = (storage, 0, (self.numel,), (1,), self.requires_grad, hooks)
        if _storage_type(self.dtype) is torch.UntypedStorage:
            return torch._utils._rebuild_tensor_v3, (*arguments, self.dtype)
        return torch._utils._rebuild_tensor_v2, arguments


@dataclass(frozen=True, slots=True)
class _DeferredStorage:
    tensor: DeferredTensor

    def __reduce__(self) -> Any:
        raise TenCacheError(
            f"the tensor {self.tensor.key} of a checkpoint is not in memory: only begin_archive() can save it"
        )


@dataclass(frozen=True, slots=True)
class _EmptyStorage:
    """Of tensors without elements, such as DeepSpeed saves for each partitioned weight: one for all that are alike."""

    reference: tuple[Any, ...]


_STORAGES = (_DeferredStorage, _EmptyStorage, torch.storage.TypedStorage, torch.UntypedStorage)


@dataclass(slots=True)
class _Record:
    """One file of the archive: its position, and the checksum of the bytes written so far, in order."""

    name: bytes
    nbytes: int
    header_offset: int = 0
    data_offset: int = 0
    n_written: int = 0
    crc: int = 0


@dataclass(slots=True)
class _Structure:
    """A pickled object and the storages it refers to, by their number."""

    pickled: bytes = b""
    storages: dict[str, torch.UntypedStorage | DeferredTensor] = field(default_factory=dict)


class _Checksums:
    """Computes CRC-32 on a thread of its own, beside the write of the same bytes, which takes about as long; at once
    where they are few, so that a file is begun without waiting for a thread to start. Not an executor, which takes no
    more work once the main thread has ended: a checkpoint may be written then.
    """

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[memoryview, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, piece: memoryview, crc: int) -> None:
        """Begins with the bytes that follow those of a checksum; :meth:`result` has to follow."""
        if len(piece) < _LEAST_BESIDE_NBYTES:
            self._results.put(zlib.crc32(piece, crc))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tencache-checksums", daemon=True)
            self._thread.start()
        self._pieces.put((piece, crc))

    def result(self) -> int:
        """The checksum of all of them."""
        return self._results.get()

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._pieces.put(None)

    def _run(self) -> None:
        while (item := self._pieces.get()) is not None:
            piece, crc = item
            self._results.put(zlib.crc32(piece, crc))
            del item, piece  # the buffer is the writer's


class _Output:
    """Where a file's bytes go. On a block device, many at the same place in their pages of memory as in those of the
    file go past the page cache: its copies and its write-back take a core 0.4 s for each GB. One thread at a time.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        # A network file system has no device, and would write its cache back whenever the mode changes.
        self._takes_direct = os.major(os.fstat(descriptor).st_dev) != 0
        self._n_cached = 0  # bytes written since the kernel was last told

    def write(self, offset: int, data: memoryview | bytes) -> None:
        """Writes all of it, at any position.

        Raises:
            StorageError: that is not possible (:class:`SpaceError` when the device is full).
        """
        view = memoryview(data)
        try:
            while view:
                n_written = self._write_some(offset, view)
                view, offset = view[n_written:], offset + n_written
        except OSError as error:
            raise _storage_error("write", self._path, offset, len(view), error) from error

    def _write_some(self, offset: int, view: memoryview) -> int:
        end = len(view)
        if self._takes_direct and end >= LEAST_DIRECT_NBYTES:
            address = np.frombuffer(view, np.uint8).ctypes.data
            if (address - offset) % PAGE_NBYTES == 0:
                end = -offset % PAGE_NBYTES
                if not end:
                    return self._write_pages(offset, view[: len(view) // PAGE_NBYTES * PAGE_NBYTES])
        n_written = os.pwrite(self._descriptor, view[:end], offset)
        self._uncache(n_written)
        return n_written

    def _write_pages(self, offset: int, view: memoryview) -> int:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.pwrite(self._descriptor, view, offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            self._takes_direct = False
            return 0  # nothing yet
        finally:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags)

    def _uncache(self, nbytes: int) -> None:
        """Has the kernel write to the drive, and then forget, what the page cache has: by itself it begins when a tenth
        of the memory is dirty, and most of the file is left to :meth:`ArchiveFile.finish`."""
        self._n_cached += nbytes
        if self._n_cached >= _WRITE_NBYTES:
            self._n_cached = 0
            with contextlib.suppress(OSError):  # a file system that cannot, at its own time
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class ArchiveFile:
    """A file that :func:`begin_archive` has begun: takes the bytes of deferred tensors. One thread at a time."""

    def __init__(
        self, path: str, descriptor: int, records: list[_Record], deferred: dict[DeferredTensor, _Record]
    ) -> None:
        self._path = path
        self._descriptor = descriptor
        self._records = records
        self._deferred = deferred
        self._by_key = {tensor.key: tensor for tensor in deferred}
        self._kept: collections.deque[tuple[_Record, torch.UntypedStorage]] = collections.deque()
        self._checksums = _Checksums()
        self._output = _Output(path, descriptor)

    @property
    def deferred(self) -> dict[Hashable, DeferredTensor]:
        """The deferred tensors that the object holds, by their key."""
        return self._by_key

    @property
    def device(self) -> int:
        """Number of the file system that it is on (:func:`~tencache_ds.io.scratch.device_of`)."""
        return os.fstat(self._descriptor).st_dev

    def offset_of(self, tensor: DeferredTensor) -> int:
        """The byte of the file at which a deferred tensor begins."""
        return self._deferred[tensor].data_offset

    def write(self, tensor: DeferredTensor, data: torch.Tensor) -> None:
        """Appends the tensor's next elements; those of several tensors may take turns. Quickest where they are at the
        same place in their pages of memory as in those of the file.

        Args:
            tensor: one of :attr:`deferred`.
            data: 1-D contiguous tensor in host memory, of the tensor's dtype; free again on return.

        Raises:
            StorageError: the file cannot be written (:class:`SpaceError` when the device is full).
            TenCacheError: wrong dtype, or more elements than the tensor has.
        """
        if data.dtype != tensor.dtype:
            raise TenCacheError(f"{tensor.key} is {tensor.dtype} in the checkpoint, not {data.dtype}")
        self._append(self._deferred[tensor], _bytes_of(data))

    def write_kept(self) -> None:
        """Writes the tensors in memory that :func:`begin_archive` has found, and lets each go.

        Raises:
            StorageError: as :meth:`write`.
        """
        while self._kept:
            record, storage = self._kept.popleft()
            self._append(record, _bytes_of_storage(storage))

    def _append(self, record: _Record, data: memoryview) -> None:
        if record.n_written + len(data) > record.nbytes:
            raise TenCacheError(f"record {record.name!r} of {self._path} has {record.nbytes} bytes; more were written")
        for start in range(0, len(data), _WRITE_NBYTES):
            piece = data[start : start + _WRITE_NBYTES]
            self._checksums.begin(piece, record.crc)
            try:
                self._output.write(record.data_offset + record.n_written, piece)
            finally:
                record.crc = self._checksums.result()
            record.n_written += len(piece)

    def finish(self) -> None:
        """Ends the file, once every element is written. Its contents are durable on return; its name is when its folder
        is (:func:`make_durable`).

        Raises:
            StorageError: the file cannot be written (:class:`SpaceError` when the device is full).
            TenCacheError: not all of a deferred tensor was written.
        """
        for record in self._records:
            if record.n_written != record.nbytes:
                raise TenCacheError(
                    f"record {record.name!r} of {self._path}: {record.n_written} of {record.nbytes} bytes were written"
                )
            self._output.write(record.header_offset, _local_header(record))
        last = self._records[-1]
        end = last.data_offset + last.nbytes
        self._output.write(end, _directory(self._records))
        _sync(self._descriptor, self._path)
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.close(descriptor)  # a network file system tells of a failed write here
        except OSError as error:
            raise _storage_error("close", self._path, 0, end, error) from error
        finally:
            self._checksums.close()

    def discard(self) -> None:
        """Removes the file, finished or not."""
        self._checksums.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        Path(self._path).unlink(missing_ok=True)


def begin_archive(obj: Any, path: str, *, name: str | None = None, keeps: bool = False) -> ArchiveFile:
    """Begins what ``torch.save(obj, path)`` would write: everything but the contents of the deferred tensors in
    ``obj``, for which it has room.

    Args:
        obj: the object; tensors in memory are written from where they are.
        path: the file; replaced if it exists. After an error it is gone.
        name: of the archive in the file, where it is not the file's.
        keeps: tensors in memory are left to :meth:`ArchiveFile.write_kept`, and must not change until then.

    Raises:
        StorageError: the file cannot be created or written (:class:`SpaceError` when the device is full).
    """
    structure = _pickle(obj)
    stem = Path(name or path).stem
    prefix = (stem if stem.isascii() and stem else "archive").encode()
    contents: dict[str, bytes | torch.UntypedStorage | DeferredTensor] = {
        "data.pkl": structure.pickled,
        "byteorder": sys.byteorder.encode(),
        **{f"data/{key}": storage for key, storage in structure.storages.items()},
        "version": FORMAT_VERSION,
    }
    records = [
        _Record(prefix + b"/" + key.encode(), _nbytes_of(content), data_offset=-1) for key, content in contents.items()
    ]
    offset = 0
    for record in records:
        record.header_offset = offset
        record.data_offset = _aligned(offset + len(_local_header(record)))
        offset = record.data_offset + record.nbytes
    deferred = {c: r for c, r in zip(contents.values(), records, strict=True) if isinstance(c, DeferredTensor)}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _storage_error("create", path, 0, offset, error) from error
    file = ArchiveFile(path, descriptor, records, deferred)
    try:
        for record, content in zip(records, contents.values(), strict=True):
            if isinstance(content, bytes):
                file._append(record, memoryview(content))
            elif isinstance(content, torch.UntypedStorage) and content.nbytes():
                file._kept.append((record, content))
        if not keeps:
            file.write_kept()
    except BaseException:
        file.discard()
        raise
    return file


def make_durable(path: str) -> None:
    """Returns when the contents of a file, or the names in a folder, outlive a power failure; at once where the file
    system cannot tell, and for a folder that may be written to and not read.

    Raises:
        StorageError: they do not.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except PermissionError:
        return
    except OSError as error:
        raise _storage_error("open", path, 0, 0, error) from error
    try:
        _sync(descriptor, path)
    finally:
        os.close(descriptor)


def _sync(descriptor: int, path: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise _storage_error("fsync", path, 0, 0, error) from error


# The object


def _pickle(obj: Any) -> _Structure:
    """The object as ``torch.save`` pickles it: storages are replaced by their type, number, place and length."""
    structure = _Structure()
    numbers: dict[int, str] = {}
    kinds: dict[str, Any] = {}
    empties: dict[tuple[torch.dtype, torch.device], _EmptyStorage] = {}

    def numbered(storage: torch.UntypedStorage | DeferredTensor, identity: int, kind: Any) -> str:
        number = numbers.setdefault(identity, str(len(numbers)))
        structure.storages[number] = storage  # which keeps the identity from being given to another
        if kinds.setdefault(number, kind) is not kind and _nbytes_of(storage):
            raise TenCacheError(
                f"tensors that share their memory as {kinds[number].__name__} and {kind.__name__} cannot be saved in "
                "one file: clone one of them"
            )
        return number

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            if not isinstance(item, _STORAGES):  # asked of every object there is, so one test for most
                return None
            storage: Any
            if isinstance(item, _EmptyStorage):
                return item.reference
            if isinstance(item, _DeferredStorage):
                tensor, kind = item.tensor, _storage_type(item.tensor.dtype)
                numel = tensor.nbytes if kind is torch.UntypedStorage else tensor.numel
                return ("storage", kind, numbered(tensor, id(tensor), kind), "cpu", numel)
            if isinstance(item, torch.storage.TypedStorage):
                storage, kind, numel = item._untyped_storage, getattr(torch, item._pickle_storage_type()), item._size()
            else:
                storage, kind, numel = item, getattr(torch, type(item).__name__), item.nbytes()
            place = torch.serialization.location_tag(storage)
            return ("storage", kind, numbered(storage, storage._cdata, kind), place, numel)

        def reducer_override(self, item: Any) -> Any:
            # torch's own way takes 15 us for each, 3 ms of a call that training waits for.
            if type(item) is not torch.Tensor or item.numel() or not _is_plain(item):
                return NotImplemented
            like = item.dtype, item.device
            if like not in empties:
                storage, kind = item.untyped_storage(), _storage_type(item.dtype)
                place = torch.serialization.location_tag(storage)
                empties[like] = _EmptyStorage(("storage", kind, numbered(storage, storage._cdata, kind), place, 0))
            hooks: collections.OrderedDict[str, Any] = collections.OrderedDict()
            return torch._utils._rebuild_tensor_v2, (empties[like], 0, tuple(item.shape), item.stride(), False, hooks)

    target = io.BytesIO()
    Pickler(target, protocol=PICKLE_PROTOCOL).dump(obj)
    structure.pickled = target.getvalue()
    return structure


def _is_plain(empty_tensor: torch.Tensor) -> bool:
    """Whether the structure, dtype and place of a tensor without elements are all there is to it."""
    return (
        empty_tensor.device.type in ("cpu", "cuda")
        and empty_tensor.layout is torch.strided
        and not (empty_tensor.requires_grad or empty_tensor.is_quantized or empty_tensor.is_nested)
        and not empty_tensor.__dict__
        and empty_tensor.untyped_storage().nbytes() == 0
        and _storage_type(empty_tensor.dtype) is not torch.UntypedStorage
    )


@functools.cache
def _storage_type(dtype: torch.dtype) -> Any:
    """The class by which a file names storages of a dtype; those of newer dtypes, as of 8-bit floats, are untyped."""
    try:
        return getattr(torch, empty(0, dtype)._typed_storage()._pickle_storage_type())
    except KeyError:
        return torch.UntypedStorage


def _nbytes_of(content: bytes | torch.UntypedStorage | DeferredTensor) -> int:
    if isinstance(content, bytes):
        return len(content)
    return content.nbytes if isinstance(content, DeferredTensor) else content.nbytes()


def _bytes_of(data: torch.Tensor) -> memoryview:
    return data.detach().view(torch.uint8).numpy().data


def _bytes_of_storage(storage: torch.UntypedStorage) -> memoryview:
    return _bytes_of(empty(0, torch.uint8).set_(storage.cpu()))


# The archive (PKWARE's APPNOTE 4.3.7 to 4.3.16; records are stored, never compressed)


def _aligned(offset: int) -> int:
    return -(-offset // STORAGE_ALIGNMENT_NBYTES) * STORAGE_ALIGNMENT_NBYTES


def _local_header(record: _Record) -> bytes:
    large = record.nbytes >= _ZIP64_LIMIT
    extra = struct.pack("<HHQQ", 1, 16, record.nbytes, record.nbytes) if large else b""
    length = 30 + len(record.name) + len(extra) + 4  # the padding has its own header
    padding = max(record.data_offset - record.header_offset - length, 0)
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    nbytes = _ZIP64_LIMIT if large else record.nbytes
    return (
        struct.pack(
            "<4s5H3L2H", b"PK\3\4", 45 if large else 20, 0, 0, 0, _FIRST_OF_JANUARY_1980, record.crc, nbytes, nbytes,
            len(record.name), len(extra),
        )
        + record.name
        + extra
    )  # fmt: skip


def _directory(records: list[_Record]) -> bytes:
    """The central directory and the end of the archive."""
    entries = []
    for record in records:
        wide = [record.nbytes] * 2 if record.nbytes >= _ZIP64_LIMIT else []
        wide += [record.header_offset] if record.header_offset >= _ZIP64_LIMIT else []
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        nbytes, offset = min(record.nbytes, _ZIP64_LIMIT), min(record.header_offset, _ZIP64_LIMIT)
        version = 45 if wide else 20
        entries.append(
            struct.pack(
                "<4s6H3L5H2L", b"PK\1\2", version, version, 0, 0, 0, _FIRST_OF_JANUARY_1980, record.crc, nbytes, nbytes,
                len(record.name), len(extra), 0, 0, 0, 0, offset,
            )
            + record.name
            + extra
        )  # fmt: skip
    directory = b"".join(entries)
    start, count = records[-1].data_offset + records[-1].nbytes, len(records)
    end = b""
    if start >= _ZIP64_LIMIT or count >= 0xFFFF:
        end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
        end += struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
    count, start = min(count, 0xFFFF), min(start, _ZIP64_LIMIT)
    return directory + end + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(directory), start, 0)


def _storage_error(operation: str, path: str, offset: int, nbytes: int, error: OSError) -> StorageError:
    kind = SpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    cause = os.strerror(error.errno) if error.errno else str(error)
    return kind(operation, path, offset, nbytes, cause, errno=error.errno, tag="a checkpoint")
