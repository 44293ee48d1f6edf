# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed leaves in shared memory without a GPU."""

from __future__ import annotations

from pathlib import Path


def remove_shared_buffers(port: int | str) -> None:
    """Removes those of a job that has ended. DeepSpeed's op for collectives on one host leaves its buffers behind, 67
    MB of RAM a rank, named after the port at which the ranks met."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink(missing_ok=True)
