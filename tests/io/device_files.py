# SPDX-License-Identifier: Apache-2.0
"""A device file as KvikIO opens it, but on ordinary memory: for the tests of GDS that need no GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PlainDeviceFile:
    """Says what ``kvikio.CuFile`` says, in its words. Does what KvikIO does without the driver unless told otherwise.

    Attributes:
        longest: most bytes that one call moves.
        short_at_end: a read past the end is short, as with the driver, and raises no error.
        failing: text of the error that every transfer raises, or "".
        n_open: files open now.
        n_opened: files opened so far, by mode.
        wrong: bytes come back changed.
    """

    longest = 1 << 40
    short_at_end = False
    failing = ""
    wrong = False
    n_open = 0
    n_opened: dict[str, int] = {}

    def __init__(self, path: str, mode: str) -> None:
        kind = type(self)
        self._fd = os.open(path, {"r": os.O_RDONLY, "r+": os.O_RDWR}[mode])
        kind.n_open += 1
        kind.n_opened[mode] = kind.n_opened.get(mode, 0) + 1

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        assert size == buf.numel()
        if self.failing:
            raise RuntimeError(self.failing)
        view = memoryview(buf.numpy())[: min(size, self.longest)]
        n = os.preadv(self._fd, [view], file_offset)
        if n < len(view) and not self.short_at_end:
            raise RuntimeError("KvikIO failure at: /src/posix_io.hpp:165: POSIX error on pread: EOF")
        if self.wrong:
            buf[0] ^= 1
        return n

    def raw_write(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        if self.failing:
            raise RuntimeError(self.failing)
        return os.pwritev(self._fd, [memoryview(buf.numpy())[: min(size, self.longest)]], file_offset)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        type(self).n_open -= 1
        os.close(self._fd)


@contextmanager
def new_kind(**attributes: object) -> Iterator[type[PlainDeviceFile]]:
    """A kind of device file with its own counts; none may be open at the end."""
    kind = type("DeviceFile", (PlainDeviceFile,), {"n_open": 0, "n_opened": {}, **attributes})
    yield kind
    assert kind.n_open == 0, "files are still open"
