# SPDX-License-Identifier: Apache-2.0
"""The only source of a rank's host memory: exact, page-aligned, under one limit, accounted by purpose; with zeroed
tensors in it, counted as they come and go. Torch's own cache of pinned memory can be emptied. And device memory for
staging, the target of GPUDirect Storage reads.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.memory.pages import Locking, PageLocker, locked_memory_headroom_nbytes, open_page_locker
from tencache_ds.tensors import empty

logger = logging.getLogger("DeepSpeed.tencache.memory")

__all__ = ["POISON_BYTE", "HostArena", "Locking", "PageLocker", "locked_memory_headroom_nbytes", "untouched_zeros"]

POISON_BYTE = 0xCB
"""The fill pattern of fresh and freed memory under ``poison=True``."""


def untouched_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A 1-D tensor of zeros in untouched pages, on huge pages where available. They are unmapped with the last
    tensor that refers to them; children created by ``fork`` get copies.

    ``torch.zeros`` writes every byte, on one thread. Here the first writer makes the pages, on all of its threads.
    """
    arena = HostArena(None, Locking.NONE, inherited=True)
    memory = arena.allocate(max(numel * dtype.itemsize, 1), "zeros")
    arena.disown()
    return memory[: numel * dtype.itemsize].view(dtype)


_kept_blocks: list[tuple[PageLocker, torch.Tensor]] = []
"""Memory that devices may still touch, and who would free it when garbage-collected: kept until the process ends."""


@dataclass(frozen=True, slots=True)
class _Block:
    tensor: torch.Tensor
    nbytes: int
    purpose: str


class HostArena:
    """Exactly sized, page-aligned host memory of one rank, under one limit.

    Memory is released by :meth:`free` or :meth:`close`, never by garbage collection: a copy or a disk request in flight
    holds no reference visible to Python. Only :meth:`leave` and :meth:`disown` leave it to the remaining references.

    Every method may be called from any thread; with ``Locking.CUDA`` the caller's current device is the one that the
    memory is registered with. In a forked child the arena is inert: it gives out nothing, and :meth:`free` and
    :meth:`close` do nothing.

    Args:
        limit_nbytes: largest number of bytes in use at a time; None for no limit.
        locking: how the pages are locked.
        inherited: whether children created by ``fork`` get a copy of plain pages; those of I/O buffers must not be, and
            locked ones never are. See [Note: children] in :mod:`~tencache_ds.memory.pages`.
        poison: for tests: fill new memory with :data:`POISON_BYTE`, and on :meth:`free` fill it again and keep it
            mapped until :meth:`close`, so that a late reader sees poison instead of ending the process.

    Raises:
        LockedMemoryError: there is no CUDA device to register memory with.
        ConfigError: DeepSpeed's pin_memory op is needed and cannot be loaded.
    """

    def __init__(
        self, limit_nbytes: int | None, locking: Locking, *, inherited: bool = False, poison: bool = False
    ) -> None:
        if limit_nbytes is not None and limit_nbytes < 0:
            raise ValueError(f"limit_nbytes must not be negative, got {limit_nbytes}")
        self.limit_nbytes = limit_nbytes
        self.locking = locking
        self._poison = poison
        self._locker: PageLocker = open_page_locker(locking, inherited=inherited)
        self._pid = os.getpid()
        # Held for bookkeeping only, never while the system or CUDA is called; no other lock is taken under it.
        self._lock = threading.Lock()
        self._blocks: dict[int, _Block] = {}  # by address
        self._kept: set[int] = set()  # addresses of blocks that close() leaves mapped
        self._quarantine: list[torch.Tensor] = []
        self._nbytes_in_use = 0
        self._nbytes_peak = 0
        self._closed = False

    @property
    def nbytes_in_use(self) -> int:
        """Bytes allocated and not freed."""
        return self._nbytes_in_use

    @property
    def nbytes_peak(self) -> int:
        """Largest :attr:`nbytes_in_use` so far."""
        return self._nbytes_peak

    @property
    def nbytes_locked(self) -> int:
        """Bytes in use that are locked or registered: all of them, or none with ``Locking.NONE``."""
        return 0 if self.locking is Locking.NONE else self._nbytes_in_use

    def by_purpose(self) -> dict[str, int]:
        """Return the bytes in use per purpose."""
        totals: dict[str, int] = {}
        with self._lock:
            for block in self._blocks.values():
                totals[block.purpose] = totals.get(block.purpose, 0) + block.nbytes
        return totals

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        """Return new memory: uint8, shape ``[nbytes rounded up to 4096]``, page aligned.

        Args:
            nbytes: bytes needed, at least 1.
            purpose: what for, in errors and in :meth:`by_purpose`.

        Raises:
            MemoryLimitError: it does not fit the limit, or the system has no such memory.
            LockedMemoryError: the memory cannot be locked or registered.
            ValueError: ``nbytes`` is not positive, or the arena is closed or another process's.
        """
        if os.getpid() != self._pid:  # before any lock: a thread that does not exist here may hold it indefinitely
            raise ValueError(f"cannot allocate {nbytes} bytes for {purpose}: the arena belongs to process {self._pid}")
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes for {purpose}: at least 1 is needed")
        rounded_nbytes = round_up(nbytes)
        with self._lock:
            if self._closed:
                raise ValueError(f"cannot allocate {nbytes} bytes for {purpose}: the arena is closed")
            if self.limit_nbytes is not None and self._nbytes_in_use + rounded_nbytes > self.limit_nbytes:
                raise MemoryLimitError(
                    f"{purpose} needs {rounded_nbytes} bytes of host memory, but {self._nbytes_in_use} of the limit of "
                    f'{self.limit_nbytes} are in use; raise "tencache.staging_memory" by '
                    f"{self._nbytes_in_use + rounded_nbytes - self.limit_nbytes} bytes or more"
                )
            self._nbytes_in_use += rounded_nbytes
            self._nbytes_peak = max(self._nbytes_peak, self._nbytes_in_use)
        try:
            # A tensor born in inference mode could never be written outside it.
            with torch.inference_mode(False):
                tensor = self._locker.lock(rounded_nbytes)
                if self._poison:
                    tensor.fill_(POISON_BYTE)
        except BaseException:
            with self._lock:
                self._nbytes_in_use -= rounded_nbytes
            raise
        with self._lock:
            closed = self._closed
            if not closed:
                self._blocks[tensor.data_ptr()] = _Block(tensor, rounded_nbytes, purpose)
        if closed:
            self._locker.unlock(tensor)
            raise ValueError(f"cannot allocate {nbytes} bytes for {purpose}: the arena was closed meanwhile")
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Unregister and unmap what :meth:`allocate` returned, at once.

        The caller makes sure that nothing reads or writes it any more. Touching it, or a view of it, afterwards is a
        bug and ends in a segmentation fault.

        Raises:
            ValueError: ``tensor`` is not the start of memory in use here (freed before, a view, another arena's).
            LockedMemoryError: the driver refused; the memory then stays mapped and in use.
        """
        self._part_with(tensor, self._release)

    def _part_with(self, tensor: torch.Tensor, give_up: Callable[[_Block], None]) -> None:
        if os.getpid() != self._pid:  # a mapping at that address in a child, if any, is not ours
            return
        address = tensor.data_ptr()
        with self._lock:
            block = self._blocks.pop(address, None)
            was_kept = address in self._kept
            self._kept.discard(address)
        if block is None:
            raise ValueError("this tensor is not memory of the arena: it was freed before, or is a view into a block")
        try:
            give_up(block)
        except BaseException:
            with self._lock:
                self._blocks[address] = block
                if was_kept:
                    self._kept.add(address)
            raise
        with self._lock:
            self._nbytes_in_use -= block.nbytes

    def leave(self, tensor: torch.Tensor) -> None:
        """Unregister what :meth:`allocate` returned; its pages are freed with the last tensor that refers to them.

        The caller ensures that no device still reads or writes it.

        Raises:
            ValueError: as for :meth:`free`.
            LockedMemoryError: the driver refused; the memory then stays mapped and in use.
            NotImplementedError: not with ``Locking.MLOCK``.
        """
        self._part_with(tensor, lambda block: self._locker.disown(block.tensor))

    def keep(self, tensor: torch.Tensor, owner: str) -> None:
        """Leak what :meth:`allocate` returned, on purpose: :meth:`close` leaves it mapped. Says so in the log, once.

        For memory of a request that a device has not answered: a late transfer must not land in memory that has been
        reused. :meth:`free` still releases it, should the request end after all.

        Args:
            tensor: the block.
            owner: whose bytes the device has, for the log.

        Raises:
            ValueError: as for :meth:`free`.
        """
        address = tensor.data_ptr()
        with self._lock:
            block = self._blocks.get(address)
            if block is None:
                raise ValueError("this tensor is not memory of the arena: it was freed before, or is a view of a block")
            if address in self._kept:
                return
            self._kept.add(address)
        _kept_blocks.append((self._locker, block.tensor))
        logger.warning(
            "%d bytes of host memory stay mapped until the process ends: a device has not responded, and may still "
            "write to those of %s",
            block.nbytes,
            owner,
        )

    def keep_all(self, owner: str) -> None:
        """:meth:`keep` every block."""
        with self._lock:
            blocks = list(self._blocks.values())
        for block in blocks:
            self.keep(block.tensor, owner)

    def close(self) -> None:
        """Frees everything that is not kept. Idempotent; later allocations raise; the same care as for :meth:`free`.

        Raises:
            LockedMemoryError: the driver refused some of it (the first refusal, after all blocks were tried).
        """
        self._end(self._locker.unlock)

    def disown(self) -> None:
        """Unregister everything; the pages of each block are freed with the last tensor that refers to them.
        Idempotent.

        For memory that may have been exposed to users: a tensor in it stays valid as long as it is referenced. The
        caller ensures that no device still reads or writes it. Later allocations raise.

        Raises:
            LockedMemoryError: the driver refused some of it (the first refusal, after all blocks were tried).
            NotImplementedError: not with ``Locking.MLOCK``.
        """
        self._end(self._locker.disown)

    def _end(self, give_up: Callable[[torch.Tensor], None]) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            blocks = [block for address, block in self._blocks.items() if address not in self._kept]
            self._blocks = {address: self._blocks[address] for address in self._kept}
            quarantine, self._quarantine = self._quarantine, []
            self._nbytes_in_use = sum(block.nbytes for block in self._blocks.values())
        errors: list[Exception] = []
        for tensor in [block.tensor for block in blocks] + quarantine:
            try:
                give_up(tensor)
            except MemoryLimitError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _release(self, block: _Block) -> None:
        if self._poison:
            block.tensor.fill_(POISON_BYTE)
            with self._lock:
                self._quarantine.append(block.tensor)
        else:
            self._locker.unlock(block.tensor)


class HostTensors:
    """Zeroed tensors in the memory of an arena, counted as they come and go. Not thread-safe.

    Args:
        arena: whose memory it is.
        purpose: what for, in errors and reports.
        count: called with the bytes taken, or given back (negative).
    """

    def __init__(self, arena: HostArena, purpose: str, count: Callable[[int], None]) -> None:
        self._arena = arena
        self._purpose = purpose
        self._count = count

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed 1-D tensor.

        Raises:
            MemoryLimitError, LockedMemoryError: the arena has no such memory.
        """
        nbytes = numel * dtype.itemsize
        memory = self._arena.allocate(max(nbytes, 1), self._purpose)
        self._count(nbytes)
        return memory.zero_()[:nbytes].view(dtype)

    def give_back(self, tensor: torch.Tensor) -> None:
        """A whole tensor of :meth:`take` is not needed any more; its pages go with the last reference to them. No
        device may still access it.

        Raises:
            LockedMemoryError: the driver refused; the memory stays mapped.
        """
        self._arena.leave(tensor)
        self._count(-tensor.nbytes)


def empty_pinned_cache() -> None:
    """Returns host memory to the system that torch has pinned and nothing uses any more. Any thread.

    Torch keeps such memory for the next tensor of that size, rounded up to a power of two. After shards have moved
    elsewhere their size is not requested again. Builds of torch that cannot return it keep it.
    """
    if not torch.cuda.is_available():
        return
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


# Device memory for staging


_kept_segments: list[torch.Tensor] = []
"""Memory that storage may still write to, for the life of the process."""


class DeviceArena:
    """Page-aligned memory of one device from torch's allocator. Any thread may call.

    [Note: quiet device memory] Storage writes to device memory behind the back of every stream. So memory must be
    *quiet* when it is passed to a request: no kernel or copy that touches it is pending on any stream. Three rules
    ensure this. Memory from this arena is quiet, although torch's allocator may have taken it from a tensor with work
    in flight. A lease is released with :meth:`~tencache_ds.memory.lease.Lease.release_after`, an event recorded after
    its last reader, and its slot is leased again only when that event has completed. And a pool that poisons its slots
    waits for the fill. The opposite direction needs no rule: when a request is done, its bytes are visible to every
    stream.

    Args:
        device: where; on a CPU it is ordinary memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._blocks: dict[int, torch.Tensor] = {}  # by address

    def allocate(self, nbytes: int, purpose: str) -> torch.Tensor:
        """New quiet memory: uint8, shape ``[nbytes rounded up to 4096]``, page aligned. Waits for the current stream.

        Raises:
            MemoryLimitError: the device has no such memory.
            ValueError: ``nbytes`` is not positive.
        """
        if nbytes <= 0:
            raise ValueError(f"cannot allocate {nbytes} bytes for {purpose}: at least 1 is needed")
        rounded_nbytes = round_up(nbytes)
        try:
            with torch.inference_mode(False):
                memory = empty(rounded_nbytes + PAGE_NBYTES, torch.uint8, self.device)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"{purpose} needs {rounded_nbytes} bytes of GPU memory, which {self.device} does not have; lower "
                '"tencache.gds_memory" or set "tencache.gds" to "off"'
            ) from error
        start = -memory.data_ptr() % PAGE_NBYTES
        block = memory[start : start + rounded_nbytes]
        wait_for_device(block)
        with self._lock:
            self._blocks[block.data_ptr()] = block
        return block

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory in use here."""
        address = tensor.data_ptr()
        with self._lock:
            return any(start <= address < start + block.numel() for start, block in self._blocks.items())

    def free(self, tensor: torch.Tensor) -> None:
        """Gives memory back to torch's allocator. Nothing may be pending on it on another stream than the current one.

        Raises:
            ValueError: not the start of memory in use here.
        """
        with self._lock:
            if self._blocks.pop(tensor.data_ptr(), None) is None:
                raise ValueError("this tensor is not memory of the arena: it was freed before, or is a view of a block")

    def keep(self, tensor: torch.Tensor, owner: str) -> None:
        """Keeps memory from torch's allocator until the process ends. Says so in the log.

        Args:
            tensor: the block.
            owner: whose bytes a device may still write, for the log.
        """
        _kept_segments.append(tensor)
        logger.warning(
            "%d bytes of memory of %s stay allocated until the process ends: a device has not responded, and may "
            "still write to those of %s",
            tensor.numel(),
            self.device,
            owner,
        )

    def close(self) -> None:
        """Gives everything back. Idempotent. The same care as for :meth:`free` applies."""
        with self._lock:
            self._blocks.clear()


def wait_for_device(tensor: torch.Tensor) -> None:
    """Waits for the current stream of the device a tensor is on; does nothing for host memory."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
