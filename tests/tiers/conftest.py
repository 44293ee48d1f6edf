# SPDX-License-Identifier: Apache-2.0
"""What the tier tests need: a real store whose transfers a test can hold back or fail, and events that a test fires."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from tencache_ds.errors import StorageError
from tencache_ds.io import ExtentStore, Operation, PosixBackend
from tencache_ds.memory import BufferPool, HostArena, Locking
from tencache_ds.observability.counters import Counters
from tencache_ds.planning.size_classes import SizeClass

TIMEOUT_S = 20.0


class ControlledBackend(PosixBackend):
    """Files on the disk; a test closes the gate of a direction, or says which transfers fail.

    ``at_gate`` of a direction is set when a lane takes up a transfer; a test clears it.
    """

    def __init__(self) -> None:
        self.gates = {operation: threading.Event() for operation in Operation}
        self.at_gate = {operation: threading.Event() for operation in Operation}
        self.open_gates()
        self.fails: Callable[[Operation, str], bool] = lambda operation, tag: False
        super().__init__(n_lanes=3, request_nbytes=32 << 10)

    def open_gates(self) -> None:
        for gate in self.gates.values():
            gate.set()

    def close(self) -> None:
        self.open_gates()
        super().close()

    def _transfer(self, lane: int, operation: Operation, path: str, offset: int, piece: torch.Tensor, tag: str) -> None:
        self.at_gate[operation].set()
        self.gates[operation].wait()
        if self.fails(operation, tag):
            raise StorageError(operation.value, path, offset, piece.numel(), "injected", errno=5, tag=tag)
        super()._transfer(lane, operation, path, offset, piece, tag)


class Storage:
    """A store in ``folder``, a poisoned pool of ``classes`` and fresh counters."""

    def __init__(self, folder: Path, classes: tuple[SizeClass, ...]) -> None:
        self.backend = ControlledBackend()
        self.store = ExtentStore(str(folder / "store.bin"), self.backend, growth_nbytes=1 << 20, timeout_s=TIMEOUT_S)
        self.arena = HostArena(sum(c.nbytes for c in classes), Locking.NONE)
        self.pool = BufferPool(self.arena, classes, poison=True)
        self.counters = Counters()

    def assert_idle(self) -> None:
        """Nothing is leased once all returned buffers are free."""
        self.pool.drain(timeout_s=TIMEOUT_S)
        self.pool.assert_idle()

    def close(self) -> None:
        """Ends everything; raises when a buffer is still leased."""
        self.backend.open_gates()
        try:
            self.assert_idle()
        finally:
            self.store.close()
            self.backend.close()
            self.pool.close(timeout_s=TIMEOUT_S)
            self.arena.close()


class ManualEvent:
    """A device event that is done when the test says so, or when somebody synchronizes with it."""

    def __init__(self, *, done: bool = False) -> None:
        self.done = done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random values, different for every seed."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
