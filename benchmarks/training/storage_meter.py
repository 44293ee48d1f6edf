# SPDX-License-Identifier: Apache-2.0
"""The same counters for every configuration: bytes at the storage calls, and how long training threads were blocked in
them.

The counts and their sources:

- *Bytes*: every transfer through DeepSpeed's ``aio_handle`` (stock's swappers and TenCache's aio backend make theirs
  from the same class, which :meth:`StorageMeter.meter_handles` replaces by a subclass), and, for TenCache, every
  transfer through ``tencache_ds.io.backends.posix.PosixFiles``, which is its posix backend and the fallback of its aio
  backend, and every request of its native and gds backends, which have no handle. The bytes are those of the buffer. A
  call counts when it returns, an asynchronous one at its submission; a request of a backend when it is done.
- *Waits*: time that a training thread spends in a call of an ``aio_handle``: the main thread, or one that Python did
  not start, as autograd's are. Stock makes all its calls there: ``wait``, and submissions, which open the file.
  TenCache makes its calls in its own lanes, which are not training threads; its training threads are blocked in stalls
  instead (``tencache_ds.stats(engine).total.stall_seconds``, all causes: weight read, optimizer read, buffer,
  write-back), which :class:`.train_step.DeepSpeedTrainee` adds. On both sides this is the wall-clock time in which
  training threads were blocked on storage, without any background activity.

Metering adds one to ten microseconds per call. The GIL is released where the op itself releases it: the subclass calls
the op's own method.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

COUNTED = {
    **dict.fromkeys(("read", "pread", "sync_pread", "async_pread"), "read_nbytes"),
    **dict.fromkeys(("write", "pwrite", "sync_pwrite", "async_pwrite"), "write_nbytes"),
    "wait": "",
}
"""The methods of a handle that are metered, and which counter the bytes of their buffer go to."""


@dataclass(frozen=True, slots=True)
class StorageCounts:
    """Since the meter was made: bytes moved, and nanoseconds of training threads in ``aio_handle`` calls."""

    read_nbytes: int = 0
    write_nbytes: int = 0
    wait_ns: int = 0


class StorageMeter:
    """Counts the traffic of the storage calls of this process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = StorageCounts()

    def counts(self) -> StorageCounts:
        """Everything so far."""
        return self._counts

    def add(self, *, read_nbytes: int = 0, write_nbytes: int = 0, wait_ns: int = 0) -> None:
        """Counts one call."""
        with self._lock:
            so_far = self._counts
            self._counts = StorageCounts(
                so_far.read_nbytes + read_nbytes, so_far.write_nbytes + write_nbytes, so_far.wait_ns + wait_ns
            )

    def meter_handles(self, op: ModuleType) -> None:
        """Replaces ``aio_handle`` of the async_io op by a metered subclass: handles made from now on are counted.

        Args:
            op: what ``AsyncIOBuilder().load()`` returned; DeepSpeed keeps one module per process.

        Raises:
            RuntimeError: this DeepSpeed's handle lacks a method that is to be counted.
        """
        handle_class = op.aio_handle
        missing = [name for name in COUNTED if not hasattr(handle_class, name)]
        if missing:
            raise RuntimeError(
                f"DeepSpeed's {handle_class.__name__} has no {', '.join(missing)}: this benchmark counts in the "
                "methods of DeepSpeed 0.19; adapt benchmarks/training/storage_meter.py to this version"
            )
        methods = {name: self._metered(getattr(handle_class, name), counter) for name, counter in COUNTED.items()}
        op.aio_handle = type(f"Metered_{handle_class.__name__}", (handle_class,), methods)  # type: ignore[attr-defined]

    def _metered(self, method: Callable[..., int], counter: str) -> Callable[..., int]:
        def call(handle: Any, *args: Any, **kwargs: Any) -> int:
            t_start_ns = time.perf_counter_ns()
            result = method(handle, *args, **kwargs)
            wait_ns = time.perf_counter_ns() - t_start_ns if on_training_thread() else 0
            moved = {counter: (args[0] if args else kwargs["buffer"]).nbytes} if counter else {}
            self.add(wait_ns=wait_ns, **moved)
            return result

        return call

    def meter_files(self, files_class: type) -> None:
        """Counts the transfers of TenCache's ``PosixFiles``, existing ones too. Its lanes make them: no waits.

        Args:
            files_class: ``tencache_ds.io.backends.posix.PosixFiles``.
        """
        original: Any = files_class.transfer  # type: ignore[attr-defined]

        def transfer(files: Any, operation: Any, path: str, offset: int, buffer: Any, tag: str = "") -> None:
            original(files, operation, path, offset, buffer, tag)
            self.add(**{f"{operation.value}_nbytes": buffer.nbytes})

        files_class.transfer = transfer  # type: ignore[attr-defined]

    def meter_requests(self, backend_class: type) -> None:
        """Counts the requests of one of TenCache's backends that succeed. Its lanes make them: no waits.

        Args:
            backend_class: ``tencache_ds.io.NativeBackend`` or ``GdsBackend``.
        """
        original: Any = backend_class.submit  # type: ignore[attr-defined]

        def done(ticket: Any) -> None:
            if ticket.error is None:
                self.add(**{f"{ticket.operation.value}_nbytes": ticket.nbytes})

        def submit(backend: Any, *args: Any, **kwargs: Any) -> Any:
            ticket = original(backend, *args, **kwargs)
            ticket.add_done_callback(done)
            return ticket

        backend_class.submit = submit  # type: ignore[attr-defined]


def on_training_thread() -> bool:
    """Whether the calling thread is the main one, or one that Python did not start: autograd's threads are such.

    Asked at every metered call: ``threading`` represents a foreign thread by a ``_DummyThread``.
    """
    thread = threading.current_thread()
    return thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
