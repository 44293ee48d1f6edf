# SPDX-License-Identifier: Apache-2.0
"""Checks of requests that all backends share, and the errors of failed ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import torch

from tencache_ds.errors import SpaceError, StorageError
from tencache_ds.io.backends.ticket import (
    Operation,
    StorageCancelledError,
    StorageGivenUpError,
    StorageTimeoutError,
    Ticket,
)
from tencache_ds.limits import remedy


def check_request(offset: int, buffer: torch.Tensor, alignment_nbytes: int, device_type: str | None = "cpu") -> None:
    """Checks the requirements of O_DIRECT, with a message that gives the offending values.

    Args:
        offset, buffer, alignment_nbytes: the request, and its required alignment.
        device_type: required device of the buffer; None for no check.

    Raises:
        ValueError: the buffer is not a non-empty, aligned, 1-D contiguous uint8 tensor on that device, or the offset is
            negative or unaligned.
    """
    if not isinstance(buffer, torch.Tensor):
        raise ValueError(f"buffer must be a torch.Tensor, not {type(buffer).__name__}")
    if buffer.dtype is not torch.uint8 or device_type not in (None, buffer.device.type) or buffer.dim() != 1:
        where = "" if device_type is None else f" on the {device_type.upper()}"
        raise ValueError(
            f"buffer must be a 1-D uint8 tensor{where}, not {buffer.dim()}-D {buffer.dtype} on {buffer.device}"
        )
    if not buffer.is_contiguous():
        raise ValueError(f"buffer must be contiguous, not of stride {buffer.stride()}")
    nbytes = buffer.numel()
    if nbytes == 0 or nbytes % alignment_nbytes:
        raise ValueError(f"buffer length must be a positive multiple of {alignment_nbytes} bytes, not {nbytes}")
    if buffer.data_ptr() % alignment_nbytes:
        raise ValueError(f"buffer address must be a multiple of {alignment_nbytes}, not {buffer.data_ptr():#x}")
    if offset < 0 or offset % alignment_nbytes:
        raise ValueError(f"file offset must be a non-negative multiple of {alignment_nbytes}, not {offset}")


def admit(
    operation: Operation,
    path: str,
    offset: int,
    buffer: torch.Tensor,
    tag: str,
    *,
    pid: int,
    alignment_nbytes: int,
    device_type: str = "cpu",
) -> Ticket:
    """The ticket of a request to a backend that process ``pid`` opened. Takes no lock: in a forked child a lock may be
    held indefinitely by a thread that does not exist there.

    Raises:
        ValueError: see :func:`check_request`.
        StorageError: this is a forked child of that process.
    """
    check_request(offset, buffer, alignment_nbytes, device_type)
    ticket = Ticket(operation, path, offset, buffer.numel(), tag)
    if os.getpid() != pid:
        cause = f"opened by process {pid}, used in its forked child {os.getpid()}; open a new one there"
        raise refusal(ticket, cause)
    return ticket


def refusal(ticket: Ticket, cause: str) -> StorageError:
    """The error of a request that no device has seen."""
    return ticket.failure(cause, StorageError)


def cancelled(ticket: Ticket) -> StorageCancelledError:
    """The error of a request that was cancelled."""
    return ticket.failure("cancelled", StorageCancelledError, errno.ECANCELED)


def given_up(ticket: Ticket) -> StorageGivenUpError:
    """The error of a request that the device had not finished when its backend had to close."""
    cause = "given up: the device had not finished it when the backend had to close"
    return ticket.failure(cause, StorageGivenUpError, errno.ETIMEDOUT)


def never_finished(stuck: Sequence[Ticket], timeout_s: float) -> StorageTimeoutError:
    """The error of a backend that closed without these."""
    cause = (
        f"the device had not finished it and {len(stuck) - 1} other requests {timeout_s} s after the backend was "
        "closed; the device hangs or is lost (see dmesg)"
    )
    return stuck[0].failure(cause, StorageTimeoutError, errno.ETIMEDOUT)


def storage_error(operation: Operation, path: str, offset: int, nbytes: int, error: OSError, tag: str) -> StorageError:
    """The typed error for an error of the operating system."""
    kind = SpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
    cause = f"{error.strerror or error}{remedy(error.errno)}"
    return kind(operation.value, path, offset, nbytes, cause, errno=error.errno, tag=tag)
