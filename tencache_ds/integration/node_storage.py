# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on drives of the nodes, of which each holds the files of its own ranks.

DeepSpeed writes ``latest`` on the first rank's node only, even with ``"use_node_local_storage": true``. At a resume the
ranks of the other nodes find none: they return from ``load_checkpoint`` and train on with their initial weights, while
the first node's ranks are in the collectives of the load. Here ``latest`` is written on every node, and ranks that are
about to load different checkpoints raise an error instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from deepspeed import comm as dist

from tencache_ds.errors import AgreementError
from tencache_ds.integration.agreement import Agreement, Post, difference

LATEST = "latest"


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
