# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of written data, taken during the write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tencache_ds.io.integrity.fingerprint import Fingerprint
from tencache_ds.limits import too_few_threads

_N_THREADS = 2


class Witness:
    """The record of one write in RAM: its number among the writes of its extent, and the fingerprint of its buffer."""

    __slots__ = ("_taking", "generation")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._taking: Future[int] | None = None

    def when_taken(self, callback: Callable[[BaseException | None], None]) -> None:
        """Calls ``callback(error)`` once nothing reads the buffer any more: in the thread that takes the fingerprint,
        or immediately if it is done. The error is the reason for a missing fingerprint."""
        if self._taking is None:
            callback(None)
        else:
            self._taking.add_done_callback(lambda taking: callback(taking.exception()))


class Witnesses:
    """Takes and compares fingerprints. Any thread.

    A write's fingerprint is taken by a separate thread while the device transfers the bytes, so that neither the
    writing thread nor the transfer waits for it.

    Args:
        fingerprint: hash of a buffer and of the number of its write; None takes and compares nothing.
    """

    def __init__(self, fingerprint: Fingerprint | None) -> None:
        self._fingerprint = fingerprint
        self._threads = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="tencache-fingerprint")

    @property
    def active(self) -> bool:
        """Whether anything is compared."""
        return self._fingerprint is not None

    def take(self, witness: Witness, buffer: torch.Tensor) -> None:
        """Starts; the buffer must stay as it is until :meth:`Witness.when_taken` calls back. Does not raise."""
        if self._fingerprint is None:
            return
        try:
            witness._taking = self._threads.submit(self._fingerprint, buffer, witness.generation)
        except RuntimeError as error:  # closed, or the interpreter exits: the write must end all the same
            witness._taking = Future()
            started = f"some of the {_N_THREADS} fingerprint threads"
            witness._taking.set_exception(too_few_threads(started, error) if "new thread" in str(error) else error)

    def differ(self, witness: Witness, buffer: torch.Tensor) -> bool:
        """Whether the buffer differs from the written data; computed in the caller's thread."""
        if self._fingerprint is None or witness._taking is None:
            return False
        return self._fingerprint(buffer, witness.generation) != witness._taking.result()

    def close(self) -> None:
        """Ends the threads. Nothing is taken afterwards."""
        self._threads.shutdown()
