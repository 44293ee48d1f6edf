# SPDX-License-Identifier: Apache-2.0
"""Changing an extent where it lies: for storage in memory, where a caller's own ``pread`` and ``pwrite`` are as good as
a request, and its thread has the bytes in its cache afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from tencache_ds.errors import StorageError
from tencache_ds.io.extents import Extent
from tencache_ds.io.integrity.fingerprint import sampled_position
from tencache_ds.io.integrity.verification import corruption
from tencache_ds.io.integrity.witness import Witness
from tencache_ds.layout import PAGE_NBYTES


class ExtentEdit:
    """An extent that its caller changes in the file, page by page, and returns with :meth:`keep` or :meth:`drop`.
    Requests for it wait meanwhile.

    Args:
        extent: which one.
        fd: descriptor of the file.
        before: record of the last write.
        after: to become that of the change; None where nothing is compared.
        end: takes whether all of it was changed, and the error after which the bytes are undefined.
    """

    __slots__ = ("_after", "_before", "_end", "extent", "fd", "words_read", "words_written")

    def __init__(
        self,
        extent: Extent,
        fd: int,
        before: Witness | None,
        after: Witness | None,
        end: Callable[[bool, StorageError | None], None],
    ) -> None:
        self.extent = extent
        self.fd = fd
        self._before = before
        self._after = after
        self._end = end
        n_pages = 0 if before is None or after is None else extent.allocated_nbytes // PAGE_NBYTES
        self.words_read: np.ndarray = np.empty(n_pages, dtype=np.uint64)
        """To be filled in: of each page the word at :attr:`read_position`, as it was read. Empty: not wanted."""
        self.words_written: np.ndarray = np.empty(n_pages, dtype=np.uint64)
        """The same of what was written, at :attr:`written_position`."""

    @property
    def read_position(self) -> int:
        """Position of the word in each page, in 8 bytes."""
        return 0 if self._before is None else sampled_position(self._before.generation)

    @property
    def written_position(self) -> int:
        """Position of the word in each page, in 8 bytes."""
        return 0 if self._after is None else sampled_position(self._after.generation)

    def keep(self) -> None:
        """The extent is changed, all of it.

        Raises:
            CorruptionError: what was read is not what was last written; the extent is lost.
        """
        if self._before is not None and self._after is not None:
            if self._before.differs_in(self.words_read):
                error = corruption(
                    self.extent,
                    self.extent.allocated_nbytes,
                    f"the bytes are not those of write {self._before.generation + 1}: something else has changed the "
                    "file since; check that no other job uses this folder",
                )
                self.drop(error)
                raise error
            self._after.take_words(self.words_written)
        self._end(True, None)

    def drop(self, error: StorageError | None = None) -> None:
        """Nothing was changed; or, with the error that the caller raises, an unknown part: then reads of the extent
        fail with it until it is written."""
        self._end(False, error)

    def failed(self, code: int) -> StorageError:
        """The error of a transfer of the caller's that ended with this errno."""
        extent, reason = self.extent, os.strerror(code)
        return StorageError("edit", extent.file, extent.offset, extent.allocated_nbytes, reason, tag=extent.tag)
