# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from threadpoolctl import threadpool_info

from tencache_ds.tiers.host_update import ArithmeticCores, CpuShare, cores_for_arithmetic


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


@pytest.mark.parametrize(
    ("threads", "cores", "expected"),
    [
        (1, 16, 1),
        (2, 2, 2),
        (3, 3, 3),
        (4, 4, 2),
        (16, 16, 8),
        (17, 17, 8),
        (8, 16, 4),  # the user's OMP_NUM_THREADS
        (32, 16, 8),  # two ranks on 32 cores: 16 each, half for the lanes
        (2, 1, 1),
    ],
)
def test_half_of_this_ranks_cores_where_there_are_enough_and_lanes_work(threads, cores, expected):
    assert cores_for_arithmetic(threads, cores, streamed=True) == expected
    assert cores_for_arithmetic(threads, cores, streamed=False) == min(threads, cores)


def test_a_sub_group_that_is_streamed_leaves_cores_to_the_lanes():
    cores = ArithmeticCores(4, lambda sub_group: sub_group == 1)
    before = torch.get_num_threads()
    with CpuShare().limited(4):
        for sub_group, threads in ((0, 4), (1, 2)):
            with cores.limited(sub_group):
                assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == before
