# SPDX-License-Identifier: Apache-2.0
"""Messages shown to the user exactly once, whatever levels, handlers and filters a framework gives to loggers.

They are printed, not logged: DeepSpeed's logger hides INFO by default, and its level alone does not tell whether
anything is written. transformers, for one, sets the logger to INFO and leaves DeepSpeed's handler at WARNING.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref

from deepspeed import comm as dist

from tencache_ds.config import Log, TenCacheConfig
from tencache_ds.observability.counters import Stats
from tencache_ds.observability.summary import summary
from tencache_ds.runtime.session import Session

_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
"""Sessions whose summary has not been printed yet."""

_pid = os.getpid()


def announce(message: str, options: TenCacheConfig) -> None:
    """Prints the message on rank 0, unless ``log`` is ``quiet``."""
    if options.log == Log.normal and dist.get_rank() == 0:
        _say(message)


def announce_summary_at_end(session: Session) -> None:
    """Prints a summary of the run on rank 0 when the engine is destroyed, or else when the process ends."""
    if session.options.log == Log.normal and session.surroundings.rank == 0:
        session.before_close = _say_summary
        _open_sessions.add(session)


@atexit.register
def _say_what_is_left() -> None:
    if os.getpid() != _pid:
        return
    for session in list(_open_sessions):
        if not session.closed:
            _say_summary(session.stats())


def _say_summary(stats: Stats) -> None:
    for line in summary(stats):
        _say(f"TenCache: {line}")


def _say(message: str) -> None:
    # A closed stream or a terminal that is gone must not end the training, no more than it does for a logger.
    with contextlib.suppress(OSError, ValueError):
        print(message, flush=True)
