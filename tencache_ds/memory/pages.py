# SPDX-License-Identifier: Apache-2.0
"""Page-aligned host memory from the operating system: plain, registered with CUDA, or locked by DeepSpeed.

[Note: exact and really freed] torch's pinned allocator rounds blocks up to powers of two and keeps freed ones; a Python
``mmap`` object cannot be unmapped while a tensor points into it. So pages come directly from ``mmap(2)`` and are
released directly with ``munmap(2)``: the resident size falls at once, and **touching a tensor after its pages were
released is a segmentation fault**, as in C. Only :class:`~tencache_ds.memory.arena.HostArena` calls this module.

[Note: children] ``fork`` (a data loader's workers, in every epoch) gives the child a copy of all private memory, lazily
where it can. For these pages that is costly or wrong, so most are hidden from children with ``MADV_DONTFORK``; a child
that touches them ends with a segmentation fault:

- registered with CUDA: the driver has pinned them for DMA, and the kernel copies pinned pages at once, in the fork: 4.6
  s and 8.4 GB for each worker with 8 GiB registered. Memory allocated by CUDA, as in stock, is not visible to children
  either.
- buffers of direct I/O, locked or not: while parent and child share a page, the first one to write gets a copy, and a
  request in flight reads or fills the other's ("O_DIRECT I/Os should never be run concurrently with the fork(2) system
  call, if the memory buffer is a private mapping", open(2)). And each write of the parent would fault and copy for as
  long as the workers live. Only this process uses these buffers.
- resident weights and gradients in plain pages stay with children: on the CPU accelerator they are the model's own
  tensors, which a worker may read, as in stock.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import functools
import logging
import mmap
import os
import resource
import weakref
from typing import Any, Protocol

import torch

from tencache_ds.errors import LockedMemoryError, MemoryLimitError
from tencache_ds.layout import round_up
from tencache_ds.limits import limit
from tencache_ds.tensors import empty, filled

logger = logging.getLogger("DeepSpeed.tencache.memory")

HUGE_PAGE_NBYTES = 2 << 20
_CAP_IPC_LOCK_BIT = 14
_MLOCK_ONFAULT = 1
_CUDA_ERROR_UNLOADING = 4  # cudaErrorCudartUnloading: the driver shut down first, nothing is registered any more


class Locking(enum.Enum):
    """How host pages are locked so that a device or the kernel can access them without a copy."""

    NONE = "none"
    """Plain pages, resident once touched; children created by ``fork`` get them if their owner wants it."""
    CUDA = "cuda"
    """Registered with ``cudaHostRegister``: resident, copies to and from the GPU run asynchronously at PCIe speed.
    Never in children."""
    MLOCK = "mlock"
    """Allocated and ``mlock``-ed by DeepSpeed's pin manager, so that its aio op takes them without a bounce copy.
    Never in children."""


class PageLocker(Protocol):
    """One way to get and release pages. Methods may be called from any thread."""

    name: str

    def lock(self, nbytes: int) -> torch.Tensor:
        """Return new page-aligned memory, uint8 of shape ``[nbytes]``; ``nbytes`` is a multiple of the page size.

        Raises:
            MemoryLimitError: there is not enough address space or memory.
            LockedMemoryError: the operating system or the driver refused to lock it.
        """

    def unlock(self, tensor: torch.Tensor) -> None:
        """Give back what :meth:`lock` returned; ``tensor`` must not be touched afterwards.

        Raises:
            LockedMemoryError: the driver refused; the pages then stay mapped.
        """

    def disown(self, tensor: torch.Tensor) -> None:
        """Unlock the memory that :meth:`lock` returned; the pages are freed with the last tensor that refers to them.

        Raises:
            LockedMemoryError: the driver refused; the pages then stay mapped.
            NotImplementedError: these pages have an owner who knows nothing of tensors.
        """


def open_page_locker(locking: Locking, *, inherited: bool = False) -> PageLocker:
    """Return the :class:`PageLocker` of ``locking``.

    Args:
        locking: how the pages are locked.
        inherited: whether plain pages are copied to children; see [Note: children].

    Raises:
        LockedMemoryError: CUDA was requested without a CUDA device.
        ConfigError: MLOCK was requested and DeepSpeed's pin_memory op cannot be loaded.
    """
    match locking:
        case Locking.NONE:
            return PlainPages(inherited=inherited)
        case Locking.CUDA:
            return CudaPages()
        case Locking.MLOCK:
            return DeepSpeedPages()


class PlainPages:
    """Anonymous private pages, in huge pages where the kernel has them."""

    name = "none"

    def __init__(self, *, inherited: bool = False) -> None:
        self._inherited = inherited
        # What torch's storage keeps alive: it goes when the last tensor over the pages does.
        self._keepers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def lock(self, nbytes: int) -> torch.Tensor:
        """See :meth:`PageLocker.lock`."""
        address = _map(nbytes)
        if not self._inherited:
            _keep_from_children(address, nbytes)
        keeper = (ctypes.c_ubyte * nbytes).from_address(address)
        self._keepers[address] = keeper
        return torch.frombuffer(keeper, dtype=torch.uint8)

    def unlock(self, tensor: torch.Tensor) -> None:
        """See :meth:`PageLocker.unlock`."""
        _unmap(tensor.data_ptr(), tensor.numel())

    def disown(self, tensor: torch.Tensor) -> None:
        """See :meth:`PageLocker.disown`."""
        address, nbytes = tensor.data_ptr(), tensor.numel()
        self._unregister(tensor)
        # At exit the pages go with the process; a daemon thread may still look at them until then.
        weakref.finalize(self._keepers.pop(address), _unmap_in, os.getpid(), address, nbytes).atexit = False

    def _unregister(self, tensor: torch.Tensor) -> None:
        """Ends the locking, which plain pages have none of."""


class CudaPages(PlainPages):
    """Plain pages registered with the CUDA driver, in the context of the device that is current in :meth:`lock`."""

    name = "cuda"

    def __init__(self) -> None:
        super().__init__(inherited=False)
        if not torch.cuda.is_available():
            raise LockedMemoryError(
                "host memory cannot be registered with CUDA: torch sees no CUDA device; run with a GPU or set "
                '"pin_memory": false'
            )
        self._cudart: Any = torch.cuda.cudart()

    def lock(self, nbytes: int) -> torch.Tensor:
        """See :meth:`PageLocker.lock`."""
        tensor = super().lock(nbytes)
        result = self._cudart.cudaHostRegister(tensor.data_ptr(), nbytes, 0)
        if int(result) != 0:
            super().unlock(tensor)
            self._forget_error()
            raise LockedMemoryError(
                f"cudaHostRegister of {nbytes} bytes failed: {self._cudart.cudaGetErrorString(result)}; give the host "
                'or container more memory, lower "tencache.staging_memory", or set "pin_memory": false'
            )
        return tensor

    def unlock(self, tensor: torch.Tensor) -> None:
        """See :meth:`PageLocker.unlock`."""
        self._unregister(tensor)
        super().unlock(tensor)

    def _unregister(self, tensor: torch.Tensor) -> None:
        result = self._cudart.cudaHostUnregister(tensor.data_ptr())
        if int(result) not in (0, _CUDA_ERROR_UNLOADING):
            raise LockedMemoryError(
                f"cudaHostUnregister of {tensor.numel()} bytes failed: {self._cudart.cudaGetErrorString(result)}; "
                "the memory stays mapped; an earlier CUDA error is the usual cause"
            )

    def _forget_error(self) -> None:
        """Let a throw-away kernel take the blame, or the next launch of a caller who can do without would get it."""
        with contextlib.suppress(RuntimeError):
            filled(1, 1.0, torch.float32, "cuda")


class DeepSpeedPages:
    """Pages of DeepSpeed's pin manager (``pin_memory`` op), which its aio op recognises."""

    name = "mlock"

    def __init__(self) -> None:
        from tencache_ds.ops.async_io import load_pin_memory  # imports deepspeed, which this module must not

        self._handle: Any = load_pin_memory().pin_handle()

    def lock(self, nbytes: int) -> torch.Tensor:
        """See :meth:`PageLocker.lock`. The C++ allocator would end the process where this raises."""
        prove_lockable(nbytes)
        tensor: torch.Tensor = self._handle.new_cpu_locked_tensor(nbytes, empty(0, torch.uint8))
        if tensor.data_ptr() == 0:
            raise _refusal(nbytes, "DeepSpeed's pin manager returned no memory")
        _keep_from_children(tensor.data_ptr(), nbytes)
        return tensor

    def unlock(self, tensor: torch.Tensor) -> None:
        """See :meth:`PageLocker.unlock`."""
        # The memory is malloc's: its next owner may need it in a child.
        _give_to_children(tensor.data_ptr(), tensor.numel())
        if not self._handle.free_cpu_locked_tensor(tensor):
            raise LockedMemoryError(f"DeepSpeed's pin manager does not know the {tensor.numel()} bytes to be freed")
        # The manager's memory is malloc's, which may keep freed memory for later.
        if hasattr(_libc(), "malloc_trim"):
            _libc().malloc_trim(0)

    def disown(self, tensor: torch.Tensor) -> None:
        """See :meth:`PageLocker.disown`: the pin manager frees memory on request, regardless of references."""
        raise NotImplementedError("memory of DeepSpeed's pin manager cannot be freed with its last tensor")


def locked_memory_headroom_nbytes() -> int | None:
    """Return how many more bytes this process may ``mlock``; None means unlimited.

    Reads ``RLIMIT_MEMLOCK``, and ``VmLck`` and ``CAP_IPC_LOCK`` of this process. Any thread may call it.
    """
    soft_limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        return headroom_nbytes(status.read(), soft_limit_nbytes)


def headroom_nbytes(status: str, soft_limit_nbytes: int) -> int | None:
    """Return what :func:`locked_memory_headroom_nbytes` does, from the text of ``/proc/self/status`` and the limit."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    may_exceed = bool(int(fields.get("CapEff", "0").strip(), 16) >> _CAP_IPC_LOCK_BIT & 1)
    if may_exceed or soft_limit_nbytes == resource.RLIM_INFINITY:
        return None
    locked_nbytes = int(fields.get("VmLck", "0 kB").split()[0]) * 1024
    return max(0, soft_limit_nbytes - locked_nbytes)


def prove_lockable(nbytes: int) -> None:
    """Raise :class:`LockedMemoryError` if ``nbytes`` more cannot be locked by this process.

    After the limits are read the kernel itself is asked: in a user namespace (rootless containers) a process can hold
    CAP_IPC_LOCK that does not count. ``MLOCK_ONFAULT`` takes the limit into account without touching a page.
    """
    headroom = locked_memory_headroom_nbytes()
    if headroom is not None and nbytes > headroom:
        raise _refusal(nbytes, f"{headroom} bytes are left of the limit")
    address = _map(nbytes)
    try:
        if _libc().mlock2(address, nbytes, _MLOCK_ONFAULT) != 0:
            raise _refusal(nbytes, os.strerror(ctypes.get_errno()))
    finally:
        _unmap(address, nbytes)


def _refusal(nbytes: int, cause: str) -> LockedMemoryError:
    soft_limit_nbytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft_limit_nbytes == resource.RLIM_INFINITY else f"{soft_limit_nbytes} bytes"
    return LockedMemoryError(
        f"cannot lock {nbytes} bytes of host memory: {cause} (RLIMIT_MEMLOCK is {limit}); raise it with "
        "`ulimit -l unlimited` (docker: `--ulimit memlock=-1`), or avoid locked memory: "
        '"pin_memory": false or "io_backend": "posix"'
    )


def discard(tensor: torch.Tensor) -> None:
    """Gives the whole pages under a contiguous tensor back to the system; those elements are zero from then on.

    For plain pages only: CUDA would keep transferring from and to the pages that a registered address had before.
    """
    start = round_up(tensor.data_ptr(), mmap.PAGESIZE)
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end and _libc().madvise(start, end - start, mmap.MADV_DONTNEED) != 0:
        logger.debug("%d bytes of host memory stay in use: %s", end - start, os.strerror(ctypes.get_errno()))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    )
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mlock2.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    return libc


def _map(nbytes: int) -> int:
    """Map ``nbytes`` of zeroed private memory and return its address; huge-page aligned where that is of use."""
    huge = nbytes >= HUGE_PAGE_NBYTES
    mapped_nbytes = nbytes + HUGE_PAGE_NBYTES if huge else nbytes
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, mapped_nbytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        cause = os.strerror(ctypes.get_errno())
        raise MemoryLimitError(
            f"cannot map {nbytes} bytes of host memory: {cause}; raise `ulimit -v` (now {limit(resource.RLIMIT_AS)}) "
            'or the memory of the host or container, or lower "tencache.host_memory" or "tencache.staging_memory"'
        )
    if not huge:
        return int(address)
    # The surplus is cut off again on both sides: the mapping stays exact.
    start = -(-address // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES
    if start > address:
        _unmap(address, start - address)
    surplus_nbytes = address + mapped_nbytes - (start + nbytes)
    if surplus_nbytes:
        _unmap(start + nbytes, surplus_nbytes)
    if _libc().madvise(start, nbytes, mmap.MADV_HUGEPAGE) != 0 and ctypes.get_errno() != errno.EINVAL:
        logger.debug("no huge pages for %d bytes: %s", nbytes, os.strerror(ctypes.get_errno()))
    return int(start)


def _keep_from_children(address: int, nbytes: int) -> None:
    """Leave whole pages out of what ``fork`` copies. Ends with their mapping, or with :func:`_give_to_children`."""
    if _libc().madvise(address, nbytes, mmap.MADV_DONTFORK) != 0:
        logger.warning("every fork copies %d bytes of host memory: %s", nbytes, os.strerror(ctypes.get_errno()))


def _give_to_children(address: int, nbytes: int) -> None:
    if _libc().madvise(address, nbytes, mmap.MADV_DOFORK) != 0:
        logger.warning(
            "%d bytes of host memory are not mapped in child processes: %s", nbytes, os.strerror(ctypes.get_errno())
        )


def _unmap_in(pid: int, address: int, nbytes: int) -> None:
    """In a child created by ``fork`` the range may belong to something else by now."""
    if os.getpid() == pid:
        _unmap(address, nbytes)


def _unmap(address: int, nbytes: int) -> None:
    if _libc().munmap(address, nbytes) != 0:
        raise MemoryLimitError(f"munmap of {nbytes} bytes failed: {os.strerror(ctypes.get_errno())}")
