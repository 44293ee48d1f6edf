# SPDX-License-Identifier: Apache-2.0
"""Memory of the compute device for staging: the target of GPUDirect Storage reads."""

from __future__ import annotations

import logging
import threading

import torch

from tencache_ds.errors import MemoryLimitError
from tencache_ds.layout import PAGE_NBYTES, round_up
from tencache_ds.tensors import empty

logger = logging.getLogger("DeepSpeed.tencache.memory")

_kept: list[torch.Tensor] = []
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
        _kept.append(tensor)
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
