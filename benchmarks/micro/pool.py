# SPDX-License-Identifier: Apache-2.0
"""Speed of lease and release of the staging pool, and the memory overhead of its slots."""

from __future__ import annotations

import itertools
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial

import torch
from pydantic import JsonValue

from tencache_ds.integration.param_swapper import SMALLEST_STORED_NBYTES
from tencache_ds.layout import round_up
from tencache_ds.memory import BufferPool, HostArena, Locking
from tencache_ds.planning.budget import AUTO_WEIGHT_STAGING_NBYTES
from tencache_ds.planning.size_classes import SizeClass, plan_size_classes, smallest_budget_nbytes

from ..workloads import build, prepare
from .result import MIN_REPEATS, MicroResult, Row, alternate, progress

POOL, QUEUE, TORCH = "TenCache pool", "queue.SimpleQueue", "torch pinned"

WORLD_SIZES = (1, 8)
WEIGHT_NBYTES = 2
PAYLOAD_CAP_NBYTES = 1 << 30
"""Limit on the bytes of shards: torch rounds up to twice as much, and pinned memory is shared by the whole machine."""

N_CONTENDING = 8
_CHECK_EVERY = 16
_RATE_SLOT_NBYTES = 64 * 2**10


def run(seconds: float = 8.0, *, model: str = "1.3B", repeats: int = MIN_REPEATS) -> MicroResult:
    """Measures the pool.

    Args:
        seconds: about how long the rates are measured; the memory takes a second or two more.
        model: key of ``benchmarks.workloads.SPECS`` whose weights give the size distribution.
        repeats: samples per figure.

    Raises:
        MemoryLimitError: this machine lacks the memory for even one layer's weights twice.
    """
    rows = [*_rates(seconds, repeats)]
    parameters: dict[str, JsonValue] = {
        "model": model,
        "repeats": repeats,
        "rate slots": f"{_RATE_SLOT_NBYTES} bytes",
        "locking": _locking().value,
        "memory overhead": "bytes held for all shards at once, beyond the shards' own, as a share of them",
        "staged share": "bytes of shards in a staging budget when a lease in training order is first refused",
    }
    for world_size in WORLD_SIZES:
        shards, layers = shard_nbytes(model, world_size, PAYLOAD_CAP_NBYTES)
        parameters[f"shards of {world_size} ranks"] = f"{len(shards)}, {sum(shards) / 1e9:.3f} GB, {layers} layers"
        rows += _memory(shards, {"ranks": world_size})
    return MicroResult(name="pool", parameters=parameters, rows=rows)


def shard_nbytes(model: str, world_size: int, cap_nbytes: int) -> tuple[list[int], int]:
    """Bytes of one rank's 16-bit weight shards in the order of the model, and of how many layers they are.

    Layers are left out until the rest fits the cap: sizes stay those of the real model. At least one is kept.
    """
    prepare()
    with torch.device("meta"):
        named = [(name, p.numel()) for name, p in build(model, 512).named_parameters()]
    sizes = []
    for name, numel in named:
        layer = re.search(r"\.(\d+)\.", name)
        nbytes = -(-numel // world_size) * WEIGHT_NBYTES
        if nbytes >= SMALLEST_STORED_NBYTES:  # smaller ones never pass through the pool
            sizes.append((int(layer.group(1)) if layer else -1, nbytes))
    layers = 1 + max(layer for layer, _ in sizes)
    while layers > 1 and sum(nbytes for layer, nbytes in sizes if layer < layers) > cap_nbytes:
        layers -= 1
    return [nbytes for layer, nbytes in sizes if layer < layers], layers


# Rates


def _rates(seconds: float, repeats: int) -> list[Row]:
    gpu = torch.cuda.is_available()
    cases = [(1, 1), (N_CONTENDING, N_CONTENDING), (N_CONTENDING, N_CONTENDING // 2)]
    n_samples = len(cases) * (3 if gpu else 2) * (repeats + 1)
    rows = []
    with progress(n_samples, "pool") as bar:
        for n_threads, n_slots in cases:
            case = {"threads": n_threads, "slots": n_slots}
            waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
            for slot in range(n_slots):
                waiting.put(slot)
            with closing(HostArena(None, Locking.NONE)) as arena:
                pool = BufferPool(arena, [SizeClass(_RATE_SLOT_NBYTES, n_slots)])
                turns: dict[str, Callable[[], object]] = {
                    POOL: partial(_lease_and_return, pool),
                    QUEUE: partial(_get_and_put, waiting),
                }
                if gpu:
                    turns[TORCH] = partial(torch.empty, _RATE_SLOT_NBYTES, dtype=torch.uint8, pin_memory=True)
                timed = {
                    name: partial(_turns_per_s, turn, n_threads, seconds / n_samples) for name, turn in turns.items()
                }
                with closing(pool):
                    rates = alternate(timed, repeats, bar.update)
            rows += [Row.of(name, "lease and return", "1/s", case, samples) for name, samples in rates.items()]
            if not gpu:
                rows.append(Row.absent(TORCH, "lease and return", "1/s", case, _NO_GPU))
    return rows


def _lease_and_return(pool: BufferPool) -> None:
    pool.lease(_RATE_SLOT_NBYTES, "micro", "rate").release()


def _get_and_put(waiting: queue.SimpleQueue[int]) -> None:
    waiting.put(waiting.get())


def _turns_per_s(turn: Callable[[], object], n_threads: int, duration_s: float) -> float:
    """Turns of all threads per second of wall time."""
    ready = threading.Barrier(n_threads + 1)

    def work() -> int:
        ready.wait()
        end_s, n_turns = time.perf_counter() + duration_s, 0
        while time.perf_counter() < end_s:
            for _ in range(_CHECK_EVERY):
                turn()
            n_turns += _CHECK_EVERY
        return n_turns

    with ThreadPoolExecutor(n_threads, thread_name_prefix="micro-pool") as threads:
        counts = [threads.submit(work) for _ in range(n_threads)]
        ready.wait()
        t_start_s = time.perf_counter()
        wait(counts)
        elapsed_s = time.perf_counter() - t_start_s
        return sum(count.result() for count in counts) / elapsed_s


# Memory

_NO_GPU = "torch pins memory only where there is a CUDA device"


def _locking() -> Locking:
    return Locking.CUDA if torch.cuda.is_available() else Locking.NONE


def _memory(shards: Sequence[int], case: dict[str, str | int]) -> list[Row]:
    payload_nbytes = sum(shards)
    rows = []
    held_nbytes, whole = _held_by_pool(shards, sys.maxsize)
    if held_nbytes != payload_nbytes:
        raise RuntimeError(f"a pool planned for every shard held only {held_nbytes} of {payload_nbytes} bytes")
    rows.append(Row.of(POOL, "memory overhead", "%", case, [100 * (whole / payload_nbytes - 1)]))
    if torch.cuda.is_available():
        torch_nbytes = _held_by_torch(shards)
        rows.append(Row.of(TORCH, "memory overhead", "%", case, [100 * (torch_nbytes / payload_nbytes - 1)]))
    else:
        rows.append(Row.absent(TORCH, "memory overhead", "%", case, _NO_GPU))
    pages = [round_up(nbytes) for nbytes in shards]
    budget_nbytes = max(min(AUTO_WEIGHT_STAGING_NBYTES, payload_nbytes // 2), smallest_budget_nbytes(pages))
    held_nbytes, whole = _held_by_pool(shards, budget_nbytes)
    rows.append(Row.of(POOL, "staged share", "%", case, [100 * held_nbytes / whole]))
    return rows


def _held_by_pool(shards: Sequence[int], budget_nbytes: int) -> tuple[int, int]:
    """Bytes of shards that could be leased together in the order of the model, and bytes of the arena for it."""
    with closing(HostArena(None, _locking())) as arena:
        pool = BufferPool(arena, plan_size_classes([round_up(nbytes) for nbytes in shards], budget_nbytes))
        leased = (pool.try_lease(nbytes, "micro", "memory") for nbytes in shards)
        leases = list(itertools.takewhile(lambda lease: lease is not None, leased))
        held = sum(lease.nbytes for lease in leases if lease is not None), arena.nbytes_in_use
        for lease in filter(None, leases):
            lease.release()
        pool.close()
        return held


def _held_by_torch(shards: Sequence[int]) -> int:
    """Bytes that torch's pinned allocator takes from CUDA to hold every shard at once, by its own statistics."""
    torch.cuda.init()  # without it the statistics are empty
    torch._C._host_emptyCache()  # what is cached from earlier would be handed out again and not show as new
    before_nbytes = _taken_by_torch()
    held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for nbytes in shards]
    taken_nbytes = _taken_by_torch() - before_nbytes
    held.clear()
    torch._C._host_emptyCache()
    return taken_nbytes


def _taken_by_torch() -> int:
    stats = torch.cuda.host_memory_stats()
    # The first name is that of older versions of torch, where the second one counted what was asked for.
    return int(
        stats["reserved_bytes.current"] if "reserved_bytes.current" in stats else stats["allocated_bytes.current"]
    )
