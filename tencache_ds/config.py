# SPDX-License-Identifier: Apache-2.0
"""The options a user may write under ``"tencache"`` in ``ds_config.json``, with every default explained.

Existing DeepSpeed options are not repeated here: ``offload_*.nvme_path``, ``offload_*.pin_memory`` and the ``aio``
section mean the same as for ZeRO-Infinity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import BeforeValidator, Field, PlainValidator, ValidationError, field_validator

from tencache_ds.errors import ConfigError
from tencache_ds.keys import OPTIONS_KEY
from tencache_ds.spelling import did_you_mean

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)\s*")


LARGEST_SIZE_NBYTES = 2**60
LEAST_HOST_MEMORY_NBYTES = 2**16


def parse_size(value: object) -> int:
    """Bytes of ``4294967296``, ``4e9``, ``"4GiB"`` or ``"4 GB"``.

    Raises:
        ValueError: not a size, negative, a part of a byte, or more than an exbibyte.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not a size: write a number of bytes or a string such as '4GiB'")
    unit = 1
    number: int | float
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match.group(2).upper() not in _UNITS:
            raise ValueError(f"{value!r} is not a size: write a number of bytes or a string such as '4GiB' or '500MB'")
        unit = _UNITS[match.group(2).upper()]
        number = float(match.group(1)) * unit
    else:
        number = value
    if not 0 <= number <= LARGEST_SIZE_NBYTES:
        raise ValueError(f"a size cannot be {value!r}: it is from 0 to 1024 PiB")
    if (unit == 1 and number != int(number)) or 0 < number < 1:
        raise ValueError(f"{value!r} is not a whole number of bytes: write a unit, as in '4GiB'")
    return int(number)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the memory that there is.

    Attributes:
        fraction: from 0 to 1.
    """

    fraction: float


def parse_size_or_share(value: object) -> int | Share:
    """Bytes as :func:`parse_size` has them, or the share ``"60%"``.

    Raises:
        ValueError: neither, or more than the whole.
    """
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return parse_size(value)
    percent = float(match.group(1))
    if percent > 100:
        raise ValueError(f"{value!r} is out of range: a share is from 0% to 100%")
    return Share(percent / 100) if percent else 0


def parse_host_share(value: object) -> int | Share:
    """Bytes as :func:`parse_host_memory` has them, or a share.

    Raises:
        ValueError: neither, or too few bytes to be meant.
    """
    found = parse_size_or_share(value)
    return found if isinstance(found, Share) else parse_host_memory(found)


def parse_host_memory(value: object) -> int:
    """A size that is 0, or large enough to hold a weight.

    Raises:
        ValueError: not a size, or too few bytes to be meant.
    """
    nbytes = parse_size(value)
    if 0 < nbytes < LEAST_HOST_MEMORY_NBYTES:
        raise ValueError(
            f"{nbytes} bytes cannot hold a weight: write a unit, as in '{nbytes}GiB', or 0 to move all but gradients "
            "to NVMe"
        )
    return nbytes


def refuse_boolean(value: object) -> object:
    """Passes on what may be a number; true and false, which Python counts as 1 and 0, may not.

    Raises:
        ValueError: a boolean.
    """
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
SizeOrShare = Annotated[int | Share, PlainValidator(parse_size_or_share)]
HostMemory = Annotated[int | Share, PlainValidator(parse_host_share)]


class IoBackend(StrEnum):
    """Which mechanism moves bytes between host memory and NVMe."""

    auto = "auto"
    """``native`` where it builds; else ``aio`` where DeepSpeed's op builds and takes our buffers as they are; else
    ``posix``. The reason is logged."""

    native = "native"
    """TenCache's own op on libaio: native lanes, every result checked, urgent reads before background traffic."""

    aio = "aio"
    """Lanes of DeepSpeed's ``aio_handle`` (libaio)."""

    posix = "posix"
    """``preadv``/``pwritev`` with O_DIRECT where the file system allows it; needs no libaio."""


class Gds(StrEnum):
    """Whether weights are read from NVMe straight into GPU memory (GPUDirect Storage, through KvikIO)."""

    auto = "auto"
    """Where a round trip at the start was right and faster than pinned host memory. The reason is logged."""

    on = "on"
    """Wherever a round trip is right, in KvikIO's compatibility mode too."""

    off = "off"
    """Never; KvikIO is not imported."""


class Verify(StrEnum):
    """How data read back from NVMe is compared with the data written."""

    off = "off"
    sampled = "sampled"
    """One word of every 4 KiB page is remembered at each write and compared at the next read: finds every lost, torn or
    misplaced write."""

    full = "full"
    """A hash (XXH3) of every byte instead: finds a flipped bit as well, for a pass over memory per write and read."""


class Log(StrEnum):
    """What is said on rank 0 when all is well; warnings are always shown."""

    normal = "normal"
    """A line when an engine is built, one when the placement changes, and a summary at the end."""

    quiet = "quiet"


class TenCacheConfig(DeepSpeedConfigModel):
    """The ``"tencache"`` section. Omitted or null means automatic, for the section and for each option."""

    host_memory: HostMemory | None = None
    """Host memory per rank for weights, gradients and optimizer state, in this order; the rest goes to NVMe, but for
    gradients, which are never on NVMe. ``staging_memory`` comes on top. Automatic: 80 % of the memory
    available when the model is built, divided by the ranks on the host; "60%" is another share of it. 0 sends
    everything but gradients to NVMe; else at least 64 KiB."""

    gpu_memory: SizeOrShare | None = None
    """GPU memory per rank for weights, gradients and optimizer state. The items that save most seconds of a step move
    there after the first or the third step, and state there is updated in place. Automatic: the memory that this step
    left free, minus the amount that its activations and gradients took; it is released when a later step needs it.
    "60%" is a share of the GPU memory that this process may use. 0 uses none."""

    staging_memory: Size | None = None
    """Pinned host memory per rank through which everything on its way from or to NVMe passes. Automatic: 12 optimizer
    chunks and up to 768 MiB of weights, more if the largest weight needs it."""

    chunk_size: Size = Field(32 * 2**20, ge=2**16, le=2**30)
    """Bytes of optimizer state (master weight and moments together) that are read, updated and written as one."""

    overlap_step: bool = True
    """The optimizer step goes on while the next forward pass runs, which waits for each weight by itself. Only where
    weights are in host memory and Adam updates them; the numbers are the same."""

    nvme_paths: list[str] = Field(default_factory=list)
    """Additional folders on other NVMe drives, besides ``nvme_path``. Both weights and optimizer state are spread over
    all of them in proportion to the bandwidth measured during training."""

    io_backend: IoBackend = IoBackend.auto
    """Mechanism for NVMe I/O; automatic picks one and logs why."""

    io_lanes: int = Field(8, ge=1, le=64)
    """Requests moved at the same time per NVMe path. 4 to 8 reach the limit of the devices measured."""

    io_request_size: Size = Field(8 * 2**20, ge=2**12, le=2**30, multiple_of=2**12)
    """Larger transfers are cut into requests of this size, which several lanes move at the same time. A multiple of 4
    KiB, as direct I/O needs."""

    io_timeout_s: float = Field(600.0, ge=1, le=86400)
    """A wait for one transfer or one buffer that takes longer than this stops the run with an error that names it."""

    verify: Verify = Verify.sampled
    """Comparison of bytes read with bytes written."""

    gds: Gds = Gds.auto
    """Reading of weights from NVMe into GPU memory without the host, with the extra ``gds-cu12`` or ``gds-cu13``."""

    gds_memory: Size | None = None
    """GPU memory per rank that weights are read into with ``gds``. Automatic: up to 768 MiB, more if the largest weight
    needs it."""

    log: Log = Log.normal
    """Messages on rank 0 when all is well."""

    poison_buffers: bool = False
    """For debugging: fills every returned staging buffer with a pattern, so that a use after return shows."""

    allow_faults: bool = False
    """For drills: without it, a run with ``TENCACHE_FAULTS`` in its environment is refused."""

    @field_validator("io_lanes", "io_timeout_s", mode="before")
    @classmethod
    def _refuse_boolean(cls, value: object) -> object:
        return refuse_boolean(value)


def options_from(section: object) -> TenCacheConfig:
    """Validated options of a ``"tencache"`` section.

    Raises:
        ConfigError: names the option, the given value and the allowed ones.
    """
    if section is None:
        section = {}
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{OPTIONS_KEY}" must be an object with options or null, not {section!r}')
    # Checked here: the base class drops values of "auto" before it checks names.
    unknown = [_explain_unknown(key, value) for key, value in section.items() if key not in TenCacheConfig.model_fields]
    known = {key: value for key, value in section.items() if key in TenCacheConfig.model_fields}
    try:
        options = TenCacheConfig(**{key: value for key, value in known.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("; ".join([*unknown, *(_explain(item) for item in error.errors())])) from None
    if unknown:
        raise ConfigError("; ".join(unknown))
    return options


def _explain_unknown(key: object, value: object) -> str:
    allowed = sorted(TenCacheConfig.model_fields)
    return (
        f'unknown option "{OPTIONS_KEY}.{key}" (given: {value!r}).{did_you_mean(key, allowed)} Allowed: '
        f"{', '.join(allowed)}"
    )


def _explain(item: Any) -> str:
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"])
    return f'"{OPTIONS_KEY}{name}" cannot be {item["input"]!r}: {item["msg"]}'
