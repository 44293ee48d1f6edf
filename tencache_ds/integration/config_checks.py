# SPDX-License-Identifier: Apache-2.0
"""Which DeepSpeed configs TenCache supports, and clear errors for all others before anything is built; folders for
scratch files are refused if impossible or implausible. The ``aio`` section is taken as DeepSpeed understands it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
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

from tencache_ds.config import Checkpoint, Gds, TenCacheConfig, Verify, options_from
from tencache_ds.errors import ConfigError
from tencache_ds.integration.adapters.installed import calls
from tencache_ds.integration.seams import Feature, require
from tencache_ds.layout import PAGE_NBYTES
from tencache_ds.names import ENGINE_KEY, ENGINE_NAME, FAULTS_VARIABLE, OPTIONS_KEY, ZERO_KEY, closest, did_you_mean
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


CONFIG_ATTRIBUTE = "tencache"
"""Attribute of a parsed DeepSpeedConfig that holds its ``TenCacheConfig``; absent or None means stock DeepSpeed."""

REASON_ATTRIBUTE = "tencache_reason"
"""Attribute of the same config: why it runs with TenCache, for the log; empty when the config itself asks for it."""

UNUSED_ATTRIBUTE = "tencache_unused"
"""Attribute of the same config: its keys that mean nothing to TenCache."""

_ON_THE_GPU = "its kernel runs on the GPU, while the optimizer state is offloaded"
_MUON = ("muon", "muonwithauxadam")
_REFUSED_OPTIMIZERS = {
    "lamb": (_ON_THE_GPU, "AdamW"),
    "fusedlamb": (_ON_THE_GPU, "AdamW"),
    "fusedadam": (_ON_THE_GPU, "deepspeed.ops.adam.DeepSpeedCPUAdam"),
    "fusedlion": (_ON_THE_GPU, "deepspeed.ops.lion.DeepSpeedCPULion"),
    "lbfgs": ("it calls a closure that computes the loss again, which DeepSpeed's step does not provide", "AdamW"),
    "sparseadam": ("it takes sparse gradients, which ZeRO-3 does not produce", "AdamW"),
}
"""By lower-case name, as spelled in a config or by a class: the reason, and the alternative."""


_UNUSED = {
    f"{ZERO_KEY}.offload_param": ("buffer_count", "buffer_size", "max_in_cpu"),
    f"{ZERO_KEY}.offload_optimizer": ("buffer_count", "pipeline_read", "pipeline_write", "pipeline", "fast_init"),
    AIO: ("intra_op_parallelism", "use_gds"),
}
"""By section; docs/configuration.md lists them."""

LONGEST_PATH_NBYTES = 4096
OUR_NAMES_NBYTES = 256
"""Reserve for the names of folders and files created below the user's folder."""

_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")
_NO_PATHS = ("none", "null", "auto")
"""Values that other programs write for "no path" (accelerate's questionnaire, for one)."""


def options_of(ds_config: Any) -> TenCacheConfig | None:
    """The ``TenCacheConfig`` of a parsed DeepSpeed config, or None if it does not select TenCache."""
    return getattr(ds_config, CONFIG_ATTRIBUTE, None)


def check_sections(param_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """Checks, before DeepSpeed parses it, values that DeepSpeed would accept unchecked or reject without naming the
    key.

    Args:
        param_dict: the config as it was written, without the engine's key.

    Returns:
        Warnings for the user that do not stop the run.

    Raises:
        ConfigError: names the key, the given value, and the allowed ones or the remedy.
    """
    zero = param_dict.get(ZERO_KEY)
    if not isinstance(zero, Mapping):
        meant = next((key for key in param_dict if key != ZERO_KEY and closest(key, (ZERO_KEY,))), None)
        problem = f"is {zero!r}" if ZERO_KEY in param_dict else "is missing"
        hint = f' Did you mean it by "{meant}"?' if meant is not None else ""
        raise ConfigError(
            f'"{ENGINE_KEY}": "{ENGINE_NAME}" needs ZeRO stage 3, but "{ZERO_KEY}" {problem}.{hint} Write '
            f'"{ZERO_KEY}": {{"stage": 3, "offload_param": …, "offload_optimizer": …}}.'
        )
    return check_aio_section(param_dict.get(AIO))


def unused_keys(param_dict: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of a config that set up DeepSpeed's own offload engine and mean nothing to TenCache, dotted."""
    unused = []
    for section, names in _UNUSED.items():
        values: Any = param_dict
        for part in section.split("."):
            values = values.get(part) if isinstance(values, Mapping) else None
        if isinstance(values, Mapping):
            unused += [f"{section}.{name}" for name in names if name in values]
    return tuple(unused)


def check_config(ds_config: Any, param_dict: Mapping[str, Any]) -> TenCacheConfig:
    """The options of a parsed DeepSpeed config that selects TenCache.

    Args:
        ds_config: DeepSpeed's parsed config.
        param_dict: the dict it was parsed from.

    Raises:
        ConfigError: names the key, the given value, and the allowed ones or the remedy.
    """
    options = options_from(param_dict.get(OPTIONS_KEY))
    _check_faults(options)
    zero = ds_config.zero_config
    if int(zero.stage) != 3:
        raise ConfigError(
            f'"{ENGINE_KEY}": "{ENGINE_NAME}" works with ZeRO stage 3, but "{ZERO_KEY}.stage" is {int(zero.stage)}. '
            "Set it to 3."
        )
    _refuse_combinations(ds_config)
    offload_optimizer = zero.offload_optimizer
    refuse_optimizer(
        str(ds_config.optimizer_name),
        offloaded=offload_optimizer is not None and offload_optimizer.device != "none",
        on_gpu=get_accelerator().device_name() != "cpu",
    )
    devices, nvme_paths = {}, {}
    for section in ("offload_param", "offload_optimizer"):
        config = getattr(zero, section)
        devices[section] = "none" if config is None else str(getattr(config.device, "value", config.device))
        if devices[section] == "nvme":
            # As it was written: DeepSpeed's own value is a Path, for which "" is the working directory.
            written = param_dict[ZERO_KEY].get(section)
            path = written.get("nvme_path") if isinstance(written, Mapping) else config.nvme_path
            nvme_paths[f"{ZERO_KEY}.{section}.nvme_path"] = path
            check_nvme_path(f"{ZERO_KEY}.{section}.nvme_path", path)
    if set(devices.values()) == {"none"}:
        raise ConfigError(
            f'"{ENGINE_KEY}": "{ENGINE_NAME}" has nothing to offload: set "{ZERO_KEY}.offload_param.device" and/or '
            f'"{ZERO_KEY}.offload_optimizer.device" to "cpu" or "nvme".'
        )
    _check_further_paths(options.nvme_paths, nvme_paths, devices)
    if options.gds == Gds.on:
        _check_gds(options, devices["offload_param"])
    if options.checkpoint == Checkpoint.asynchronous:
        _refuse_other_writers(param_dict)
    return options


def _refuse_combinations(ds_config: Any) -> None:
    zero = ds_config.zero_config
    optimizer, weights = zero.offload_optimizer, zero.offload_param
    weights_on_nvme = weights is not None and weights.device == "nvme"
    refused = (
        (
            calls.uses_zenflow(zero),
            f"{ZERO_KEY}.zenflow",
            "ZenFlow replaces the same optimizer steps",
        ),
        (
            optimizer is not None and calls.uses_super_offload(optimizer),
            f"{ZERO_KEY}.offload_optimizer.super_offload",
            "SuperOffload replaces the same optimizer class",
        ),
        (
            calls.uses_deepcompile(ds_config),
            "compile.deepcompile",
            "DeepCompile schedules the gathers of weights itself",
        ),
        (
            optimizer is not None and optimizer.ratio < 1.0,
            f"{ZERO_KEY}.offload_optimizer.ratio",
            "updating a part of the state on the GPU (Twin-Flow) is not possible yet; leave it at 1.0",
        ),
        (
            weights_on_nvme and zero.zero_hpz_partition_size > 1,
            f"{ZERO_KEY}.zero_hpz_partition_size",
            "a secondary partition cannot be stored on NVMe",
        ),
        (
            weights_on_nvme and zero.zero_quantized_nontrainable_weights,
            f"{ZERO_KEY}.zero_quantized_nontrainable_weights",
            "quantised partitions cannot be stored on NVMe",
        ),
    )
    for given, key, reason in refused:
        if given:
            raise ConfigError(
                f'"{key}" cannot be combined with "{ENGINE_KEY}": "{ENGINE_NAME}": {reason}. Remove one of the two.'
            )


def _refuse_other_writers(param_dict: Mapping[str, Any]) -> None:
    """Checkpoints are written in the background in the place of DeepSpeed's default writer only."""

    def given(section: str, key: str) -> Any:
        values = param_dict.get(section)
        return values.get(key) if isinstance(values, Mapping) else None

    others = {
        '"checkpoint.writer"': given("checkpoint", "writer"),
        '"checkpoint.checkpoint_serialization": false': given("checkpoint", "checkpoint_serialization") is False,
        '"nebula.enabled"': given("nebula", "enabled"),
        '"datastates_ckpt.enabled"': given("datastates_ckpt", "enabled"),
    }
    for key, is_given in others.items():
        if is_given:
            raise ConfigError(
                f'"{OPTIONS_KEY}.checkpoint": "async" cannot be combined with {key}, which has another writer of '
                "checkpoints. Remove one of the two."
            )


def _check_faults(options: TenCacheConfig) -> None:
    """A variable left over from a test must not damage a run, nor be ignored where faults are intended."""
    if os.environ.get(FAULTS_VARIABLE) and not options.allow_faults:
        raise ConfigError(
            f"{FAULTS_VARIABLE} is set in the environment, which injects storage faults. To test failures, add "
            f'"{OPTIONS_KEY}": {{"allow_faults": true}} to the config; otherwise unset {FAULTS_VARIABLE}.'
        )


def refuse_optimizer(name: str, *, offloaded: bool, on_gpu: bool) -> None:
    """Refuses an optimizer that cannot work here.

    Args:
        name: its ``"type"`` in the config, or its class's name.
        offloaded: whether its state is offloaded.
        on_gpu: whether the compute device is not the CPU, so that it has its own kernels.

    Raises:
        ConfigError: names the optimizer, the reason and the alternative.
        SeamError: the installed DeepSpeed updates with it in another way.
    """
    if name.lower() in _MUON and offloaded:
        require(Feature.MUON_UPDATES)
    reason, other = _REFUSED_OPTIMIZERS.get(name.lower(), ("", ""))
    if not reason or (reason is _ON_THE_GPU and not (offloaded and on_gpu)):
        return
    raise ConfigError(
        f'the optimizer "{name}" does not work with "{ENGINE_KEY}": "{ENGINE_NAME}": {reason}. '
        f"Use another optimizer ({other}), or remove the key."
    )


def _check_gds(options: TenCacheConfig, weights_device: str) -> None:
    """Requirements of ``"gds": "on"`` on the rest of the config."""
    key = f"{OPTIONS_KEY}.gds"
    if weights_device != "nvme":
        raise ConfigError(
            f'"{key}" is "on", but "{ZERO_KEY}.offload_param.device" is "{weights_device}": only weights on NVMe are '
            f'read into GPU memory. Set the device to "nvme", or remove "{key}".'
        )
    if options.verify == Verify.full:
        raise ConfigError(
            f'"{key}": "on" cannot be combined with "{OPTIONS_KEY}.verify": "full", which needs every byte in host '
            'memory. Set "verify" to "sampled" or "off", or "gds" to "auto".'
        )


def _check_further_paths(paths: Sequence[str], nvme_paths: Mapping[str, Any], devices: Mapping[str, str]) -> None:
    """Checks ``nvme_paths`` of the options against DeepSpeed's own, which are given by key."""
    if paths and not nvme_paths:
        given = " and ".join(f'"{ZERO_KEY}.{section}.device" is "{device}"' for section, device in devices.items())
        raise ConfigError(
            f'"{OPTIONS_KEY}.nvme_paths" is given, but {given}: nothing would be stored there. Set one of them to '
            f'"nvme" with a "nvme_path", or remove "{OPTIONS_KEY}.nvme_paths".'
        )
    known = {os.path.realpath(os.fspath(path)): key for key, path in nvme_paths.items()}
    for index, path in enumerate(paths):
        key = f"{OPTIONS_KEY}.nvme_paths[{index}]"
        check_nvme_path(key, path)
        folder = os.path.realpath(path)
        if folder in known:
            raise ConfigError(
                f'"{key}" is {path!r}, the same folder as "{known[folder]}". List only additional folders, '
                "on other drives."
            )
        known[folder] = key


def check_nvme_path(key: str, path: object) -> None:
    """Checks that scratch files can be created under ``path``; creates the folder as DeepSpeed would.

    Args:
        key: where in the config it stands.
        path: as it was written.

    Raises:
        ConfigError: names the key, the path and the remedy.
    """
    if path is None or (isinstance(path, str) and path.lower() in _NO_PATHS):
        raise ConfigError(
            f'"{key}" is missing: with "device": "nvme" it must name a folder on the NVMe drive.{_hint(key, path)}'
        )
    folder = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(folder, str):
        raise ConfigError(f'"{key}" cannot be {path!r}: it must name a folder on the NVMe drive.')
    _check_text(key, folder)
    try:
        _make_folder(folder)
    except OSError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, which cannot be created: {error.strerror}. Name a folder you may write to.'
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f'"{key}" is {folder!r}, which is not writable for this user. Name a folder you may write to.'
        )


def _hint(key: str, path: object) -> str:
    """Where the path may have been lost."""
    if isinstance(path, str) and path.lower() == "auto":
        return ' "auto" is not filled in here.'
    section = key.removeprefix(f"{ZERO_KEY}.").removesuffix(".nvme_path")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() != "true" or "." in section:
        return ""
    return (
        f" accelerate's launcher does not pass --{section}_nvme_path on, nor {section}_nvme_path from the file of "
        f'"accelerate config": set ACCELERATE_DEEPSPEED_{section.upper()}_NVME_PATH in the environment, or name a '
        "DeepSpeed config file (deepspeed_config_file)."
    )


def _check_text(key: str, folder: str) -> None:
    """Checks that need no file system: impossible names, and implausible ones."""
    if not folder.strip():
        raise ConfigError(f'"{key}" is {folder!r}, an empty name: it must name a folder on the NVMe drive.')
    if folder != folder.strip():
        raise ConfigError(f'"{key}" is {folder!r}, which begins or ends with white space. Remove it.')
    if folder.startswith("~") or _VARIABLE.search(folder):
        expanded = os.path.expandvars(os.path.expanduser(folder))
        example = f", for example {expanded!r}" if expanded != folder else ""
        raise ConfigError(
            f'"{key}" is {folder!r}, but neither "~" nor variables are expanded in a DeepSpeed config: a folder '
            f"of exactly that name would be created. Write the full path{example}."
        )
    if "\0" in folder:
        raise ConfigError(f'"{key}" is {folder!r}, which contains a null character. Paths cannot.')
    try:
        nbytes = len(os.fsencode(os.path.abspath(folder)))
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, which cannot be encoded for the file system ({error.reason}). Name another folder.'
        ) from None
    if nbytes > LONGEST_PATH_NBYTES - OUR_NAMES_NBYTES:
        raise ConfigError(
            f'"{key}" is a path of {nbytes} bytes ({folder[:40]!r}…): with the names of scratch files below it, it is '
            f"longer than the {LONGEST_PATH_NBYTES} bytes that the system allows. Name a folder with a shorter path."
        )


def _make_folder(path: str) -> None:
    """``os.makedirs`` without its recursion, which a path of a thousand components does not survive."""
    missing = []
    while path and not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another rank was faster
            continue
    os.makedirs(missing[0] if missing else path, exist_ok=True)  # raises where a file has that name
