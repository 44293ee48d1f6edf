# SPDX-License-Identifier: Apache-2.0
"""Pool statistics, and errors that name the holders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tencache_ds.errors import TenCacheError
from tencache_ds.memory.lease import LeaseState


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a slot, for messages and reports."""

    owner: str
    purpose: str
    nbytes: int
    slot_nbytes: int
    age_s: float
    state: LeaseState

    def __str__(self) -> str:
        return (
            f"{self.owner} ({self.purpose}): {self.nbytes} bytes in a slot of {self.slot_nbytes}, {self.state.value}, "
            f"for {self.age_s:.3f} s"
        )


class HeldSlotsError(TenCacheError):
    """Names the slots that are not free.

    Attributes:
        holders: who has them, oldest first.
    """

    def __init__(self, message: str, holders: Sequence[Holder]) -> None:
        lines = "".join(f"\n  {holder}" for holder in holders)
        super().__init__(f"{message}; slots in use ({len(holders)}):{lines or ' none'}")
        self.holders = tuple(holders)


class PoolTimeout(HeldSlotsError, TimeoutError):
    """No slot came back in time. Usual cause: everything is held by those who wait, so the pool is too small."""


class PoolBusyError(HeldSlotsError, RuntimeError):
    """Slots are still leased where none should be."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """One size class: ``free`` of ``count`` slots of ``slot_nbytes`` bytes can be leased at once."""

    slot_nbytes: int
    count: int
    free: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A consistent snapshot of a pool.

    Attributes:
        nbytes_total: bytes of all slots.
        nbytes_leased: bytes of the slots that are not free (held, or coming back).
        nbytes_leased_peak: largest ``nbytes_leased`` so far.
        n_leases: leases handed out so far.
        n_waits: leases that had to be waited for so far (those that timed out too).
        wait_ns: time spent waiting so far, summed over threads.
        n_waiting: threads that wait now.
        classes: every size class, by ascending slot size.
    """

    nbytes_total: int
    nbytes_leased: int
    nbytes_leased_peak: int
    n_leases: int
    n_waits: int
    wait_ns: int
    n_waiting: int
    classes: tuple[ClassStats, ...]
