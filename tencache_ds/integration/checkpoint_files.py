# SPDX-License-Identifier: Apache-2.0
"""The files of one checkpoint on this rank, which get their names when every rank has written its own.

Until then they end in :data:`PARTIAL`, and so does what becomes ``latest``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

from tencache_ds.errors import CheckpointError, named_ranks
from tencache_ds.io.torch_archive import make_durable

logger = logging.getLogger("DeepSpeed.tencache")

PARTIAL = ".partial"
"""Ends the name of a file of a checkpoint that is not complete on every rank."""


class CheckpointFiles:
    """Names of files, without their contents. One thread at a time."""

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._latest = ""
        self._folders: set[str] = set()  # with new names in them

    def add(self, path: str) -> str:
        """A file of the checkpoint; the name under which it is to be written."""
        self._paths.append(path)
        return path + PARTIAL

    def note_folder(self, path: str) -> None:
        """A folder with new names in it."""
        self._folders.add(path)

    def prepare_latest(self, path: str, tag: str) -> None:
        """Writes what becomes ``latest``, while a full drive is an error of all ranks."""
        self._latest = path
        with open(path + PARTIAL, "w", encoding="utf-8") as file:
            file.write(tag)
        make_durable(path + PARTIAL)

    def name(self) -> None:
        """Gives the files their names, durably.

        Raises:
            OSError: that is not possible.
        """
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
