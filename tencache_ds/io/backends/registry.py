# SPDX-License-Identifier: Apache-2.0
"""The backends for host memory, their requirements, and the choice of ``"io_backend": "auto"``.

A new one is a module in this package and an entry in :data:`BACKENDS`. The values of the option are
:class:`tencache_ds.config.IoBackend`, the type that users see; a test compares the two. The backend for reads into GPU
memory is chosen by a different option (:mod:`tencache_ds.runtime.gpu_staging`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tencache_ds.errors import ConfigError
from tencache_ds.io.backends.aio import AioBackend
from tencache_ds.io.backends.native import NativeBackend
from tencache_ds.io.backends.posix import PosixBackend
from tencache_ds.io.backends.protocol import StorageBackend

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The parameters of a backend. Each uses those that apply to it.

    Attributes:
        buffers_are_pinned: the buffers will be page-locked by torch or by DeepSpeed's pin manager.
        n_lanes: threads.
        request_nbytes: longest piece in bytes.
        block_nbytes: size of one kernel request in bytes.
        queue_depth: kernel requests in flight per lane.
        single_submit: see DeepSpeed's ``aio.single_submit``.
        overlap_events: see DeepSpeed's ``aio.overlap_events``.
        close_timeout_s: longest time in seconds that closing waits for a device that hangs.
    """

    buffers_are_pinned: bool
    n_lanes: int = 8
    request_nbytes: int = 8 << 20
    block_nbytes: int = 1 << 20
    queue_depth: int = 32
    single_submit: bool = False
    overlap_events: bool = True
    close_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One backend.

    Attributes:
        name: value of the option, and name of the backend.
        open: gives a new one; raises ConfigError where it cannot work.
        in_blocks: the kernel gets its requests in blocks, so that ``block_nbytes`` and ``queue_depth`` count.
        pinned_only: it would have to copy buffers that are not pinned, for which ``"auto"`` passes it over.
        reason: logged when ``"auto"`` selects this one; "" for one that works everywhere.
    """

    name: str
    open: Callable[[BackendSettings], StorageBackend]
    in_blocks: bool = False
    pinned_only: bool = False
    reason: str = ""


def _native(settings: BackendSettings) -> StorageBackend:
    block_nbytes = min(settings.block_nbytes, settings.request_nbytes)
    return NativeBackend(settings.n_lanes, block_nbytes, settings.queue_depth, close_timeout_s=settings.close_timeout_s)


def _aio(settings: BackendSettings) -> StorageBackend:
    return AioBackend(
        settings.n_lanes,
        settings.request_nbytes,
        settings.block_nbytes,
        settings.queue_depth,
        settings.single_submit,
        settings.overlap_events,
        close_timeout_s=settings.close_timeout_s,
    )


def _posix(settings: BackendSettings) -> StorageBackend:
    return PosixBackend(settings.n_lanes, settings.request_nbytes, close_timeout_s=settings.close_timeout_s)


BACKENDS: dict[str, BackendEntry] = {
    entry.name: entry
    for entry in (
        BackendEntry("native", _native, in_blocks=True, reason="the native op loads"),
        BackendEntry(
            "aio",
            _aio,
            in_blocks=True,
            pinned_only=True,
            reason="DeepSpeed's async_io op loads and the buffers are pinned",
        ),
        BackendEntry("posix", _posix),
    )
}
"""By name, the best first. The last one works everywhere: a failure to open it is an error."""


def open_backend(kind: str, settings: BackendSettings) -> tuple[StorageBackend, str]:
    """Opens the requested backend, or the best one that works here.

    Args:
        kind: a name of :data:`BACKENDS`, or ``"auto"``.
        settings: of whichever it will be.

    Returns:
        The backend, and the reason for the choice.

    Raises:
        ConfigError: an unknown kind, or the requested one does not work here.
    """
    if kind in BACKENDS:
        return BACKENDS[kind].open(settings), "asked for"
    if kind != AUTO:
        *names, last = (f'"{name}"' for name in (AUTO, *BACKENDS))
        raise ConfigError(f"io_backend must be {', '.join(names)} or {last}, not {kind!r}")
    *preferred, fallback = BACKENDS.values()
    reasons = []
    for entry in preferred:
        if entry.pinned_only and not settings.buffers_are_pinned:
            reasons.append(f"the buffers are not pinned, which {entry.name} would have to copy")
            continue
        try:
            return entry.open(settings), "; ".join([*reasons, entry.reason])
        except ConfigError as error:
            reasons.append(f"{entry.name} does not work here: {error}")
    return fallback.open(settings), "; ".join(reasons)


def may_need_pinned_buffers(kind: str) -> bool:
    """Whether this backend, or one that ``"auto"`` may take, would have to copy buffers that are not pinned."""
    return any(entry.pinned_only for entry in BACKENDS.values() if kind in (AUTO, entry.name))
