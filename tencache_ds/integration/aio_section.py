# SPDX-License-Identifier: Apache-2.0
"""The ``aio`` section of a DeepSpeed config: as DeepSpeed understands it, and checks for implausible values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.swap_tensor.constants import (
    AIO,
    AIO_BLOCK_SIZE,
    AIO_INTRA_OP_PARALLELISM,
    AIO_OVERLAP_EVENTS,
    AIO_QUEUE_DEPTH,
    AIO_SINGLE_SUBMIT,
    AIO_USE_GDS,
)

from tencache_ds.errors import ConfigError
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.names import closest, did_you_mean
from tencache_ds.runtime.surroundings import AioSettings

LARGEST_BLOCK_NBYTES = 2**30
DEEPEST_QUEUE = 2**16
MOST_THREADS = 1024
LEGACY_KEYS = ("thread_count", "num_threads")
"""Older names of ``intra_op_parallelism``, which DeepSpeed ignores; ``ds_nvme_tune`` still writes the second."""


def read_aio_section(config: Mapping[str, Any]) -> dict[str, bool | int]:
    """The section as DeepSpeed understands it, with its defaults for missing keys. Any thread.

    Args:
        config: a whole DeepSpeed config; an empty one gives the defaults. Sizes are in bytes.
    """
    return dict(get_aio_config(dict(config)))


def aio_settings(config: Mapping[str, Any]) -> AioSettings:
    """The settings of an engine from the section of a whole DeepSpeed config, which was checked."""
    section = read_aio_section(config)
    return AioSettings(
        block_nbytes=int(section[AIO_BLOCK_SIZE]) if AIO_BLOCK_SIZE in (config.get(AIO) or {}) else None,
        queue_depth=int(section[AIO_QUEUE_DEPTH]),
        single_submit=_is_true(section[AIO_SINGLE_SUBMIT]),
        overlap_events=_is_true(section[AIO_OVERLAP_EVENTS]),
    )


def _is_true(value: object) -> bool:
    """A flag of the section, where ``ds_nvme_tune`` writes the strings ``"true"`` and ``"false"``."""
    return value.strip().lower() == "true" if isinstance(value, str) else bool(value)


def check_aio_section(section: object) -> tuple[str, ...]:
    """Checks the section as it was written: DeepSpeed takes every value as it is.

    Args:
        section: the value of ``"aio"`` in the config, or None.

    Returns:
        Warnings, of keys that DeepSpeed ignores.

    Raises:
        ConfigError: names the key, the given value and the allowed ones.
    """
    if section is None:
        return ()
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{AIO}" must be an object, not {section!r}')
    warnings = []
    for key, value in section.items():
        if key in _CHECKS:
            _CHECKS[key](f"{AIO}.{key}", value)
        elif closest(key, _CHECKS) is not None:
            raise ConfigError(f'unknown key "{AIO}.{key}" (given: {value!r}).{did_you_mean(key, _CHECKS)}')
        elif key not in LEGACY_KEYS:
            warnings.append(f'DeepSpeed ignores the unknown key "{AIO}.{key}". Known keys: {", ".join(_CHECKS)}.')
    if section.get(AIO_USE_GDS) and get_accelerator().device_name() != "cuda":
        raise ConfigError(
            f'"{AIO}.{AIO_USE_GDS}" is on, which DeepSpeed allows with CUDA GPUs only. Remove it: TenCache reads '
            'weights into GPU memory with "tencache.gds".'
        )
    return tuple(warnings)


def _check_count(least: int, most: int, multiple_of: int = 1) -> Callable[[str, object], None]:
    def check(key: str, value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value != value // 1 or not least <= value <= most or value % multiple_of:
            multiple = f" and a multiple of {multiple_of}" if multiple_of > 1 else ""
            raise ConfigError(
                f'"{key}" cannot be {value!r}: it must be a whole number from {least} to {most}{multiple}. Omit it for '
                "DeepSpeed's default."
            )

    return check


def _check_boolean(key: str, value: object) -> None:
    """For values where DeepSpeed would take the string "false" as true."""
    if not isinstance(value, bool):
        raise ConfigError(f'"{key}" cannot be {value!r}: it must be true or false, without quotes')


def _check_flag(key: str, value: object) -> None:
    if not (isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in ("true", "false"))):
        raise ConfigError(f'"{key}" cannot be {value!r}: it must be true or false')


_CHECKS: dict[str, Callable[[str, object], None]] = {
    AIO_BLOCK_SIZE: _check_count(PAGE_NBYTES, LARGEST_BLOCK_NBYTES, PAGE_NBYTES),
    AIO_QUEUE_DEPTH: _check_count(1, DEEPEST_QUEUE),
    AIO_INTRA_OP_PARALLELISM: _check_count(1, MOST_THREADS),
    AIO_SINGLE_SUBMIT: _check_flag,
    AIO_OVERLAP_EVENTS: _check_flag,
    AIO_USE_GDS: _check_boolean,
}
