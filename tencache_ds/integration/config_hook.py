# SPDX-License-Identifier: Apache-2.0
"""Observes DeepSpeed's parsing of its configs, and finds TenCache's keys in them, misspelt ones too. A config that does
not mention TenCache is parsed by DeepSpeed's own function; of TenCache, that imports only this module and
:mod:`tencache_ds.names`, unless ``TENCACHE_ENABLE`` selects TenCache in the config's place.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator, Mapping, MutableMapping
from types import ModuleType
from typing import Any

from tencache_ds.names import DISABLE_VARIABLE, ENABLE_VARIABLE, ENGINE_KEY, ENGINE_NAME, OPTIONS_KEY, ZERO_KEY, closest

_HOOKED = "__tencache_hook__"
_NEEDED = ("config_checks", "activation", "param_swapper", "coordinator", "stage3")
_NOTE = (
    f'TenCache is in use because {ENABLE_VARIABLE} is set in the environment, as if the config had "{ENGINE_KEY}": '
    f'"{ENGINE_NAME}". Unset {ENABLE_VARIABLE} to run with DeepSpeed\'s own offload.'
)


def hook_config_module(module: ModuleType) -> None:
    """Makes ``DeepSpeedConfig`` recognise ``"offload_engine"``. Idempotent."""
    config_class = module.DeepSpeedConfig
    original = config_class._initialize_params
    if hasattr(original, _HOOKED):
        return

    @functools.wraps(original)
    def _initialize_params(self: Any, param_dict: MutableMapping[str, Any]) -> None:
        enabled = is_set(ENABLE_VARIABLE)
        if not enabled and not mentions_tencache(param_dict):
            original(self, param_dict)
            return
        from tencache_ds.integration.engine_choice import say_loudly, take_engine_choice

        rank = getattr(self, "global_rank", 0)
        choice = take_engine_choice(param_dict, disabled=is_set(DISABLE_VARIABLE), enabled=enabled)
        say_loudly(choice.notices, rank)
        if not choice.active:
            original(self, param_dict)
            return
        try:
            _load_everything()
            from tencache_ds import host_path
            from tencache_ds.integration.activation import activate
            from tencache_ds.integration.config_checks import (
                CONFIG_ATTRIBUTE,
                REASON_ATTRIBUTE,
                UNUSED_ATTRIBUTE,
                check_config,
                check_sections,
                unused_keys,
            )

            say_loudly(check_sections(param_dict), rank)
            original(self, param_dict)
            options = check_config(self, param_dict)
            setattr(self, CONFIG_ATTRIBUTE, options)
            setattr(self, UNUSED_ATTRIBUTE, unused_keys(param_dict))
            activate()
            host_path.prepare(options)
        except Exception as error:
            if choice.by_environment:  # the messages speak of a key that this config does not have
                from tencache_ds.errors import add_note

                add_note(error, _NOTE)
            raise
        setattr(self, REASON_ATTRIBUTE, f"{ENABLE_VARIABLE} is set" if choice.by_environment else "")

    setattr(_initialize_params, _HOOKED, True)
    config_class._initialize_params = _initialize_params


def is_set(variable: str) -> bool:
    """Whether a variable of the environment is set, to anything but ``0``."""
    return os.environ.get(variable, "") not in ("", "0")


def _load_everything() -> None:
    """Imports all that a config needs that asks for TenCache.

    Raises:
        SeamError: the installed DeepSpeed is not one that TenCache works with.
        InstallationError: names what cannot be imported and the remedy.
    """
    from tencache_ds.integration.seams import verify_seams

    verify_seams()
    try:
        for name in _NEEDED:
            importlib.import_module(f"tencache_ds.integration.{name}")
    except Exception as error:  # a broken installation fails in too many ways to list
        from tencache_ds.errors import InstallationError

        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("tencache_ds"):
            remedy = "Install what is missing (pip install tencache-ds adds it and leaves what is there"
        else:
            remedy = "Reinstall it (pip install --force-reinstall --no-deps tencache-ds"
        raise InstallationError(
            f'the config selects "{ENGINE_KEY}": "{ENGINE_NAME}", but TenCache cannot be loaded: '
            f"{type(error).__name__}: {error}. {remedy}; "
            f'"tencache doctor" checks the rest), or remove "{ENGINE_KEY}" to run with DeepSpeed\'s own offload.'
        ) from error


def sections_of(param_dict: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """The parts of a config where a user may write a key of TenCache, each with the prefix of its keys."""
    yield "", param_dict
    zero = param_dict.get(ZERO_KEY)
    if isinstance(zero, Mapping):
        yield f"{ZERO_KEY}.", zero
        for name in ("offload_param", "offload_optimizer"):
            if isinstance(zero.get(name), Mapping):
                yield f"{ZERO_KEY}.{name}.", zero[name]


def meant(key: object, value: object) -> str | None:
    """The key of TenCache that this one is, or was meant to be; None for all others."""
    match = closest(key, (ENGINE_KEY, OPTIONS_KEY))
    if match is not None or not isinstance(key, str):
        return match
    names_engine = closest(value, (ENGINE_NAME,)) is not None
    return ENGINE_KEY if names_engine and any(word in key.lower() for word in ("offload", "engine")) else None


def mentions_tencache(param_dict: Mapping[str, Any]) -> bool:
    """Whether a config has a key of TenCache, or one that looks like it."""
    return any(meant(key, value) for _, section in sections_of(param_dict) for key, value in section.items())
