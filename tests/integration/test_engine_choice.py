# SPDX-License-Identifier: Apache-2.0
"""What the environment asks for where a config does not: decided on plain dicts."""

from __future__ import annotations

from typing import Any

import pytest

from tencache_ds.errors import ConfigError
from tencache_ds.integration.engine_choice import take_engine_choice

ON_CPU = {"stage": 3, "offload_optimizer": {"device": "cpu"}}


def enabled(zero: Any, **keys: Any) -> Any:
    return take_engine_choice({"zero_optimization": zero} | keys, enabled=True)


@pytest.mark.parametrize(
    "zero",
    [
        ON_CPU,
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}},
        # What accelerate's plugin options become.
        {"stage": 3, "offload_param": {"device": "none", "nvme_path": None}, "offload_optimizer": {"device": "cpu"}},
        {"stage": 3, "cpu_offload": True},
    ],
)
def test_stage_3_with_offload_is_enabled(zero: dict[str, Any]) -> None:
    choice = enabled(zero)
    assert choice.active
    assert choice.by_environment
    assert choice.notices == ()


@pytest.mark.parametrize(
    ("zero", "reason"),
    [
        (None, '"zero_optimization.stage" is 0'),
        ({"offload_optimizer": {"device": "cpu"}}, '"zero_optimization.stage" is 0'),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, '"zero_optimization.stage" is 2'),
        ({"stage": 3}, "the config offloads nothing"),
        ({"stage": 3, "offload_param": None, "offload_optimizer": {"device": "none"}}, "the config offloads nothing"),
    ],
)
def test_what_cannot_be_enabled_says_why(zero: Any, reason: str) -> None:
    choice = enabled(zero)
    assert not choice.active
    (notice,) = choice.notices
    assert notice.startswith("TENCACHE_ENABLE is set, but has no effect on this DeepSpeed engine: ")
    assert reason in notice


def test_what_the_config_says_goes_before() -> None:
    asked = enabled(ON_CPU, offload_engine="tencache")
    assert asked.active
    assert not asked.by_environment
    declined = enabled(ON_CPU, offload_engine=None)
    assert not declined.active
    assert '"offload_engine": null' in declined.notices[0]
    with pytest.raises(ConfigError, match="offload_engin"):
        enabled(ON_CPU, offload_engin=None)


def test_switched_off_goes_before_everything() -> None:
    choice = take_engine_choice({"zero_optimization": ON_CPU}, enabled=True, disabled=True)
    assert not choice.active
    assert choice.notices[0].startswith("TenCache is OFF: TENCACHE_ENABLE is set, but TENCACHE_DISABLE is set")
    both = take_engine_choice({"zero_optimization": ON_CPU, "offload_engine": "tencache"}, enabled=True, disabled=True)
    assert len(both.notices) == 1
    assert 'the config says "offload_engine": "tencache"' in both.notices[0]
