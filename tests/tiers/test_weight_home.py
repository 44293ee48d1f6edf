# SPDX-License-Identifier: Apache-2.0
"""Random histories of a weight's home: its value is right wherever it is, and no memory is lost or freed twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tencache_ds.errors import MemoryLimitError, StorageError, TenCacheError
from tencache_ds.placement.places import Place
from tencache_ds.tiers.weight_homes import Home

NUMEL = 5
NBYTES = 2 * NUMEL


class Source:
    """Host memory for one weight, or for none."""

    def __init__(self) -> None:
        self.given: dict[int, torch.Tensor] = {}
        self.exhausted = False

    def take(self, nbytes: int) -> torch.Tensor:
        if self.exhausted:
            raise MemoryLimitError("there is none")
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.given[memory.data_ptr()] = memory
        return memory

    def give_back(self, piece: torch.Tensor) -> None:
        self.given.pop(piece.data_ptr()).fill_(0xCB)  # KeyError: it was not ours


class HomeMachine(RuleBasedStateMachine):
    """A weight of TenCache's in host memory, one of DeepSpeed's there, or one on NVMe."""

    @initialize(origin=st.sampled_from(["ours", "deepspeeds", "nvme"]))
    def begin(self, origin: str) -> None:
        self.source = Source()
        self.stored = torch.zeros(NUMEL, dtype=torch.bfloat16)
        self.value = self.stored.clone()
        self.ours, self.origin = origin == "ours", Place.NVME if origin == "nvme" else Place.HOST
        self.deepspeeds = torch.zeros(NUMEL, dtype=torch.bfloat16)
        if origin == "nvme":
            self.home = Home(None)
        elif origin == "deepspeeds":
            self.home = Home(self.deepspeeds)
        else:
            self.home = Home(self.source.take(NBYTES).view(torch.bfloat16), self.source)
        self.place, self.freed, self.n_engines = self.origin, False, 0

    @rule(value=st.integers(-128, 128))
    def change(self, value: int) -> None:
        """An update, wherever the weight is."""
        self.value = torch.full((NUMEL,), value, dtype=torch.bfloat16)
        (self.stored if self.home.memory is None else self.home.memory).copy_(self.value)

    @rule()
    def to_device(self) -> None:
        memory = torch.full((NUMEL,), torch.nan, dtype=torch.bfloat16)
        self.home.to_device(memory, self.stored.clone)
        assert self.home.memory is memory
        self.place = Place.GPU
        self.n_engines += 1

    @rule()
    def to_device_fails(self) -> None:
        def fail() -> torch.Tensor:
            raise StorageError("read", "a path", 0, NBYTES, "it is gone")

        if self.place is Place.NVME:
            with pytest.raises(StorageError):
                self.home.to_device(torch.empty(NUMEL, dtype=torch.bfloat16), fail)

    @rule()
    def leave_device(self) -> None:
        if self.place is not Place.GPU:
            with pytest.raises(TenCacheError, match="cannot leave it"):
                self.home.leave_device(self.stored.copy_)
            return
        self.home.leave_device(self.stored.copy_)
        self.n_engines -= 1
        if not self.n_engines:
            self.place, self.freed = self.origin, False

    @precondition(lambda self: self.place is Place.GPU)
    @rule()
    def leave_device_fails(self) -> None:
        def fail(value: torch.Tensor) -> None:
            raise StorageError("write", "a path", 0, NBYTES, "it is full")

        self.source.exhausted = True
        if self.n_engines == 1 and (self.freed or self.origin is Place.NVME):
            with pytest.raises((MemoryLimitError, StorageError)):
                self.home.leave_device(fail)
        self.source.exhausted = False

    @rule()
    def free_unused(self) -> None:
        frees = self.ours and self.place is Place.GPU and not self.freed
        assert self.home.free_unused() == (NBYTES if frees else 0)
        self.freed = self.freed or frees

    @invariant()
    def it_is_where_it_should_be(self) -> None:
        assert (self.home.place, self.home.returns_to) == (self.place, self.origin)
        assert self.home.stored is (self.place is Place.NVME)
        there = self.stored if self.home.memory is None else self.home.memory
        assert torch.equal(there, self.value)
        assert (self.home.in_host_memory is not None) is (self.place is Place.HOST)
        if self.place is Place.HOST and not self.ours:
            assert self.home.memory is self.deepspeeds

    @invariant()
    def memory_is_accounted_for(self) -> None:
        kept = self.origin is Place.HOST and not self.freed
        assert self.home.host_nbytes == (NBYTES if kept else 0)
        assert self.home.missing_nbytes == (NBYTES if self.freed else 0)
        assert len(self.source.given) == (self.ours and not self.freed)


HomeMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=20, deadline=None)
TestHomeMachine = pytest.mark.timeout(60)(HomeMachine.TestCase)
