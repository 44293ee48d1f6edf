# SPDX-License-Identifier: Apache-2.0
"""Which DeepSpeed configs TenCache runs, and a clear answer for the others before anything is built."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from tencache_ds.config import ENGINE_KEY, ENGINE_NAME, OPTIONS_KEY, Gds, TenCacheConfig, Verify, options_from
from tencache_ds.errors import ConfigError

ZERO_KEY = "zero_optimization"


def take_engine_choice(param_dict: MutableMapping[str, Any]) -> bool:
    """Whether a config asks for TenCache; removes the alias inside ``zero_optimization``, which DeepSpeed would refuse.

    Args:
        param_dict: the shallow copy that DeepSpeed parses; the user's own dict is not changed.

    Raises:
        ConfigError: an unknown engine, or two that contradict each other.
    """
    choices = {}
    if ENGINE_KEY in param_dict:
        choices[ENGINE_KEY] = param_dict[ENGINE_KEY]
    zero = param_dict.get(ZERO_KEY)
    if isinstance(zero, Mapping) and ENGINE_KEY in zero:
        choices[f"{ZERO_KEY}.{ENGINE_KEY}"] = zero[ENGINE_KEY]
        param_dict[ZERO_KEY] = {key: value for key, value in zero.items() if key != ENGINE_KEY}
    for key, value in choices.items():
        if value is not None and value != ENGINE_NAME:
            raise ConfigError(
                f'"{key}" is {value!r}. Allowed: "{ENGINE_NAME}", or null (or no key) for DeepSpeed\'s own offload.'
            )
    if len(set(choices.values())) > 1:
        raise ConfigError(f"the offload engine is given twice and differs: {choices}. Keep one of them.")
    return any(value == ENGINE_NAME for value in choices.values())


def check_config(ds_config: Any, param_dict: Mapping[str, Any]) -> TenCacheConfig:
    """The options of a parsed DeepSpeed config that asks for TenCache.

    Args:
        ds_config: DeepSpeed's parsed config.
        param_dict: the dict it was parsed from.

    Raises:
        ConfigError: names the key, what was given, and what is allowed or what to do.
    """
    options = options_from(param_dict.get(OPTIONS_KEY))
    zero = ds_config.zero_config
    if int(zero.stage) != 3:
        raise ConfigError(
            f'"{ENGINE_KEY}": "{ENGINE_NAME}" works with ZeRO stage 3, but "{ZERO_KEY}.stage" is {int(zero.stage)}. '
            "Set it to 3."
        )
    _refuse_combinations(ds_config)
    devices, nvme_paths = {}, {}
    for section in ("offload_param", "offload_optimizer"):
        config = getattr(zero, section)
        devices[section] = "none" if config is None else str(getattr(config.device, "value", config.device))
        if devices[section] == "nvme":
            nvme_paths[f"{ZERO_KEY}.{section}.nvme_path"] = config.nvme_path
            check_nvme_path(f"{ZERO_KEY}.{section}.nvme_path", config.nvme_path)
    if set(devices.values()) == {"none"}:
        raise ConfigError(
            f'"{ENGINE_KEY}": "{ENGINE_NAME}" has nothing to offload: set "{ZERO_KEY}.offload_param.device" and/or '
            f'"{ZERO_KEY}.offload_optimizer.device" to "cpu" or "nvme".'
        )
    _check_further_paths(options.nvme_paths, nvme_paths, devices)
    if options.gds == Gds.on:
        _check_gds(options, devices["offload_param"])
    return options


def _refuse_combinations(ds_config: Any) -> None:
    zero = ds_config.zero_config
    optimizer, weights = zero.offload_optimizer, zero.offload_param
    weights_on_nvme = weights is not None and weights.device == "nvme"
    refused = (
        (
            getattr(zero, "zenflow", None) is not None,
            f"{ZERO_KEY}.zenflow",
            "ZenFlow replaces the same optimizer steps",
        ),
        (
            optimizer is not None and optimizer.super_offload,
            f"{ZERO_KEY}.offload_optimizer.super_offload",
            "SuperOffload replaces the same optimizer class",
        ),
        (
            bool(getattr(ds_config.compile_config, "deepcompile", False)),
            "compile.deepcompile",
            "DeepCompile schedules the weights' gathers itself",
        ),
        (
            optimizer is not None and optimizer.ratio < 1.0,
            f"{ZERO_KEY}.offload_optimizer.ratio",
            "updating part of the sub-groups on the GPU (Twin-Flow) is not supported yet; leave it at 1.0",
        ),
        (
            weights_on_nvme and zero.zero_hpz_partition_size > 1,
            f"{ZERO_KEY}.zero_hpz_partition_size",
            "a secondary partition cannot live on NVMe",
        ),
        (
            weights_on_nvme and zero.zero_quantized_nontrainable_weights,
            f"{ZERO_KEY}.zero_quantized_nontrainable_weights",
            "quantised partitions cannot live on NVMe",
        ),
    )
    for given, key, reason in refused:
        if given:
            raise ConfigError(
                f'"{key}" cannot be combined with "{ENGINE_KEY}": "{ENGINE_NAME}": {reason}. Remove one of the two.'
            )


def _check_gds(options: TenCacheConfig, weights_device: str) -> None:
    """What ``"gds": "on"`` needs of the rest of the config."""
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


def _check_further_paths(paths: Sequence[str], nvme_paths: Mapping[str, object], devices: Mapping[str, str]) -> None:
    """Checks ``nvme_paths`` of the options against DeepSpeed's own, which are given by key."""
    if paths and not nvme_paths:
        given = " and ".join(f'"{ZERO_KEY}.{section}.device" is "{device}"' for section, device in devices.items())
        raise ConfigError(
            f'"{OPTIONS_KEY}.nvme_paths" is given, but {given}: nothing would be stored there. Set one of them to '
            f'"nvme" with a "nvme_path", or remove "{OPTIONS_KEY}.nvme_paths".'
        )
    known = {os.path.realpath(str(path)): key for key, path in nvme_paths.items()}
    for index, path in enumerate(paths):
        key = f"{OPTIONS_KEY}.nvme_paths[{index}]"
        check_nvme_path(key, path or None)
        folder = os.path.realpath(path)
        if folder in known:
            raise ConfigError(
                f'"{key}" is {path!r}, the folder that "{known[folder]}" names already. List only further folders, '
                "on other drives."
            )
        known[folder] = key


def check_nvme_path(key: str, path: object) -> None:
    """Checks that scratch files can be made under ``path``; makes the folder as DeepSpeed would.

    Raises:
        ConfigError: names the key, the path and the remedy.
    """
    if path is None:
        raise ConfigError(f'"{key}" is missing: with "device": "nvme" it must name a folder on the NVMe drive.')
    folder = str(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, which cannot be made a folder: {error.strerror}. Name a folder you may write to.'
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f'"{key}" is {folder!r}, which is not writable for this user. Name a folder you may write to.'
        )
