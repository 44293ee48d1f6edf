# SPDX-License-Identifier: Apache-2.0
"""Named scratch files of earlier versions of TenCache: found and reported, never removed.

They are in ``<nvme_path>/tencache/<label>-<pid>-<8 hex>/rank<r>/``, with a lock in the folder above. A free lock says
nothing about jobs on other hosts, so only the user can decide whether to remove them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path

_logger = logging.getLogger("DeepSpeed.tencache.io")

_JOB = re.compile(r".+-\d+-[0-9a-f]{8}")
_RANK = re.compile(r"rank\d+")
_FILE = re.compile(r"(weights|optimizer)(-\d+)?\.bin|gds-trial\.bin")
_LOCK = "owner.lock"


def warn_of_former_leftovers(root: str) -> None:
    """Says in the log which ones there are, and how to remove them. Looks at this user's folders only."""
    abandoned = {folder: nbytes for folder in _jobs(Path(root)) if (nbytes := _nbytes_if_abandoned(folder)) is not None}
    if abandoned:
        _logger.warning(
            "%d scratch folder(s) left by an earlier version of TenCache hold %.3f GB. No process on this host uses "
            "them; make sure that no other host does, then free the space with: rm -r -- %s",
            len(abandoned),
            sum(abandoned.values()) / 1e9,
            " ".join(shlex.quote(str(folder)) for folder in abandoned),
        )


def _jobs(root: Path) -> list[Path]:
    parent = root.absolute() / "tencache"
    try:
        if parent.is_symlink():
            return []
        return sorted(parent / name for name in os.listdir(parent) if _JOB.fullmatch(name))
    except OSError:  # none, or none that this user may see
        return []


def _nbytes_if_abandoned(job: Path) -> int | None:
    """Bytes of a folder that holds only TenCache's files and whose lock is free; else None."""
    try:
        if not (_is(stat.S_ISDIR, job) and _is(stat.S_ISREG, job / _LOCK)):
            return None
        nbytes = 0
        for rank in job.iterdir():
            if rank.name == _LOCK:
                continue
            if not (_RANK.fullmatch(rank.name) and _is(stat.S_ISDIR, rank)):
                return None
            for file in rank.iterdir():
                if not (_FILE.fullmatch(file.name) and _is(stat.S_ISREG, file)):
                    return None
                nbytes += file.lstat().st_blocks * 512
        with open(job / _LOCK, "r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # locked, going away, or not this user's to look at
        return None
    return nbytes


def _is(kind: Callable[[int], bool], path: Path) -> bool:
    status = path.lstat()
    return kind(status.st_mode) and status.st_uid == os.geteuid()
