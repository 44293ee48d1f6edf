# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.io.extents import FreeList
from tencache_ds.layout import round_up

pytestmark = pytest.mark.timeout(60)


def test_free_list():
    free = FreeList()
    assert (free.take(1), free.tail_nbytes, free.free_nbytes) == (None, 0, 0)
    free.extend(10)
    assert [free.take(n) for n in (2, 3, 4, 1)] == [0, 2, 5, 9]
    free.give(2, 3)
    free.give(9, 1)
    assert (free.tail_nbytes, free.ranges()) == (1, [(2, 3), (9, 1)])
    free.give(5, 4)
    assert (free.tail_nbytes, free.ranges()) == (8, [(2, 8)])
    free.give(0, 2)
    free.extend(5)
    assert (free.ranges(), free.end) == ([(0, 15)], 15)


def test_round_up():
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
    assert round_up(5, 3) == 6
