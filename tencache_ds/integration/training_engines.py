# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed engines of this process that train: what an engine beside them takes of the GPU's idle memory, their
next backward pass may need."""

from __future__ import annotations

import weakref
from typing import Any

from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def note(engine: Any, configured: Any) -> None:
    """A DeepSpeed engine has been configured for ZeRO.

    Args:
        engine: the ``DeepSpeedEngine``.
        configured: its ZeRO optimizer; or the bare offload of one that does not train, which does not count.
    """
    if not isinstance(configured, DeepSpeedZeRoOffload):
        _engines.add(engine)


def exist() -> bool:
    """Whether there is one. Engines of stock DeepSpeed count as long as they are referred to."""
    return any(not _is_destroyed(engine) for engine in _engines)


def _is_destroyed(engine: Any) -> bool:
    session = getattr(engine.optimizer, "tencache", None)
    return session is not None and bool(session.closed)
