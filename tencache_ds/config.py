# SPDX-License-Identifier: Apache-2.0
"""The options of the ``"tencache"`` section of ``ds_config.json``, with every default explained.

Existing DeepSpeed options are not repeated here: ``offload_*.nvme_path``, ``offload_*.pin_memory`` and the ``aio``
section mean the same as for ZeRO-Infinity.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, field_validator

from tencache_ds.errors import ConfigError
from tencache_ds.names import OPTIONS_KEY, StrEnum, did_you_mean

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
        raise ValueError(f"a size cannot be {value!r}: it must be from 0 to 1024 PiB")
    if (unit == 1 and number != int(number)) or 0 < number < 1:
        raise ValueError(f"{value!r} is not a whole number of bytes: write a unit, as in '4GiB'")
    return int(number)


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the available memory.

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
        ValueError: neither, or too few bytes to be intended.
    """
    parsed = parse_size_or_share(value)
    return parsed if isinstance(parsed, Share) else parse_host_memory(parsed)


def parse_host_memory(value: object) -> int:
    """A size that is 0, or large enough to hold a weight.

    Raises:
        ValueError: not a size, or too few bytes to be intended.
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
    """The mechanism that moves bytes between host memory and NVMe."""

    auto = "auto"
    """``native`` where it builds; else ``aio`` where that builds and accepts the pinned buffers unchanged; else
    ``posix``. The activation log gives the reason."""

    native = "native"
    """TenCache's own op on libaio, compiled at its first use. Every result is checked, and urgent reads take priority
    over background traffic."""

    aio = "aio"
    """Lanes of DeepSpeed's ``aio_handle`` (libaio)."""

    posix = "posix"
    """``preadv`` and ``pwritev``, with O_DIRECT where the file system allows it; needs no libaio."""


class Gds(StrEnum):
    """Whether weights are read from NVMe straight into GPU memory (GPUDirect Storage, through KvikIO)."""

    auto = "auto"
    """Where the bytes of a trial at startup are correct and GDS is faster than pinned memory (in KvikIO's compatibility
    mode, 1.25 times as fast). The activation log has the decision, the reason and both rates."""

    on = "on"
    """Wherever the bytes are correct: in compatibility mode too, with a warning. An error where it cannot work."""

    off = "off"
    """Never: no trial at startup, and KvikIO is not imported."""


class Checkpoint(StrEnum):
    """When ``engine.save_checkpoint`` and ``save_16bit_model`` return."""

    synchronous = "sync"
    """When the checkpoint is complete."""

    asynchronous = "async"
    """When its files are begun. The optimizer state is copied to spare RAM during the next forward and backward pass,
    and written from there."""


class Verify(StrEnum):
    """How data read back from NVMe is compared with the data written."""

    sampled = "sampled"
    """At every write one word of each 4 KiB page is recorded, at a different position each time, and compared at the
    next read. A lost, torn or misdirected write is detected before its data is used."""

    full = "full"
    """Hashes every byte instead (XXH3) and also detects a flipped bit. Costs a pass over memory at each write, once
    the device has the bytes, and at each read, before they are used."""

    off = "off"
    """No check."""


class Activations(StrEnum):
    """Whether tensors that a forward pass saves for backward are moved to RAM and NVMe in between."""

    auto = "auto"
    """Where they do not fit into GPU memory, as many as have to. The first pass shows it; where everything fits,
    autograd keeps its tensors itself from then on, until a pass is larger or less memory is free. Where weights,
    gradients and optimizer state do not all fit beside them, also those that save less time there. Each change is in
    the log."""

    off = "off"
    """Never: they stay in GPU memory, as in DeepSpeed."""

    on = "on"
    """All that are large enough, except the last ones, which backward needs at once."""


DEFAULT_ACTIVATIONS = Activations.off


class Log(StrEnum):
    """The amount of output on rank 0 when all is well; warnings go to the logger ``DeepSpeed.tencache`` in any case."""

    normal = "normal"
    """One line when an engine is built, one when the placement changes, and a summary of a few lines when the engine is
    destroyed or the process ends: steps, waits for NVMe by cause, bytes read and written, what lived where. They are
    printed to standard output, whatever the log level is."""

    quiet = "quiet"
    """Warnings only."""


class TenCacheConfig(BaseModel):
    """The ``"tencache"`` section. Omitted or null means automatic, for the section and for each option.

    The docstrings of the fields and of their values are the reference in docs/configuration.md, in Markdown:
    ``python docs/generate.py`` writes them there.
    """

    model_config = ConfigDict(
        extra="forbid", validate_default=True, validate_assignment=True, use_enum_values=True, protected_namespaces=()
    )

    host_memory: HostMemory | None = None
    """RAM per rank that replaces NVMe: for weights, in the order in which the model defines them, then for gradients,
    which are never on NVMe, then for optimizer state. The rest goes to NVMe
    ([how it works](how_it_works.md#placement)). ``0`` sends everything but gradients there; otherwise it is at least 64
    KiB. ``staging_memory`` is additional.

    Automatic: 80 % of the memory available when the model is built, divided by the ranks that share it; ``"60%"``
    selects a different share. The memory available is the smallest headroom among the machine and each control group
    around the process (a container's, a pod's, a SLURM job's; v1 and v2). The smallest value of any rank applies to all
    ranks. If memory runs out later, [state is moved to NVMe](how_it_works.md#when-host-memory-runs-out)."""

    gpu_memory: SizeOrShare | None = None
    """GPU memory per rank for weights, gradients and optimizer state: everything after the first step if it fits;
    otherwise, after three to six steps, the items that save the most time per byte. State in GPU memory is updated in
    place. Memory that a later step needs is released, and reclaimed when it is free again
    ([how it works](how_it_works.md#idle-gpu-memory)). For optimizers whose state is updated chunk by chunk
    ([below](#optimizers)); state and gradients with fp32 states only.

    Automatic: the memory left free by the first optimizer step, minus the amount that its activations and gradients
    took (1 GiB at least); none with [8-bit Adam](eight_bit.md). A size, or a share of the GPU memory this process may
    use (``"60%"``), is an upper limit; ``0`` uses none. Without an optimizer: the weights that the first forward pass
    leaves room for ([inference](inference.md))."""

    staging_memory: Size | None = None
    """Pinned memory per rank that stages all transfers from and to NVMe. Allocated once, with exactly this size; it
    never grows. A value that is too small is refused, and the error gives the minimum.

    Automatic: 12 chunks, plus weights up to 768 MiB (more if the largest weights need it)."""

    chunk_size: Size | None = Field(None, ge=2**16, le=2**30)
    """The unit in which optimizer state (master weight and moments together) is read, updated and written, independent
    of ``sub_group_size``.

    Automatic: 32 MiB, and 128 MiB where no optimizer state goes to NVMe: then chunks pass through no buffers, and fewer
    of them take less of the time of the thread that trains."""

    overlap_step: bool = True
    """Continues the optimizer step during the next forward pass, which waits for each weight individually; for Adam and
    AdamW, with weights in RAM or GPU memory. Same results. ``false``: the step ends before ``step()`` returns
    ([how it works](how_it_works.md#a-step))."""

    split_master: bool = False
    """Stores the fp32 master weights of bf16 weights in RAM as the difference to these: 10 bytes of Adam's state for
    each parameter instead of 12, and 4.2 of [8-bit Adam](eight_bit.md)'s instead of 6, without loss. On NVMe, and in
    RAM where no state may go to GPU memory: with 8-bit Adam, or ``gpu_memory`` of 0. Same results, at about 1.5 times
    the CPU time of an update: for drives that are slower than the update, or state that does not fit otherwise. Weights
    must be changed through DeepSpeed's functions only ([how it works](how_it_works.md#split-master-weights))."""

    host_path: bool = True
    """Shortens what DeepSpeed's Python takes for each module and each parameter, and moves no byte. ``false``:
    DeepSpeed's own functions, with the same results, slower; to find out whether this part is the cause of a problem
    ([how it works](how_it_works.md#the-host-path))."""

    nvme_paths: list[str] = Field(default_factory=list)
    """Additional folders, on other drives than ``nvme_path``: ``["/nvme1", "/nvme2"]``. Weights and optimizer state are
    spread over ``nvme_path`` and these in proportion to the bandwidth measured during training
    ([several drives](several_drives.md)). Where ``offload_param`` and ``offload_optimizer`` name different
    ``nvme_path``s, each kind keeps its own and both use the additional ones. Several folders on the same file system
    are accepted with a warning, since they gain nothing."""

    io_backend: IoBackend = IoBackend.auto
    """The mechanism that moves bytes between host memory and NVMe."""

    io_lanes: int | None = Field(None, ge=1, le=64)
    """Concurrent I/O threads per NVMe path.

    Automatic: 8. In memory (tmpfs), where a core copies every byte of a transfer, as many as the cores of this rank, 8
    to 32; where a GPU computes, two cores less."""

    io_request_size: Size = Field(8 * 2**20, ge=2**12, le=2**30, multiple_of=2**12)
    """Larger transfers are split into requests of this size, which are distributed over the lanes; a multiple of 4 KiB,
    at most ``1GiB``. ``native`` splits at ``aio.block_size`` if that is smaller."""

    io_timeout_s: float = Field(600.0, ge=1, le=86400)
    """Seconds, at least 1. If a single transfer or buffer takes longer, the run stops with an error that names it. See
    [when storage fails](failures.md)."""

    verify: Verify = Verify.sampled
    """How data read back from NVMe is compared with the data written."""

    checkpoint: Checkpoint = Checkpoint.synchronous
    """When ``engine.save_checkpoint`` and ``save_16bit_model`` return. ``async``: when the files are begun; training
    continues while they are written. The files are the same, and ``latest`` names a checkpoint when every rank has all
    of it. The next save, a load, ``engine.destroy()``, ``tencache_ds.wait_for_checkpoint(engine)`` and the end of the
    process wait for it; an error is logged at once and raised by the next of them but the load
    ([checkpoints](checkpoints.md#saving-in-the-background))."""

    checkpoint_memory: Size | None = None
    """RAM per rank for optimizer state that ``"checkpoint": "async"`` has yet to write, at most; kept from one
    checkpoint to the next. Where it is full, the next optimizer step waits for the drive.

    Automatic: as much as there is to write, up to half of what is available when the checkpoint is saved, divided among
    the ranks of the machine; freed when it is written. The next checkpoint then takes new memory, which takes several
    times as long to fill."""

    activations: Activations = DEFAULT_ACTIVATIONS
    """Whether tensors that a forward pass saves for backward are moved to RAM and NVMe in between: for sequences or
    batches that do not fit otherwise. Same results ([activations](activations.md))."""

    activation_memory: Size | None = None
    """RAM per rank for activations, set aside of ``host_memory`` before gradients and optimizer state are placed (in
    addition to it where weights have taken all of it); what exceeds it goes to NVMe.

    Automatic: what weights, gradients and optimizer state leave of ``host_memory``; where that is too little, optimizer
    state that may be on NVMe leaves RAM for them."""

    activation_min_size: Size = Field(2**20, ge=2**10)
    """Tensors whose memory is smaller stay in GPU memory: below 1 MiB a transfer takes less time than its management.
    """

    gds: Gds = Gds.auto
    """Whether weights are read from NVMe straight into GPU memory: GPUDirect Storage, through KvikIO
    (``pip install 'tencache-ds[gds-cu13]'``, or ``gds-cu12``; Python 3.11 or later). At startup a file of 64 MiB is
    written to each path and read both ways ([how it works](how_it_works.md#weights-straight-into-gpu-memory))."""

    gds_memory: Size | None = None
    """GPU memory per rank that ``gds`` reads into. Allocated once, with exactly this size. A value that is too small is
    refused, and the error gives the minimum.

    Automatic: up to 768 MiB of weights (more if the largest weights need it)."""

    log: Log = Log.normal
    """The amount of output on rank 0 when all is well."""

    poison_buffers: bool = False
    """For debugging: returned staging buffers are filled with a pattern, so that a use after return shows."""

    allow_faults: bool = False
    """For [tests](failures.md#injecting-failures): allows the environment variable ``TENCACHE_FAULTS`` to inject
    faults. Without it, a run with that variable is refused."""

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
    unknown = [_explain_unknown(key, value) for key, value in section.items() if key not in TenCacheConfig.model_fields]
    given = {key: value for key, value in section.items() if key in TenCacheConfig.model_fields and value is not None}
    # As in the rest of a DeepSpeed config "auto" is the default; for activations it is a choice of its own.
    chosen = {key: value for key, value in given.items() if value != "auto" or key == "activations"}
    try:
        options = TenCacheConfig(**chosen)
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
