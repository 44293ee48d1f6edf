# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint on this rank, and the end of one that is written in the background.

[Note: names] Files get their names when every rank has written its own. Until then they end in :data:`PARTIAL`, and so
does what becomes ``latest``.

Where each node holds the files of its own ranks, DeepSpeed writes ``latest`` on the first rank's node only, even with
``"use_node_local_storage": true``. At a resume the ranks of the other nodes find none: they return from
``load_checkpoint`` and train on with their initial weights, while the first node's ranks are in the collectives of the
load. Here ``latest`` is written on every node, and ranks that are about to load different checkpoints raise an error
instead.

[Note: in the background] Optimizer state changes in an update only. The thread of updates, once it is done with the one
before ``save_checkpoint``, copies it to spare host memory; the next update, and whatever else needs the state, waits
for the rest of that. Another thread writes the copies. Where memory does not suffice, the copies wait for the drive,
and the update with them. The files have the contents of a checkpoint that is written at once.

Ranks then meet in the store of the process group, which takes no collective and no part of the training thread: when
all have written their files, these get their names, and when all have named them, ``latest`` moves. If one cannot,
nothing is left of the checkpoint. A process that dies leaves ``.partial`` files, and ``latest`` as it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from tencache_ds.errors import AgreementError, CheckpointError, add_note, named_ranks
from tencache_ds.integration.agreement import Agreement, JobVotes, Post, difference
from tencache_ds.io.archive_writer import ArchiveWriter, CopyBuffers, Write
from tencache_ds.io.torch_archive import ArchiveFile, make_durable

logger = logging.getLogger("DeepSpeed.tencache")

PARTIAL = ".partial"
"""Ends the name of a file of a checkpoint that is not complete on every rank."""

LATEST = "latest"


class CheckpointFiles:
    """Names of files, without their contents. One thread at a time."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._late: list[Callable[[], None]] = []
        self._latest = ""
        self._folders: set[str] = set()  # with new names in them

    def add(self, path: str) -> str:
        """A file of the checkpoint; the name under which it is to be written."""
        self._paths.append(path)
        return path + PARTIAL

    def add_late(self, write: Callable[[], None]) -> None:
        """Something beside the files: :meth:`name` writes it."""
        self._late.append(write)

    def note_folder(self, path: str) -> None:
        """A folder with new names in it."""
        self._folders.add(path)

    def prepare_latest(self, path: str, tag: str) -> None:
        """Writes what becomes ``latest``, while a full drive is an error of all ranks."""
        self._latest = path
        with open(path + PARTIAL, "w", encoding="utf-8") as file:
            file.write(tag)

    def name(self) -> None:
        """Gives the files but ``latest`` their names, durably, and makes its contents durable, too.

        Raises:
            OSError: that is not possible.
        """
        while self._late:
            self._late.pop()()
        if self._latest:  # not when it is written: a drive that is busy with state takes 0.2 s
            make_durable(self._latest + PARTIAL)
        while self._paths:
            os.replace(self._paths[-1] + PARTIAL, self._paths[-1])
            self._folders.add(os.path.dirname(self._paths.pop()))
        for folder in self._folders:
            make_durable(folder)

    def move_latest(self) -> None:
        """``latest`` names this checkpoint from now on, on the ranks that have prepared it. When all ranks have
        everything, either checkpoint would be a good one: an error is none that the other ranks would have to hear of.
        """
        if self._latest:
            path, self._latest = self._latest, ""
            try:
                os.replace(path + PARTIAL, path)
                make_durable(os.path.dirname(path))
            except OSError as error:
                logger.warning('the checkpoint was saved, but "latest" may name the previous one: %s', error)

    def discard(self) -> None:
        """Removes whatever has not got its name; nothing is left of a complete checkpoint."""
        for path in (*self._paths, *([self._latest] if self._latest else [])):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + PARTIAL)
        self._paths, self._latest = [], ""


def not_saved(ranks: Sequence[int]) -> CheckpointError:
    """Other ranks could not write their files."""
    return CheckpointError(
        f"the checkpoint was not saved: {named_ranks(ranks)} could not write their part; see the error there. "
        '"latest" still names the previous checkpoint, and training can continue from here'
    )


NOT_SAVED = 'The checkpoint was not saved; "latest" still names the previous one.'
"""Note of an error on the rank that has it."""


def agree_on_checkpoint(engine: Any, folder: str, tag: str | None) -> None:
    """Compares what each rank is about to load. Collective.

    Args:
        engine: of DeepSpeed.
        folder: of the checkpoints.
        tag: of the checkpoint; None for the one that ``latest`` names.

    Raises:
        AgreementError: the ranks would load different ones, or some of them none.
    """
    name = f"{LATEST}_universal" if engine.load_universal_checkpoint() else LATEST
    path = os.path.join(folder, name)
    found = f"tag {tag!r}" if tag is not None else _named_by(path)

    def same(posts: Sequence[Post]) -> None:
        found = [post.value for post in posts]
        if len(set(found)) > 1:
            raise AgreementError(
                f"{difference('the checkpoint to load', found, posts)}. Nothing was loaded. Pass the tag to "
                f'load_checkpoint, or copy "{name}" to the nodes where it is missing or names another one. With '
                '"checkpoint": {"use_node_local_storage": true} in the config, every node gets its own at each save.'
            )

    Agreement.of_job().reach("the checkpoint to load", found, same)


def latest_of(engine: Any, folder: str) -> str | None:
    """Path of the ``latest`` that this rank writes, for the job or for its node; None where another rank does."""
    first_of_node = engine.use_node_local_storage() and engine.local_rank == 0
    return os.path.join(folder, LATEST) if first_of_node or dist.get_rank() == 0 else None


def _named_by(path: str) -> str:
    """What a ``latest`` says, for messages; where it cannot be read, why: the other ranks wait for an answer."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return f"tag {file.read().strip()!r}"
    except FileNotFoundError:
        return f"none, because {path} is not there"
    except OSError as error:
        return f"none, because {path} cannot be read ({error.strerror})"


_WRITTEN = "the files of a checkpoint"
_NAMED = "the names of a checkpoint's files"
_MOVED = "the end of a checkpoint"
_LEFT = "the end of a checkpoint on the other ranks"
"""Where the ranks meet."""


@functools.cache
def _stream_beside_passes() -> Any:
    """For copies of state in device memory: on the stream of passes, these would wait for them. One for all saves,
    since torch keeps memory for each."""
    return get_accelerator().Stream()


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
    write: Write,
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
        self._stream: Any = None
        if not get_accelerator().is_synchronized_device():
            self._changed = get_accelerator().Event()
            self._changed.record()
            self._stream = _stream_beside_passes()
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
                self._changed.synchronize()
            with get_accelerator().stream(self._stream):
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
