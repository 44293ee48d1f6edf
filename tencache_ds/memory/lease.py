# SPDX-License-Identifier: Apache-2.0
"""The handle on a slot of the pool, and the three ways to release it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tencache_ds.errors import TenCacheError

if TYPE_CHECKING:
    from tencache_ds.memory.pool import BufferPool


class LeaseError(TenCacheError, RuntimeError):
    """A lease was used after it was released, or a pool after it was closed."""


class LeaseState(enum.Enum):
    """The current user of the slot."""

    HELD = "held"
    """The owner reads and writes it."""
    RETURNING = "returning"
    """The owner is done; a GPU copy or an I/O request still reads or writes it."""
    RETURNED = "returned"
    """This lease no longer owns the slot: it is free, or leased again."""
    LOST = "lost"
    """Its request was given up, and the device may still write to it: the slot is never leased again."""


class DeviceEvent(Protocol):
    """An event that :meth:`Lease.release_after` waits for; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Return whether the event is done. Must not call back into the pool."""

    def synchronize(self) -> None:
        """Block until the event is done."""


class Completion(Protocol):
    """A request that :meth:`Lease.release_with` waits for; :class:`tencache_ds.io.Ticket` is one."""

    @property
    def given_up(self) -> bool:
        """Whether it ended only because it was given up: a device may still read or write the buffer."""

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        """Call ``fn(self)`` once, in any thread, when the request is over; at once if it is over already."""


class Slot:
    """A fixed part of the pool's memory. One thread at a time uses it, and what it keeps.

    Attributes:
        class_index: index of its size class, ascending by size.
        tensor: the memory, uint8 of shape ``[slot_nbytes]``.
        views: of the last :meth:`part`, by their layout; see :meth:`Lease.views`.
    """

    __slots__ = ("_part", "class_index", "tensor", "views")

    def __init__(self, class_index: int, tensor: torch.Tensor) -> None:
        self.class_index = class_index
        self.tensor = tensor
        self._part = tensor
        self.views: dict[Hashable, Mapping[str, torch.Tensor]] = {}

    def part(self, nbytes: int) -> torch.Tensor:
        """The first bytes of the memory; kept, because most leases of a slot are as long as the one before."""
        if self._part.numel() != nbytes:
            self._part = self.tensor[:nbytes]
            self.views.clear()
        return self._part


class Lease:
    """The only handle on a slot of a :class:`~tencache_ds.memory.pool.BufferPool`.

    It is released exactly once, by :meth:`release`, :meth:`release_after` or :meth:`release_with`, or by leaving its
    ``with`` block (now, unless one of the three was called inside). A released slot is no longer accessible through the
    lease; tensors taken from it earlier must not be used either.

    A lease may be passed between threads; one thread at a time uses it.

    Attributes:
        nbytes: bytes requested.
        owner: whose bytes these are (a weight's or chunk's name).
        purpose: their purpose.
        t_lease_ns: ``time.monotonic_ns()`` when it was handed out.
    """

    __slots__ = ("_buffer", "_pool", "_state", "nbytes", "owner", "purpose", "slot", "t_lease_ns")

    def __init__(
        self, pool: BufferPool, slot: Slot, buffer: torch.Tensor, nbytes: int, owner: str, purpose: str
    ) -> None:
        self._pool = pool
        self._buffer = buffer
        self._state = LeaseState.HELD
        self.slot = slot
        self.nbytes = nbytes
        self.owner = owner
        self.purpose = purpose
        self.t_lease_ns = time.monotonic_ns()

    def __repr__(self) -> str:
        return f"Lease({self.owner!r}, {self.purpose!r}, {self.nbytes} bytes, {self._state.value})"

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._state is LeaseState.HELD:
            self.release()

    @property
    def state(self) -> LeaseState:
        """Where the lease is in its life."""
        return self._state

    @property
    def buffer(self) -> torch.Tensor:
        """The memory: uint8, shape ``[nbytes rounded up to 4096]``, page aligned, all of it private to the lease.

        Raises:
            LeaseError: the lease was released.
        """
        self.require_held("its buffer was requested")
        return self._buffer

    def view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """Return the first ``numel`` elements of the buffer as ``dtype``, shape ``[numel]``, without a copy.

        Raises:
            LeaseError: the lease was released.
            ValueError: the buffer is too small, or ``numel`` is negative.
        """
        self.require_held("a view was requested")
        nbytes = numel * dtype.itemsize
        if not 0 <= nbytes <= self._buffer.numel():
            raise ValueError(
                f"{self.owner} ({self.purpose}): {numel} elements of {dtype} take {nbytes} bytes, the lease has "
                f"{self._buffer.numel()}"
            )
        return self._buffer[:nbytes].view(dtype)

    def views(
        self, layout: Hashable, make: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """Return ``make(self.buffer)``, or what it returned to an earlier lease of this slot with as many bytes.

        Each operation of torch releases the GIL, and a thread that streams chunks beside a forward pass then waits for
        it. Of chunks of one layout, a slot has the same views every time.

        Args:
            layout: what the views depend on, besides the buffer.
            make: gives tensors in the buffer, by name.

        Raises:
            LeaseError: the lease was released.
        """
        self.require_held("views were requested")
        views = self.slot.views.get(layout)
        if views is None:
            views = self.slot.views[layout] = make(self._buffer)
        return views

    def release(self) -> None:
        """Give the slot back now: nothing reads or writes it any more.

        Raises:
            LeaseError: it was released before.
        """
        self.require_held("it was released twice")
        self._pool.finish_return(self)  # at once: an interrupt in between would leave it coming back for ever

    def release_after(self, event: DeviceEvent) -> None:
        """Give the slot back when ``event`` is done (a CUDA event recorded after the last copy from or to the buffer).

        The pool queries the event when a slot is needed; nothing blocks here. The event must not be recorded again
        before the slot has returned.

        Raises:
            LeaseError: it was released before.
        """
        self._pool.begin_return(self, event)

    def release_with(self, ticket: Completion) -> None:
        """Release the slot when the I/O request of ``ticket`` is over, failed or not, in the thread that ends it.

        If the request is given up, the slot never returns, and the pool's memory is never freed.

        Do not hold a lock here that the thread ending the request takes.

        Raises:
            LeaseError: it was released before.
        """
        self._pool.begin_return(self, None)
        try:
            ticket.add_done_callback(self._end_with)
        except BaseException:
            self._pool.cancel_return(self)
            raise

    def _end_with(self, ticket: Completion) -> None:
        if ticket.given_up:
            self._pool.lose(self)
        else:
            self._pool.finish_return(self)

    def require_held(self, what: str) -> None:
        """Raise :class:`LeaseError`, saying ``what`` was tried, unless the lease is held."""
        if self._state is not LeaseState.HELD:
            raise LeaseError(
                f"{self.owner} ({self.purpose}): {what} after the lease was released (it is {self._state.value})"
            )
