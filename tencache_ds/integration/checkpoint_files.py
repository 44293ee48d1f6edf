# SPDX-License-Identifier: Apache-2.0
"""The files of one checkpoint on this rank: their names, and ``latest`` on drives of the nodes.

They get their names when every rank has written its own. Until then they end in :data:`PARTIAL`, and so does what
becomes ``latest``.

Where each node holds the files of its own ranks, DeepSpeed writes ``latest`` on the first rank's node only, even with
``"use_node_local_storage": true``. At a resume the ranks of the other nodes find none: they return from
``load_checkpoint`` and train on with their initial weights, while the first node's ranks are in the collectives of the
load. Here ``latest`` is written on every node, and ranks that are about to load different checkpoints raise an error
instead.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist

from tencache_ds.errors import AgreementError, CheckpointError, named_ranks
from tencache_ds.integration.agreement import Agreement, Post, difference
from tencache_ds.io.torch_archive import make_durable

logger = logging.getLogger("DeepSpeed.tencache")

PARTIAL = ".partial"
"""Ends the name of a file of a checkpoint that is not complete on every rank."""

LATEST = "latest"


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

    def name(self) -> None:
        """Gives the files but ``latest`` their names, durably, and makes its contents durable, too.

        Raises:
            OSError: that is not possible.
        """
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
