# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed engines of this process: one that takes idle GPU memory between its passes may take what another one's
next pass needs."""

from __future__ import annotations

import weakref
from typing import Any

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def note(engine: Any) -> None:
    """A ``DeepSpeedEngine`` has been configured for ZeRO."""
    _engines.add(engine)


def beside(engine: Any) -> bool:
    """Whether there is another one. Those of stock DeepSpeed, which cannot be asked, count as long as they are
    referred to."""
    return any(other is not engine and not _is_destroyed(other) for other in _engines)


def _is_destroyed(engine: Any) -> bool:
    session = getattr(getattr(engine, "optimizer", None), "tencache", None)
    return session is not None and bool(session.closed)
