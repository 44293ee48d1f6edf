# SPDX-License-Identifier: Apache-2.0
"""A round trip at startup: whether reads into GPU memory are correct, and faster than through pinned host memory.

Both ways are used as in training: several requests at the same time, and copies to the GPU while other reads are in
flight. They alternate, so that a disk whose speed drifts favours neither. The GPU is idle meanwhile; for the
consequences see :data:`tencache_ds.planning.gds.COMPATIBILITY_GAIN`.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable

import torch

from tencache_ds.io.backends.gds import compatibility_mode, missing_kvikio, plain_cause
from tencache_ds.io.backends.protocol import StorageBackend
from tencache_ds.io.backends.ticket import Operation, Priority, Ticket
from tencache_ds.io.scratch import close_unnamed, make_unnamed
from tencache_ds.memory.arena import HostArena, Locking
from tencache_ds.memory.device_arena import DeviceArena, wait_for_device
from tencache_ds.planning.gds import GdsTrial

TRIAL_NBYTES = 64 << 20
MAX_REPEATS = 5
MAX_SECONDS = 2.0
"""Longest measurement, on slow disks; both ways are measured at least once."""


def obstacle(on_cuda: bool, verify: str) -> str:
    """The obstacle to GDS known before a trial; "" for none. Does not import KvikIO.

    Args:
        on_cuda: whether the compute device is a CUDA GPU.
        verify: the option of that name.
    """
    if not on_cuda:
        return "the compute device is not a CUDA GPU"
    if verify == "full":
        return '"tencache.verify" is "full", which needs every byte in host memory'
    return missing_kvikio()


def try_gds(
    path: str,
    device: torch.device,
    open_host: Callable[[], StorageBackend],
    open_gds: Callable[[], StorageBackend],
    *,
    locking: Locking,
    request_nbytes: int,
    timeout_s: float,
    compatibility: Callable[[], str] = compatibility_mode,
    nbytes: int = TRIAL_NBYTES,
) -> GdsTrial:
    """Writes a file, reads it into device memory both ways, compares and times.

    Args:
        path: initial name of the file, which is unlinked at once.
        device: target of GDS reads.
        open_host, open_gds: open backends for host and for device memory; closed here.
        locking: of the host memory that weights would be staged in.
        request_nbytes: bytes of one request.
        timeout_s: longest wait for one.
        compatibility: says why the bytes pass through host memory, or "".
        nbytes: of the file.

    Returns:
        The result. Errors of GDS and of the disk are its ``problem``; they are not raised.
    """
    folder = os.path.dirname(path)
    try:
        with contextlib.ExitStack() as stack:
            mode = compatibility()
            host_arena, device_arena = HostArena(None, locking), DeviceArena(device)
            submitted: list[Ticket] = []
            stack.callback(_free, host_arena, submitted)
            stack.callback(device_arena.close)  # the backend keeps the buffers of unanswered requests
            gds = open_gds()
            stack.callback(gds.close)
            host = open_host()
            stack.callback(host.close)
            staged, wanted = (host_arena.allocate(nbytes, "GDS trial") for _ in range(2))
            direct = device_arena.allocate(nbytes, "GDS trial")
            wanted.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
            fd = make_unnamed(path)
            stack.callback(close_unnamed, fd)
            for backend in (host, gds):
                backend.add(path, fd)
            submitted.append(host.submit(Operation.WRITE, path, 0, wanted, tag="GDS trial"))
            submitted[0].wait(timeout_s)

            def read_by_gds() -> None:
                _read(gds, path, direct, direct, request_nbytes, timeout_s, [])

            def read_staged() -> None:
                _read(host, path, staged, direct, request_nbytes, timeout_s, submitted)

            read_by_gds()
            staged.copy_(direct)
            if not torch.equal(staged, wanted):
                return GdsTrial(problem=f"the data that GDS read from {folder} differs from the data written")
            read_staged()
            wait_for_device(direct)
            seconds = _seconds_in_turn([read_by_gds, read_staged], lambda: wait_for_device(direct))
            return GdsTrial("", mode, *(nbytes / statistics.median(each) for each in seconds))
    except Exception as error:  # of the disk, of C++, of a KvikIO that is too old: none of them ends a training
        return GdsTrial(problem=f"the round trip in {folder} failed: {plain_cause(error)}")


def _read(
    backend: StorageBackend,
    path: str,
    buffer: torch.Tensor,
    target: torch.Tensor,
    request_nbytes: int,
    timeout_s: float,
    submitted: list[Ticket],
) -> None:
    """Reads the file into ``buffer``, in separate requests, and copies each to ``target`` if that is elsewhere."""
    spans = [slice(start, start + request_nbytes) for start in range(0, buffer.numel(), request_nbytes)]
    tickets = [
        backend.submit(Operation.READ, path, span.start, buffer[span], tag="GDS trial", priority=Priority.URGENT)
        for span in spans
    ]
    submitted.extend(tickets)
    for ticket, span in zip(tickets, spans, strict=True):
        ticket.wait(timeout_s)
        if buffer is not target:
            target[span].copy_(buffer[span], non_blocking=True)


def _free(arena: HostArena, submitted: list[Ticket]) -> None:
    """Frees host memory after the backends were closed, unless a device that hangs may still write there."""
    late = next((ticket for ticket in submitted if not ticket.done or ticket.given_up), None)
    if late is not None:
        arena.keep_all(late.tag)
    arena.close()


def _seconds_in_turn(ways: list[Callable[[], None]], settle: Callable[[], None]) -> list[list[float]]:
    """Times each way, one after the other, again and again."""
    seconds: list[list[float]] = [[] for _ in ways]
    t_end = time.perf_counter() + MAX_SECONDS
    for _ in range(MAX_REPEATS):
        for way, taken in zip(ways, seconds, strict=True):
            t_start = time.perf_counter()
            way()
            settle()
            taken.append(time.perf_counter() - t_start)
        if time.perf_counter() > t_end:
            break
    return seconds
