# SPDX-License-Identifier: Apache-2.0
"""Finding TenCache's keys in a DeepSpeed config, misspelt ones too. Small: every DeepSpeed program imports it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tencache_ds.names import ENGINE_KEY, ENGINE_NAME, OPTIONS_KEY, ZERO_KEY, closest


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
