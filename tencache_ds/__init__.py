# SPDX-License-Identifier: Apache-2.0
"""TenCache: an exact, profile-driven offload engine for DeepSpeed ZeRO-3.

Write ``"offload_engine": "tencache"`` in ``ds_config.json``; the training script stays unchanged. Importing this
package is one of three ways to activate it (the others: the entry point that torch loads automatically, and ``deepspeed
--module tencache_ds.run train.py``). The import is light: it loads neither torch nor DeepSpeed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tencache_ds import _autoload

if TYPE_CHECKING:
    from tencache_ds.observability.counters import Stats

__version__ = "0.1.0"
__all__ = ["__version__", "stats"]


def stats(engine: Any) -> Stats:
    """Counters of the TenCache engine behind a DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned first.

    Returns:
        A frozen snapshot: totals since the start and the figures of the last optimizer step.

    Raises:
        ValueError: this DeepSpeed engine does not run with TenCache.
    """
    from tencache_ds.integration.activation import engine_of

    return engine_of(engine).stats()


_autoload.install()
