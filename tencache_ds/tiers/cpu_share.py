# SPDX-License-Identifier: Apache-2.0
"""How many cores the optimizer's arithmetic may use while lanes move its data.

An OpenMP region waits for its slowest thread. With a thread on every core, that is the one whose core a lane copies on:
on 16 cores with storage that costs CPU time (tmpfs), a pass over a chunk took four to thirty times as long with all
cores as with half of them (docs/benchmarks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from threadpoolctl import ThreadpoolController

SMALLEST_SHARED_CORES = 4
"""Below this a core is worth more to the arithmetic than to the lanes, which mostly wait for the disk."""


def cores_for_arithmetic(threads: int, cores: int, *, streamed: bool) -> int:
    """Threads to use for arithmetic.

    Args:
        threads: OpenMP threads this process would use.
        cores: cores of the host that this rank may use.
        streamed: lanes move the data meanwhile.
    """
    share = min(threads, cores)
    return share // 2 if streamed and share >= SMALLEST_SHARED_CORES else share


class CpuShare:
    """Limits the OpenMP threads of the calling thread: torch's and those of DeepSpeed's CPU optimizers."""

    def __init__(self) -> None:
        self._controller: ThreadpoolController | None = None

    @contextmanager
    def limited(self, threads: int) -> Iterator[None]:
        """At most ``threads`` OpenMP threads within the block; restores the previous number."""
        if self._controller is None:  # looked up late: DeepSpeed's ops bring their own OpenMP library
            self._controller = ThreadpoolController().select(user_api="openmp")
        with self._controller.limit(limits=threads):
            yield


class ArithmeticCores:
    """Limits arithmetic on a sub-group to this rank's cores, with some left to the I/O lanes while chunks are streamed.

    Args:
        cores: of the host that this rank may use.
        streamed: whether lanes move a sub-group's state meanwhile.
    """

    def __init__(self, cores: int, streamed: Callable[[int], bool]) -> None:
        self._cores = cores
        self._streamed = streamed
        self._share = CpuShare()

    def limited(self, sub_group: int) -> AbstractContextManager[None]:
        """See :meth:`CpuShare.limited`."""
        streamed = self._streamed(sub_group)
        return self._share.limited(cores_for_arithmetic(torch.get_num_threads(), self._cores, streamed=streamed))
