# SPDX-License-Identifier: Apache-2.0
"""Ordinary memory in place of a device's: what the stand-ins of several tests have in common."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator

import torch


class OrdinaryLoan:
    """A loan of :class:`OrdinaryDevice`."""

    def __init__(self, memory: torch.Tensor, image: torch.Tensor | None, rank: int) -> None:
        self.memory = memory
        self.image = image
        self.rank = rank
        self.taken = False
        self.holds = 0

    def take_back(self) -> None:
        assert self.image is not None
        self.image.copy_(self.memory)
        self.memory.fill_(0xCB)
        self.taken = True

    def end(self) -> None:
        self.memory = self.memory[:0].clone()


class OrdinaryDevice:
    """The part of a ``DeviceMemory`` that needs no figures. Loans are taken back by :meth:`take_back`."""

    device = torch.device("cpu")
    lends = True
    taken_nbytes = 0
    host_room_nbytes = 0

    @functools.cached_property
    def _loans(self) -> list[weakref.ref[OrdinaryLoan]]:
        return []

    @functools.cached_property
    def _lock(self) -> threading.Lock:
        return threading.Lock()

    _holds = 0

    def record(self) -> None: ...

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it is a part of what was allocated; parts of anything else are in host memory."""
        return tensor.untyped_storage().data_ptr() in self._storages()

    def _storages(self) -> set[int]:
        raise NotImplementedError

    def allocate(self, nbytes: int) -> torch.Tensor:
        raise NotImplementedError

    def lend(self, nbytes: int, image: torch.Tensor | None, rank: int) -> OrdinaryLoan:
        assert (image is not None) == self.lends
        assert image is None or image.numel() == nbytes
        loan = OrdinaryLoan(self.allocate(nbytes), image, rank)
        with self._lock:
            self._loans.append(weakref.ref(loan))
        return loan

    def take_back(self, count: int) -> int:
        """What an allocation of training does that needs the memory of so many loans; returns how many it got. Any
        thread."""
        with self._lock:
            if self._holds:
                return 0
            loans = [loan for reference in self._loans if (loan := reference()) is not None]
            loans = [loan for loan in loans if not loan.taken and not loan.holds and loan.memory.numel()]
            loans.sort(key=lambda loan: -loan.rank)
            for loan in loans[:count]:
                loan.take_back()
                self.taken_nbytes += loan.memory.numel()
            return len(loans[:count])

    @contextlib.contextmanager
    def holding(self, loan: OrdinaryLoan | None = None) -> Iterator[None]:
        def hold(count: int) -> None:
            with self._lock:
                if loan is None:
                    self._holds += count
                else:
                    loan.holds += count

        hold(1)
        try:
            yield
        finally:
            hold(-1)

    def step_done(self, host_room_nbytes: int) -> None:
        self.host_room_nbytes = host_room_nbytes

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def copy_rate(self) -> float:
        return 1e10

    def synchronize(self) -> None: ...

    def trim(self) -> None: ...
