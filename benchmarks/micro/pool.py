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

from tencache_ds.integration.param_swapper import SMALLEST_STORED_NBYTES
from tencache_ds.layout import round_up
from tencache_ds.memory import BufferPool, HostArena, Locking
from tencache_ds.planning.budget import AUTO_WEIGHT_STAGING_NBYTES
from tencache_ds.planning.size_classes import SizeClass, plan_size_classes, smallest_budget_nbytes

from ..training.instruments import pinned_by_torch_nbytes
from ..workloads import build, prepare
from .result import REPEATS, Case, MicroResult, alternate

POOL, QUEUE, TORCH = "TenCache pool", "queue.SimpleQueue", "torch pinned"

WORLD_SIZES = (1, 8)
WEIGHT_NBYTES = 2
PAYLOAD_CAP_NBYTES = 1 << 30
"""Limit on the bytes of shards: torch rounds up to twice as much, and pinned memory is shared by the whole machine."""

N_CONTENDING = 8
_CHECK_EVERY = 16
_RATE_SLOT_NBYTES = 64 * 2**10


def run(seconds: float = 8.0, *, model: str = "1.3B") -> MicroResult:
    """Measures the pool.

    Args:
        seconds: about how long the rates are measured; the memory takes a second or two more.
        model: key of ``benchmarks.workloads.SPECS`` whose weights give the size distribution.

    Raises:
        MemoryLimitError: this machine lacks the memory for even one layer's weights twice.
    """
    result = MicroResult(
        name="pool",
        parameters={
            "model": model,
            "repeats": REPEATS,
            "rate slots": f"{_RATE_SLOT_NBYTES} bytes",
            "locking": _locking().value,
            "memory overhead": "bytes held for all shards at once, beyond the shards' own, as a share of them",
            "staged share": "bytes of shards in a staging budget when a lease in training order is first refused",
        },
    )
    _add_rates(result, seconds)
    for world_size in WORLD_SIZES:
        shards, layers = shard_nbytes(model, world_size, PAYLOAD_CAP_NBYTES)
        total = f"{len(shards)}, {sum(shards) / 1e9:.3f} GB, {layers} layers"
        result.parameters[f"shards of {world_size} ranks"] = total
        _add_memory(result, shards, {"ranks": world_size})
    if not torch.cuda.is_available():
        result.lack(TORCH, {}, "torch pins memory only where there is a CUDA device")
    return result


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


def _add_rates(result: MicroResult, seconds: float) -> None:
    cases = [(1, 1), (N_CONTENDING, N_CONTENDING), (N_CONTENDING, N_CONTENDING // 2)]
    for n_threads, n_slots in cases:
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(n_slots):
            waiting.put(slot)
        with (
            closing(HostArena(None, Locking.NONE)) as arena,
            closing(BufferPool(arena, [SizeClass(_RATE_SLOT_NBYTES, n_slots)])) as pool,
        ):
            turns: dict[str, Callable[[], object]] = {
                POOL: lambda pool=pool: pool.lease(_RATE_SLOT_NBYTES, "micro", "rate").release(),
                QUEUE: lambda waiting=waiting: waiting.put(waiting.get()),
            }
            if torch.cuda.is_available():
                turns[TORCH] = partial(torch.empty, _RATE_SLOT_NBYTES, dtype=torch.uint8, pin_memory=True)
            duration_s = seconds / (len(cases) * len(turns) * (1 + REPEATS))
            timed = {name: partial(_turns_per_s, turn, n_threads, duration_s) for name, turn in turns.items()}
            rates = alternate(f"pool, {n_threads} threads", timed, REPEATS)
        result.add("lease and return", "1/s", {"threads": n_threads, "slots": n_slots}, rates)


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


def _locking() -> Locking:
    return Locking.CUDA if torch.cuda.is_available() else Locking.NONE


def _add_memory(result: MicroResult, shards: Sequence[int], case: Case) -> None:
    payload_nbytes = sum(shards)
    held_nbytes, whole = _held_by_pool(shards, sys.maxsize)
    if held_nbytes != payload_nbytes:
        raise RuntimeError(f"a pool planned for every shard held only {held_nbytes} of {payload_nbytes} bytes")
    taken = {POOL: whole} | ({TORCH: _held_by_torch(shards)} if torch.cuda.is_available() else {})
    overhead = {name: [100 * (nbytes / payload_nbytes - 1)] for name, nbytes in taken.items()}
    result.add("memory overhead", "%", case, overhead)
    pages = [round_up(nbytes) for nbytes in shards]
    budget_nbytes = max(min(AUTO_WEIGHT_STAGING_NBYTES, payload_nbytes // 2), smallest_budget_nbytes(pages))
    held_nbytes, whole = _held_by_pool(shards, budget_nbytes)
    result.add("staged share", "%", case, {POOL: [100 * held_nbytes / whole]})


def _held_by_pool(shards: Sequence[int], budget_nbytes: int) -> tuple[int, int]:
    """Bytes of shards that could be leased together in the order of the model, and bytes of the arena for it."""
    classes = plan_size_classes([round_up(nbytes) for nbytes in shards], budget_nbytes)
    with closing(HostArena(None, _locking())) as arena, closing(BufferPool(arena, classes)) as pool:
        leased = (pool.try_lease(nbytes, "micro", "memory") for nbytes in shards)
        leases = list(itertools.takewhile(lambda lease: lease is not None, leased))
        held = sum(lease.nbytes for lease in leases), arena.nbytes_in_use
        for lease in leases:
            lease.release()
        return held


def _held_by_torch(shards: Sequence[int]) -> int:
    """Bytes that torch's pinned allocator takes from CUDA to hold every shard at once, by its own statistics."""
    torch.cuda.init()  # without it the statistics are empty
    torch._C._host_emptyCache()  # what is cached from earlier would be handed out again and not show as new
    before_nbytes = pinned_by_torch_nbytes()
    held = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for nbytes in shards]
    taken_nbytes = pinned_by_torch_nbytes() - before_nbytes
    held.clear()
    torch._C._host_emptyCache()
    return taken_nbytes
