# SPDX-License-Identifier: Apache-2.0
"""Pieces of files as one contiguous tensor, without copying: how a checkpoint is written from scratch storage.

Chunks keep a sub-group's master weights and moments interleaved; DeepSpeed's checkpoint wants each of them whole.
Mapping the pieces next to each other gives ``torch.save`` a tensor that it streams through the page cache, so that
saving needs no host memory of its own. Mappings are private (copy on write): writing to such a tensor never changes
the files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from tencache_ds.errors import StorageError

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_pieces(pieces: Sequence[tuple[str, int, int]]) -> torch.Tensor:
    """One 1-D uint8 tensor over ``(path, offset, nbytes)`` pieces in order.

    Every offset, and every length but the last, must be a multiple of the page size. The files must not be written to
    through the same extents while the tensor lives. The mapping ends with the last tensor that uses it.

    Raises:
        ValueError: a piece is not page aligned.
        StorageError: a file cannot be opened or mapped.
    """
    page = mmap.PAGESIZE
    total = sum(nbytes for _, _, nbytes in pieces)
    if total == 0:
        return torch.empty(0, dtype=torch.uint8)
    for index, (path, offset, nbytes) in enumerate(pieces):
        if offset % page or (nbytes % page and index < len(pieces) - 1):
            raise ValueError(f"piece {index} ({path}, offset {offset}, {nbytes} bytes) is not page aligned")
    length = -(-total // page) * page
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base == _MAP_FAILED:
        number = ctypes.get_errno()
        raise StorageError("map", pieces[0][0], 0, total, os.strerror(number), errno=number)
    try:
        position = 0
        for path, offset, nbytes in pieces:
            _map_fixed(base + position, path, offset, nbytes)
            position += nbytes
    except BaseException:
        _libc.munmap(base, length)
        raise
    # The ctypes array is what the tensor keeps alive; the mapping goes when it does.
    array = (ctypes.c_uint8 * total).from_address(base)
    # Not at exit: the tensor may be read until the very end, and the process takes its mappings with it.
    weakref.finalize(array, _libc.munmap, base, length).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _map_fixed(address: int, path: str, offset: int, nbytes: int) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise StorageError("map", path, offset, nbytes, os.strerror(error.errno or 0), errno=error.errno) from error
    try:
        if offset + nbytes > os.fstat(descriptor).st_size:
            raise StorageError("map", path, offset, nbytes, "the file ends before the piece does")
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        result = _libc.mmap(address, nbytes, protection, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, offset)
        if result == _MAP_FAILED:
            number = ctypes.get_errno()
            raise StorageError("map", path, offset, nbytes, os.strerror(number), errno=number)
    finally:
        os.close(descriptor)
