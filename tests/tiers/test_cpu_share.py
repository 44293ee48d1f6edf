# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from threadpoolctl import threadpool_info

from tencache_ds.tiers.cpu_share import CpuShare, cores_for_arithmetic


def openmp_threads() -> set[int]:
    return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "openmp"}


def test_limits_every_openmp_library_and_restores_them():
    torch.ones(10).sum()
    share, before = CpuShare(), openmp_threads()
    assert before  # torch brings one
    for threads in (1, 2):
        with share.limited(threads):
            assert openmp_threads() == {threads}
            assert torch.get_num_threads() == threads
        assert openmp_threads() == before


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 2), (3, 3), (4, 2), (16, 8), (17, 8)])
def test_half_of_the_cores_where_there_are_enough(threads, expected):
    assert cores_for_arithmetic(threads) == expected
