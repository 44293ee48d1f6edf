# SPDX-License-Identifier: Apache-2.0
"""The one owner of the question whether an optimizer step is void.

[Note: whole or void]

An optimizer step changes weights, moments and step counts one chunk after another, in the training thread, in a
background thread and in native ones. Whoever fails in between, be it with an I/O error, ``KeyboardInterrupt`` or a
collective that another rank has left, leaves some of them new and others old: the step is *void*. While it is,
everything that trains on, reads or saves weights and states raises :class:`VoidStepError`. That ends only with a load
that has replaced all of what may have changed, and has itself come to its end. A failure before the first change leaves
the step undone, and it may be tried again.

Ctrl-C need not make a step void: the interrupt is raised when the step, or the load, has come to its end. A second one
is raised at once.

Ranks meet where a step begins, where its update ends, and where a checkpoint is saved or loaded
(:meth:`StepGuard.together`). A rank that has failed says so and does not wait; the others raise at the same place.
"""

from __future__ import annotations

import contextlib
import enum
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tencache_ds.errors import StorageError, TenCacheError, VoidStepError, named_ranks


class Part(enum.Enum):
    """What a step or a load changes as a whole."""

    TRAINED = "the trained weights, their master weights and optimizer states"
    FROZEN = "the frozen weights"


class _Phase(enum.Enum):
    WHOLE = "everything is of one and the same step"
    CHANGING = "the training thread changes it"
    BEHIND = "the step has returned, the rest of its update runs in the background"
    VOID = "a change has not come to its end"


class Votes(Protocol):
    """How the ranks of a job tell each other that they have failed. Used by the training thread."""

    def passed(self, point: str) -> list[int]:
        """This rank has come to its ``point``-th meeting of that name; returns the ranks that failed there, once all
        ranks have come or one has failed."""

    def failed(self, point: str) -> None:
        """This rank does not come to that meeting, because it has failed; does not wait."""


class StepGuard:
    """Knows whether weights, master weights and optimizer states are those of one and the same step: see [Note: whole
    or void]. Used by the training thread and by the one that updates in the background.

    Args:
        votes: of the ranks of the job.
    """

    def __init__(self, votes: Votes) -> None:
        self._votes = votes
        self._lock = threading.Lock()
        self._phase = _Phase.WHOLE
        self._behind = False  # an update in the background has begun and not ended
        self._parts: set[Part] = set()  # changed since everything was whole
        self._replaced: set[Part] = set()  # by the load that is under way
        self._in_step = self._loading = False
        # Not the error itself, whose traceback holds the frames of its catchers, and they their engine.
        self._reason = ""
        self._cause: StorageError | None = None

    @property
    def void(self) -> bool:
        """Whether a change has not come to its end, and never will."""
        return self._phase is _Phase.VOID

    def check(self) -> None:
        """Returns where weights and states may be used; any thread. Does not wait for an update.

        Raises:
            VoidStepError: a step or a load has failed half-way.
        """
        if self._phase is _Phase.VOID and not self._loading:
            raise VoidStepError(
                f"the last optimizer step or load failed half-way ({self._reason}): some weights and optimizer states "
                "have their new values, others their old ones, so nothing is computed from them or saved. Load a "
                "checkpoint with its optimizer states (engine.load_checkpoint), or start again from one"
            ) from (self._cause and self._cause.copied())

    # A step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around an optimizer step, up to where its counters are those of the next one. Within another one it is part
        of that."""
        if self._in_step:
            yield
            return
        with self._coming_to_its_end():
            self._in_step = True
            try:
                yield
            finally:
                self._in_step = False
            self._ended()

    @contextlib.contextmanager
    def change(self, part: Part = Part.TRAINED) -> Iterator[None]:
        """Around a change outside a step: it is whole or void, too."""
        with self.step():
            self.begin_change(part)
            yield

    def begin_change(self, part: Part = Part.TRAINED) -> None:
        """Within a step, a change or a load: from now on it has to come to its end.

        Raises:
            VoidStepError: an earlier one did not.
        """
        self.check()
        with self._lock:
            self._parts.add(part)
            if self._phase is not _Phase.VOID:
                self._phase = _Phase.CHANGING

    def update_begins(self) -> None:
        """The rest of the step's update is left to the background."""
        self._behind = True

    def update_ended(self) -> None:
        """It has come to its end; any thread."""
        with self._lock:
            self._behind = False
            if self._phase is _Phase.BEHIND:
                self._phase = _Phase.WHOLE
                self._parts.clear()

    def update_failed(self, error: BaseException) -> None:
        """It has not; any thread."""
        with self._lock:
            self._behind = False
            self._parts.add(Part.TRAINED)
            self._become_void(error)

    # Loading

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around a load, for which nothing is in the way; no update may be under way. Within another one it is part of
        that. A void step ends with it if everything that may have changed was :meth:`replaced`."""
        if self._loading:
            yield
            return
        with self._coming_to_its_end():
            self._loading = True
            self._replaced.clear()
            was_void = self.void
            try:
                yield
            finally:
                self._loading = False
            if not was_void or self._parts <= self._replaced:
                with self._lock:
                    self._phase, self._reason, self._cause = _Phase.WHOLE, "", None
                    self._parts.clear()

    def replaced(self, part: Part) -> None:
        """All of this part has been loaded."""
        self._replaced.add(part)

    def inherit(self, former: StepGuard) -> None:
        """The weights come from an engine whose last step may be void."""
        if former.void:
            with self._lock:
                self._parts |= former._parts
                self._phase, self._reason, self._cause = _Phase.VOID, former._reason, former._cause

    # Several ranks

    @contextlib.contextmanager
    def together(self, point: str) -> Iterator[Callable[[], None]]:
        """Around what every rank does, and either all ranks or none must have done. Collective.

        Yields:
            To be called where the block has succeeded on this rank; at the block's end otherwise.

        Raises:
            TenCacheError: another rank has failed within the block, and this one has not.
        """
        voted = False

        def passed() -> None:
            nonlocal voted
            if voted:
                return
            voted = True
            failed = self._votes.passed(point)
            if failed:
                raise TenCacheError(f"{named_ranks(failed)} failed at {point}; see the error there")

        try:
            yield passed
            passed()
        except BaseException:
            if not voted:
                voted = True
                self._votes.failed(point)
            raise

    # Mechanics

    @contextlib.contextmanager
    def _coming_to_its_end(self) -> Iterator[None]:
        """Around a step or a load: an interrupt waits for its end, and whatever else ends it early makes it void."""
        with _interrupts_deferred():
            try:
                yield
            except BaseException as error:
                self._failed(error)
                raise

    def _ended(self) -> None:
        with self._lock:
            if self._phase is not _Phase.CHANGING:
                return
            if self._behind:
                self._phase = _Phase.BEHIND
            else:
                self._phase = _Phase.WHOLE
                self._parts.clear()

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            if self._phase is _Phase.CHANGING:
                self._become_void(error)

    def _become_void(self, error: BaseException) -> None:
        if self._phase is not _Phase.VOID:
            self._phase, self._reason = _Phase.VOID, f"{type(error).__name__}: {error}"
            if isinstance(error, StorageError):
                self._cause = error.copied()
                self._cause.__cause__ = self._cause.__context__ = None


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Within the block, which Python's main thread has entered, the first SIGINT waits for its end; then, and for the
    second one at once, the user's or Python's handler is called, which usually raises ``KeyboardInterrupt``."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[Any] = []

    def defer(number: int, frame: Any) -> None:
        received.append(frame)
        if len(received) > 1:
            received.clear()
            handler(number, frame)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(signal.SIGINT, received[0])
