# SPDX-License-Identifier: Apache-2.0
"""Limits of a process on threads, files and memory: their current values, and how a user raises them. Any thread."""

from __future__ import annotations

import contextlib
import errno
import resource
import threading
from collections.abc import Sequence

from tencache_ds.errors import ProcessLimitError


def limit(which: int) -> str:
    """The soft limit that ``ulimit`` shows, of one of :mod:`resource`'s ``RLIMIT_``; ``"unlimited"`` where none is."""
    soft, _ = resource.getrlimit(which)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def remedy(number: int | None) -> str:
    """The remedy for an errno caused by a limit of the process, as the end of a sentence; else an empty string."""
    if number == errno.EMFILE:
        return f": too many files are open in this process; raise the limit with `ulimit -n` (now {_files()})"
    if number == errno.ENFILE:
        return ": too many files are open on this host; raise the limit with `sysctl -w fs.file-max=…`"
    return ""


def _files() -> str:
    return limit(resource.RLIMIT_NOFILE)


def start_threads(threads: Sequence[threading.Thread], purpose: str) -> None:
    """Starts all of them.

    Args:
        threads: not started yet. Those that could be are left running: the caller ends them.
        purpose: their purpose, in the plural.

    Raises:
        ProcessLimitError: one could not be started.
    """
    for n_started, thread in enumerate(threads):
        try:
            thread.start()
        except RuntimeError as error:
            raise too_few_threads(f"{n_started} of {len(threads)} {purpose}", error) from error


def too_few_threads(started: str, error: Exception) -> ProcessLimitError:
    """The error of a thread that could not be started.

    Args:
        started: the number started, the total and their purpose.
        error: the exception raised.
    """
    limits = f"`ulimit -u` (now {limit(resource.RLIMIT_NPROC)})"
    if limit(resource.RLIMIT_AS) != "unlimited":
        limits += f" or `ulimit -v` (now {limit(resource.RLIMIT_AS)} bytes, of which each thread's stack takes a part)"
    with contextlib.suppress(OSError), open("/sys/fs/cgroup/pids.max", encoding="utf-8") as file:
        limits += f", or the container's limit (pids.max, now {file.read().strip()})"
    return ProcessLimitError(f'only {started} could be started: {error}. Raise {limits}, or lower "tencache.io_lanes".')
