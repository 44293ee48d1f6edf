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
    import os

    from tencache_ds.integration.release import ReleasedMemory
    from tencache_ds.observability.counters import Stats

__version__ = "0.1.0"
__all__ = ["__version__", "release_gpu_memory", "stats", "trace", "wait_for_checkpoint"]


def stats(engine: Any, *, wait: bool = True) -> Stats:
    """Counters of the TenCache engine behind a DeepSpeed engine.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        wait: for the end of an optimizer step that continues behind the training. After every step that takes away what
            ``overlap_step`` gains; with False, what such a step does until its end is not in the counters yet.

    Returns:
        A frozen snapshot: totals since the start and the figures of the last optimizer step.

    Raises:
        ValueError: this DeepSpeed engine does not run with TenCache.
    """
    from tencache_ds.integration.activation import engine_of

    session = engine_of(engine)
    return session.stats() if wait else session.look()


def trace(engine: Any, path: str | os.PathLike[str], steps: int = 2) -> None:
    """Records whole optimizer steps of this rank into a file that Perfetto (https://ui.perfetto.dev) opens and
    ``tencache trace --summary`` summarizes. Returns at once; the file is written when the steps are over. From outside,
    and for all ranks of a host in one file: ``tencache trace``.

    Args:
        engine: what ``deepspeed.initialize`` returned first.
        path: the file; ``{rank}`` in it is replaced by this process's rank. An existing file is replaced.
        steps: how many, beginning when the step under way is over.

    Raises:
        TenCacheError: another trace of this process is being recorded.
        ValueError: this DeepSpeed engine does not run with TenCache, there is no such folder, or no step is asked for.
    """
    from tencache_ds.integration.activation import engine_of
    from tencache_ds.integration.reporting import trace_to_file

    trace_to_file(engine_of(engine), path, steps)


def release_gpu_memory(engine: Any) -> ReleasedMemory:
    """Hands back all GPU memory in which TenCache keeps weights, gradients and optimizer state of an engine, and
    DeepSpeed's buffer of gradients, for as long as something else needs it. Between two micro-steps, on every rank at
    the same time. Not a bit of the training changes.

    Args:
        engine: what ``deepspeed.initialize`` returned first.

    Returns:
        An object with the bytes that have left (``nbytes``), whose ``take_again()``, or whose end as a context manager,
        has the engine use GPU memory again. ``engine.offload_states()`` and ``engine.reload_states()`` do the same.

    Raises:
        ValueError: this DeepSpeed engine does not run with TenCache, or its config has no ``offload_optimizer``.
        MemoryLimitError, StorageError: what is there has nowhere to go.
    """
    from tencache_ds.integration.activation import engine_of

    engine_of(engine)
    from tencache_ds.integration.release import ReleasedMemory

    return ReleasedMemory(engine)


def wait_for_checkpoint(engine: Any) -> None:
    """Returns when the last checkpoint of an engine is complete and ``latest`` names it. Needed with ``"checkpoint":
    "async"`` only, before something else reads the files.

    Args:
        engine: what ``deepspeed.initialize`` returned first.

    Raises:
        ValueError: this DeepSpeed engine does not run with TenCache.
        StorageError, CheckpointError: the checkpoint is not there; ``latest`` still names the previous one.
    """
    from tencache_ds.integration.activation import engine_of

    engine_of(engine)
    from tencache_ds.integration.checkpoint import CheckpointMixin

    if isinstance(engine.optimizer, CheckpointMixin):  # else it is one for inference
        engine.optimizer.finish_save()


_autoload.install()
