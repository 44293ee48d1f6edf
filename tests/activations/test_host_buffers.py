# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tencache_ds.activations.copies import HostBuffers, class_nbytes
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.memory import HostArena, Locking


class Account:
    """A limit, and what was taken of it."""

    def __init__(self, limit_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0

    def allows(self, nbytes: int) -> bool:
        return self.nbytes + nbytes <= self.limit_nbytes

    def count(self, nbytes: int) -> None:
        self.nbytes += nbytes


@pytest.fixture
def account():
    return Account(10 * PAGE_NBYTES)


@pytest.fixture
def buffers(account):
    arena = HostArena(None, Locking.NONE)
    yield HostBuffers(arena, account.allows, account.count, "tests", poison=True)
    assert arena.nbytes_in_use == account.nbytes
    arena.close()


@given(st.integers(1, 2**40))
def test_a_class_wastes_at_most_an_eighth_and_is_page_aligned(nbytes):
    size = class_nbytes(nbytes)
    assert size % PAGE_NBYTES == 0
    assert nbytes <= size < nbytes + max(PAGE_NBYTES, nbytes / 8 + 1)


def test_buffers_are_reused(buffers, account):
    buffer = buffers.take(PAGE_NBYTES)
    address = buffer.data_ptr()
    buffers.give(buffer)
    assert buffers.used_nbytes == 0
    assert buffers.take(PAGE_NBYTES - 1).data_ptr() == address
    assert buffers.used_nbytes == account.nbytes == PAGE_NBYTES


def test_a_full_limit_means_none_unless_it_must_be(buffers, account):
    assert buffers.take(10 * PAGE_NBYTES) is not None
    assert buffers.take(1) is None
    assert buffers.take(1, regardless=True) is not None
    assert account.nbytes == 11 * PAGE_NBYTES


def test_unused_buffers_of_other_sizes_make_room(buffers, account):
    for buffer in [buffers.take(PAGE_NBYTES) for _ in range(5)]:
        buffers.give(buffer)
    assert buffers.take(8 * PAGE_NBYTES) is not None
    assert account.nbytes <= 10 * PAGE_NBYTES
    assert buffers.take(PAGE_NBYTES) is not None
