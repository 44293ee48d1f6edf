# SPDX-License-Identifier: Apache-2.0
"""Whether a config asks for TenCache; what looks as if it did, and does not, is never passed over in silence."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from tencache_ds.errors import ConfigError
from tencache_ds.integration.config_hook import meant, sections_of
from tencache_ds.names import DISABLE_VARIABLE, ENABLE_VARIABLE, ENGINE_KEY, ENGINE_NAME, OPTIONS_KEY, ZERO_KEY, closest

logger = logging.getLogger("DeepSpeed.tencache")

_ASK = f'"{ENGINE_KEY}": "{ENGINE_NAME}"'
_said: set[str] = set()
_OLD_OFFLOAD_KEYS = ("cpu_offload", "cpu_offload_param")
"""Deprecated keys that DeepSpeed still turns into the sections ``offload_optimizer`` and ``offload_param``."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """The choice of the engine in a config.

    Attributes:
        active: it asks for TenCache, or the environment does, and TenCache is not switched off.
        notices: for the user, where this run may differ from the intention of the config.
        by_environment: ``TENCACHE_ENABLE`` selects TenCache; the config itself does not.
    """

    active: bool
    notices: tuple[str, ...] = ()
    by_environment: bool = False


@dataclass(frozen=True, slots=True)
class _Mistake:
    """A key that is none, in its full spelling, and the key it was meant to be."""

    key: str
    value: object
    wanted: str

    @property
    def correction(self) -> str:
        if self.wanted == ENGINE_KEY:
            return f'Write "{ZERO_KEY}": {{{_ASK}, …}}'
        return f'Write the options at the top of the config: "{OPTIONS_KEY}": {{…}}'

    @property
    def is_certain(self) -> bool:
        """It cannot be meant for anything else: it names the engine, or lies where DeepSpeed refuses what it does not
        know."""
        return "." in self.key or (self.wanted == ENGINE_KEY and closest(self.value, (ENGINE_NAME,)) is not None)


def take_engine_choice(
    param_dict: MutableMapping[str, Any], *, disabled: bool = False, enabled: bool = False
) -> EngineChoice:
    """Whether a config asks for TenCache; removes the key inside ``zero_optimization``, which DeepSpeed would refuse.

    Args:
        param_dict: the shallow copy that DeepSpeed parses; the user's own dict is not changed.
        disabled: ``TENCACHE_DISABLE`` is set.
        enabled: ``TENCACHE_ENABLE`` is set, which asks for TenCache where a config says nothing.

    Raises:
        ConfigError: an unknown engine, two that contradict each other, or a key that is misspelt or in a wrong place.
    """
    choices = {}
    if ENGINE_KEY in param_dict:
        choices[ENGINE_KEY] = param_dict[ENGINE_KEY]
    zero = param_dict.get(ZERO_KEY)
    if isinstance(zero, Mapping) and ENGINE_KEY in zero:
        choices[f"{ZERO_KEY}.{ENGINE_KEY}"] = zero[ENGINE_KEY]
        param_dict[ZERO_KEY] = {key: value for key, value in zero.items() if key != ENGINE_KEY}
    if disabled:
        notices = [_say_disabled(f'the config says "{key}": "{value}"') for key, value in choices.items() if value]
        if enabled and not choices:
            notices.append(_say_disabled(f"{ENABLE_VARIABLE} is set"))
        return EngineChoice(False, tuple(notices))
    for key, value in choices.items():
        if value is not None and value != ENGINE_NAME:
            raise ConfigError(
                f'"{key}" is {value!r}. Allowed: "{ENGINE_NAME}", or null (or no key) for DeepSpeed\'s own offload.'
            )
    if len(set(choices.values())) > 1:
        raise ConfigError(f"the offload engine is given twice and differs: {choices}. Keep one of them.")
    active = ENGINE_NAME in choices.values()
    mistakes = list(_mistakes(param_dict))
    for mistake in mistakes:
        if active or enabled or mistake.is_certain:
            raise ConfigError(
                f'"{mistake.key}" (given: {mistake.value!r}) is not a key of DeepSpeed or TenCache, or is misplaced, '
                f'and would have no effect. Did you mean "{mistake.wanted}"? {mistake.correction}.'
            )
    if choices:
        switched_off = enabled and not active
        return EngineChoice(active, (_say_no_effect(f'the config says "{ENGINE_KEY}": null'),) if switched_off else ())
    if enabled:
        reason = _why_it_cannot_be_enabled(param_dict)
        return EngineChoice(False, (_say_no_effect(reason),)) if reason else EngineChoice(True, by_environment=True)
    unused = [mistake.key for mistake in mistakes] + ([OPTIONS_KEY] if OPTIONS_KEY in param_dict else [])
    return EngineChoice(False, tuple(_say_inactive(key) for key in unused))


def say_loudly(notices: Iterable[str], rank: int) -> None:
    """Puts notices into the log of rank 0, as warnings, which DeepSpeed shows by default. Each once in a
    process: a config is parsed for ``zero.Init``, for the engine, and by other libraries too.
    """
    for notice in notices:
        if rank == 0 and notice not in _said:
            _said.add(notice)
            logger.warning(notice)


def _mistakes(param_dict: Mapping[str, Any]) -> Iterable[_Mistake]:
    for prefix, section in sections_of(param_dict):
        for key, value in section.items():
            wanted = meant(key, value)
            if wanted is not None and (prefix, key) not in (("", ENGINE_KEY), ("", OPTIONS_KEY)):
                yield _Mistake(f"{prefix}{key}", value, wanted)


def _why_it_cannot_be_enabled(param_dict: Mapping[str, Any]) -> str:
    """Why a config that does not ask for TenCache has no use for it; empty if it has."""
    zero = param_dict.get(ZERO_KEY)
    zero = zero if isinstance(zero, Mapping) else {}
    stage = zero.get("stage", 0)
    if str(stage) != "3":
        return f'TenCache works with ZeRO stage 3, and "{ZERO_KEY}.stage" is {stage!r}'
    sections = [zero.get(name) for name in ("offload_param", "offload_optimizer")]
    devices = [section.get("device") for section in sections if isinstance(section, Mapping)]
    names = {str(getattr(device, "value", device)) for device in devices}
    if names <= {"none", "None"} and not any(zero.get(key) for key in _OLD_OFFLOAD_KEYS):
        return (
            f'the config offloads nothing. Set "{ZERO_KEY}.offload_param.device" and/or '
            f'"{ZERO_KEY}.offload_optimizer.device" to "cpu" or "nvme"'
        )
    return ""


def _say_no_effect(reason: str) -> str:
    return f"{ENABLE_VARIABLE} is set, but has no effect on this DeepSpeed engine: {reason}."


def _say_disabled(asked: str) -> str:
    return (
        f"TenCache is OFF: {asked}, but {DISABLE_VARIABLE} is set in the environment. This "
        f"run uses DeepSpeed's own offload. Unset {DISABLE_VARIABLE} to run with TenCache."
    )


def _say_inactive(key: str) -> str:
    return (
        f'TenCache is NOT ACTIVE: the config has "{key}", but nothing in it asks for the engine. This run uses '
        f'DeepSpeed\'s own offload. Write "{ZERO_KEY}": {{{_ASK}, …}} to run with TenCache, or "{ENGINE_KEY}": null if '
        "that is meant."
    )
