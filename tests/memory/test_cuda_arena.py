# SPDX-License-Identifier: Apache-2.0
"""Registered memory and event-gated returns on a real GPU: stream races do not show on the CPU accelerator.

The GPU is kept busy (``torch.cuda._sleep``) so that every copy is still in flight when its lease is given back. Each
race test has a control that gives the slot back too early and must then find poison: it shows that the test can see.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tencache_ds.errors import LockedMemoryError
from tencache_ds.memory import BufferPool, HostArena, Lease, Locking
from tencache_ds.memory.arena import POISON_BYTE
from tencache_ds.planning.size_classes import SizeClass

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

MIB = 1 << 20
SLOT_NBYTES = 4 * MIB
BUSY_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture
def arena() -> Iterator[HostArena]:
    arena = HostArena(None, Locking.CUDA)
    yield arena
    torch.cuda.synchronize()
    arena.close()


@pytest.fixture
def pool(arena: HostArena) -> Iterator[BufferPool]:
    pool = BufferPool(arena, [SizeClass(SLOT_NBYTES, 2)], poison=True)
    yield pool
    pool.close(timeout_s=30)


def recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def test_memory_is_pinned_exact_and_unpinned_again(arena: HostArena) -> None:
    tensor = arena.allocate(65 * MIB + 1, "staging")
    assert tensor.numel() == 65 * MIB + 4096
    assert tensor.is_pinned()
    assert tensor[5 * MIB : 6 * MIB].view(torch.float32).is_pinned()
    assert arena.nbytes_locked == tensor.numel()
    address = tensor.data_ptr()
    arena.free(tensor)
    again = arena.allocate(65 * MIB + 1, "staging")  # the same addresses can be registered again
    assert again.is_pinned()
    assert arena.nbytes_in_use == again.numel()
    assert address % 4096 == 0


def test_a_fork_neither_copies_registered_memory_nor_takes_time(arena: HostArena) -> None:
    host = arena.allocate(2 << 30, "resident weights")
    host.fill_(3)
    pattern = torch.full((SLOT_NBYTES,), 5, dtype=torch.uint8, device="cuda")
    wake, awake = os.pipe()
    t_start_s = time.perf_counter()
    child = os.fork()
    if child == 0:  # a data loader's worker: touches neither CUDA nor the arena's memory
        os.read(wake, 1)
        os._exit(0)
    seconds = time.perf_counter() - t_start_s
    with open(f"/proc/{child}/statm", encoding="ascii") as statm:
        child_nbytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    with open("/proc/self/statm", encoding="ascii") as statm:
        own_nbytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    host[:SLOT_NBYTES].copy_(pattern, non_blocking=True)  # while the child lives, DMA still reaches the parent's pages
    torch.cuda.synchronize()
    os.write(awake, b"x")
    _, status = os.waitpid(child, 0)
    os.close(wake)
    os.close(awake)
    assert os.waitstatus_to_exitcode(status) == 0
    assert bool((host[:SLOT_NBYTES] == 5).all())
    assert bool((host[SLOT_NBYTES:] == 3).all())
    assert torch.equal(host[: 2 * SLOT_NBYTES].to("cuda").cpu(), host[: 2 * SLOT_NBYTES])
    assert own_nbytes - child_nbytes > (2 << 30) - 256 * MIB, "the child has a copy"
    assert seconds < 0.05


class RefusingCudart:
    """The real runtime, asked to register with flags that it refuses."""

    def __init__(self) -> None:
        self._real: Any = torch.cuda.cudart()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        return self._real.cudaHostRegister(address, nbytes, 0xFFFF)

    def cudaGetErrorString(self, result: Any) -> str:
        return str(self._real.cudaGetErrorString(result))


def test_a_refusal_is_an_error_here_and_not_in_the_next_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = RefusingCudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: refusing)
    arena = HostArena(None, Locking.CUDA)
    with pytest.raises(LockedMemoryError, match=r"cudaHostRegister of 4096 bytes failed: \w+"):
        arena.allocate(4096, "staging")
    assert arena.nbytes_in_use == 0
    assert (torch.ones(4, device="cuda") + 1).tolist() == [2.0] * 4


@pytest.mark.parametrize("to_gpu", [True, False])
def test_copies_do_not_block_the_host(arena: HostArena, to_gpu: bool) -> None:
    host = arena.allocate(64 * MIB, "staging")
    device = torch.empty(host.numel(), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(20 * BUSY_CYCLES)
    if to_gpu:
        device.copy_(host, non_blocking=True)
    else:
        host.copy_(device, non_blocking=True)
    event = recorded(torch.cuda.current_stream())
    assert not event.query()
    event.synchronize()
    assert torch.equal(device.cpu(), host)


def copy_patterns(
    pool: BufferPool,
    n_copies: int,
    give_back: Callable[[Lease, torch.cuda.Event], None],
    first_cycles: int = BUSY_CYCLES,
) -> list[tuple[int, torch.Tensor]]:
    """Copy patterns to the GPU through the pool, each copy queued behind a busy GPU, which before the first one is busy
    for ``first_cycles``; return pattern and copy."""
    stream = torch.cuda.Stream()
    # A first use loads the kernel, and takes memory from the driver, either of which may wait for the GPU.
    torch.cuda._sleep(1)
    with torch.cuda.stream(stream):
        reserve = torch.empty(n_copies * SLOT_NBYTES, dtype=torch.uint8, device="cuda")
    del reserve
    torch.cuda.synchronize()
    copies = []
    for i in range(n_copies):
        lease = pool.lease(SLOT_NBYTES, f"weight {i}", "to GPU", timeout_s=30)
        pattern = i % 200 + 1
        lease.buffer.fill_(pattern)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES if copies else first_cycles)
            device = lease.buffer.to("cuda", non_blocking=True)
        copies.append((pattern, device))
        give_back(lease, recorded(stream))
    torch.cuda.synchronize()
    return copies


def test_a_slot_is_not_reused_before_its_copy_to_the_gpu_is_done(pool: BufferPool) -> None:
    # The first copies wait for so long that the host asks for a third slot meanwhile, however slow its calls are.
    copies = copy_patterns(pool, 60, lambda lease, event: lease.release_after(event), 100 * BUSY_CYCLES)
    wrong = [i for i, (pattern, device) in enumerate(copies) if not bool((device == pattern).all())]
    assert wrong == [], "copies with another pattern"
    assert pool.stats().n_waits > 0, "no lease had to wait"
    pool.drain(timeout_s=30)
    pool.assert_idle()


def test_control_a_slot_given_back_too_early_reads_as_poison(pool: BufferPool) -> None:
    copies = copy_patterns(pool, 4, lambda lease, event: lease.release())
    assert any(bool((device == POISON_BYTE).any()) for _, device in copies)


def test_a_slot_is_not_poisoned_before_its_copy_from_the_gpu_is_done(pool: BufferPool) -> None:
    stream = torch.cuda.Stream()
    device = torch.zeros(SLOT_NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for i in range(40):
        lease = pool.lease(SLOT_NBYTES, f"gradient {i}", "from GPU", timeout_s=30)
        # Had the previous user's copy come late, it would show here as zeros over the poison.
        assert bool((lease.buffer == POISON_BYTE).all())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(BUSY_CYCLES)
            lease.buffer.copy_(device, non_blocking=True)
        lease.release_after(recorded(stream))
    pool.drain(timeout_s=30)
    pool.assert_idle()


def test_threads_with_streams_of_their_own_share_a_pool(pool: BufferPool) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream()
            for i in range(30):
                lease = pool.lease(SLOT_NBYTES, f"thread {seed}", "both ways", timeout_s=60)
                pattern = (seed * 30 + i) % 200 + 1
                lease.buffer.fill_(pattern)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(BUSY_CYCLES // 10)
                    device = lease.buffer.to("cuda", non_blocking=True)
                    lease.release_after(recorded(stream))
                    if not bool((device == pattern).all()):
                        wrong.append(f"thread {seed}, copy {i}")
        except BaseException as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert wrong == []
    pool.drain(timeout_s=30)
    pool.assert_idle()
