# SPDX-License-Identifier: Apache-2.0
"""The speed of a machine, in bytes and parameters per second: measured by the probe, used by the planner."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from tencache_ds.profiling.filesystem import MEMORY_FILE_SYSTEMS

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Per second. Times are amounts divided by it, so zero is an error and "unknown" is None."""


class StorageRates(BaseModel):
    """Sustained rates of one NVMe path, with direct I/O, at the best number of requests in flight that was tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    read_bytes_per_s: Rate
    write_bytes_per_s: Rate
    mixed_bytes_per_s: Rate
    """Reads and writes of equal size together, both counted."""

    request_nbytes: int
    lanes: int
    """Requests in flight at which the best mixed rate was seen."""

    direct: bool
    """Whether the file system took O_DIRECT; if not, the page cache was part of the measurement."""

    filesystem: str
    """Its type, such as "ext4" or "tmpfs"."""

    device: str = ""
    """Model of the block device, where the system names it."""

    @property
    def in_memory(self) -> bool:
        """Whether the files are in host memory, used in place of a drive."""
        return self.filesystem in MEMORY_FILE_SYSTEMS


class Hardware(BaseModel):
    """One machine. Rates are per host (storage, CPU) and per GPU (copies, GPU Adam, matmul).

    Values that were not measured or do not exist are None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: int
    """Cores this process may use."""

    memory_nbytes: int
    """RAM, or the limit of the container of the measurement, if that is less."""

    gpu: str | None = None
    gpus: int = 0
    gpu_memory_nbytes: int | None = None
    storage: StorageRates | None = None
    h2d_bytes_per_s: Rate | None = None
    d2h_bytes_per_s: Rate | None = None
    """Pinned memory."""

    memory_copy_bytes_per_s: Rate | None = None
    """Host memory copied on all cores: bytes read plus bytes written."""

    cpu_adam_params_per_s: Rate | None = None
    """DeepSpeedCPUAdam on fp32 state, with the threads it would use in training."""

    gpu_adam_params_per_s: Rate | None = None
    matmul_flops_per_s: Rate | None = None
    """bf16 (fp32 accumulation), on the device that trains."""

    probe_s: float = 0.0
    """How long the measurement took."""
