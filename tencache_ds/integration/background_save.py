# SPDX-License-Identifier: Apache-2.0
"""The end of a checkpoint that is written in the background.

[Note: in the background] Optimizer state changes in an update only. The thread of updates, once it is done with the one
before ``save_checkpoint``, copies it to spare host memory; the next update, and whatever else needs the state, waits
for the rest of that. Another
thread writes the copies. Where memory does not suffice, the copies wait for the drive, and the update with them. The
files have the contents of a checkpoint that is written at once.

Ranks then meet in the store of the process group, which takes no collective and no part of the training thread: when
all have written their files, these get their names, and when all have named them, ``latest`` moves. If one cannot,
nothing is left of the checkpoint. A process that dies leaves ``.partial`` files, and ``latest`` as it was.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.errors import add_note
from tencache_ds.integration.agreement import JobVotes
from tencache_ds.integration.checkpoint_files import NOT_SAVED, CheckpointFiles, not_saved
from tencache_ds.io.archive_writer import ArchiveWriter, CopyBuffers
from tencache_ds.io.torch_archive import ArchiveFile, DeferredTensor

logger = logging.getLogger("DeepSpeed.tencache")

_WRITTEN = "the files of a checkpoint"
_NAMED = "the names of a checkpoint's files"
_MOVED = "the end of a checkpoint"
_LEFT = "the end of a checkpoint on the other ranks"
"""Where the ranks meet."""


Visit = Callable[[int, Mapping[str, torch.Tensor]], None]
"""Gets elements of kinds of state of a sub-group, those of each kind in ascending order."""


@dataclass(frozen=True, slots=True)
class StateKey:
    """One kind of state of a sub-group, as the key of a :class:`DeferredTensor`."""

    sub_group: int
    kind: str


def write_state(
    scan: Callable[[Visit], None],
    files: Sequence[ArchiveFile],
    write: Callable[[ArchiveFile, DeferredTensor, torch.Tensor], None],
) -> None:
    """Writes the optimizer state that files defer, reading each byte once.

    Args:
        scan: shows everything once.
        files: that have been begun.
        write: appends a view to a deferred tensor of a file.
    """

    def visit(sub_group: int, views: Mapping[str, torch.Tensor]) -> None:
        for kind, view in views.items():
            for file in files:
                tensor = file.deferred.get(StateKey(sub_group, kind))
                if tensor is not None:
                    write(file, tensor, view)

    if any(isinstance(key, StateKey) for file in files for key in file.deferred):
        scan(visit)


class BackgroundSave:
    """A checkpoint on this rank whose files have been begun, and lack optimizer state.

    Args:
        tag: of the checkpoint.
        archives: the files.
        names: their names.
        votes: of the ranks, of saves alone.
        buffers: for copies of state.
        check: raises :class:`VoidStepError` if the update failed that the state is saved behind.
        drive_in_use: whether steps use the drive, as :class:`ArchiveWriter` asks.
    """

    _under_way: weakref.WeakSet[BackgroundSave] = weakref.WeakSet()

    def __init__(
        self,
        tag: str,
        archives: list[ArchiveFile],
        names: CheckpointFiles,
        votes: JobVotes,
        buffers: CopyBuffers,
        check: Callable[[], None],
        drive_in_use: Callable[[float], bool],
    ) -> None:
        self._tag = tag
        self._archives = archives
        self._names = names
        self._votes = votes
        self._check = check
        self._error: BaseException | None = None
        self._changed: Any = None  # when the device has done what has changed the state
        if not get_accelerator().is_synchronized_device():
            self._changed = get_accelerator().Event()
            self._changed.record()
        self._has_store = dist.get_rank() == 0  # asked now: at the end of the process there may be no group
        try:
            self._writer = ArchiveWriter(archives, buffers, self._written, drive_in_use)
        except BaseException:
            votes.failed(_WRITTEN)
            raise
        self._under_way.add(self)

    @classmethod
    def wait_for_all(cls) -> None:
        """Returns when nothing is being saved by this process. An error has been logged."""
        for save in list(cls._under_way):
            save.wait()

    def stage(self, scan: Callable[[Visit], None]) -> None:
        """Copies the state that the files lack; once, by the thread that has the state to itself.

        Args:
            scan: shows all of it once.
        """
        try:
            self._check()
            if self._changed is not None:
                self._changed.synchronize()  # this thread's stream need not be the one of the update
            write_state(scan, self._archives, self._writer.write)
        except BaseException as error:
            self._writer.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._writer.end()

    def fail(self, error: BaseException) -> None:
        """Instead of :meth:`stage`."""
        self._writer.fail(error)

    def wait(self) -> None:
        """Returns when the checkpoint is complete, or has failed."""
        self._writer.join()

    def finish(self) -> None:
        """:meth:`wait`, and tells of an error, once.

        Raises:
            StorageError, TenCacheError: the checkpoint is not there.
        """
        self.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # On the writing thread

    def _written(self, error: BaseException | None) -> None:
        try:
            with self._together(_WRITTEN):
                if error is not None:
                    raise error
            with self._together(_NAMED):
                self._names.name()
            self._move_latest()
        except BaseException as raised:
            self._error = raised
            logger.error("the checkpoint %s was not saved: %s", self._tag, raised)
        finally:
            self._names.discard()
            self._under_way.discard(self)

    def _move_latest(self) -> None:
        """No rank goes on before ``latest`` has moved, and rank 0, whose process has the store, before the others have
        heard of it."""
        self._names.move_latest()
        self._votes.passed(_MOVED)
        if self._has_store:
            self._votes.passed(_LEFT)
        else:
            self._votes.leaves(_LEFT)

    @contextlib.contextmanager
    def _together(self, point: str) -> Iterator[None]:
        """A part that succeeds on every rank, or fails on every rank."""
        try:
            yield
        except BaseException as error:
            self._votes.failed(point)
            add_note(error, NOT_SAVED)
            raise
        failed = self._votes.passed(point)
        if failed:
            raise not_saved(failed)
