# SPDX-License-Identifier: Apache-2.0
"""A thousand generated configs: each is refused with an error that names the key, or has the written meaning."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import HealthCheck, given, settings
from pydantic import ValidationError

from tencache_ds.config import TenCacheConfig
from tencache_ds.errors import ConfigError
from tests.integration.generated_configs import Generated, configs

N_EXAMPLES = int(os.environ.get("TENCACHE_TEST_GENERATED_CONFIGS", 20))
"""Trained ones; a thousand take half an hour."""

pytestmark = pytest.mark.timeout(240 + 5 * N_EXAMPLES)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENCACHE_FAULTS", raising=False)
    monkeypatch.setenv("SCRATCH", "/scratch")
    return tmp_path


@settings(
    max_examples=1000, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(generated=configs())
def test_refused_by_name_or_meant_as_written(folder: Path, generated: Generated) -> None:
    if generated.mistakes:
        with pytest.raises((ConfigError, ValidationError)) as refused:
            DeepSpeedConfig(generated.config)
        assert any(key in str(refused.value) for key in generated.mistakes), generated.mistakes
        return
    parsed = DeepSpeedConfig(generated.config)
    for path, meaning in generated.means.items():
        assert equal(value_of(parsed, path), meaning), f"{path}: {value_of(parsed, path)!r}, not {meaning!r}"
    for name in TenCacheConfig.model_fields:
        if ("tencache", name) not in generated.means:
            assert getattr(parsed.tencache, name) == getattr(TenCacheConfig(), name)


def value_of(parsed: Any, path: tuple[str, ...]) -> Any:
    if path[0] == "aio":
        return parsed.aio_config[path[1]]
    result = parsed.tencache if path[0] == "tencache" else parsed.zero_config
    for part in path[1:]:
        result = getattr(result, part.removeprefix("stage3_"))
    return result


def equal(result: Any, meaning: Any) -> bool:
    if isinstance(meaning, bool) and isinstance(result, str):  # a flag of the aio section, as it was written
        return result.lower() == str(meaning).lower()
    if isinstance(meaning, float):
        return math.isclose(result, meaning)
    if isinstance(result, Path):
        return result == Path(meaning)
    return bool(result == meaning)


def test_trains_as_stock_does_or_is_refused(harness: Any) -> None:
    case = {"examples": N_EXAMPLES}
    cases = [("generated", case, "tencache")]
    outcome = harness.run(cases, program="generated_cases.py", timeout_s=120 + 5 * N_EXAMPLES)
    result = outcome.result("generated", "tencache")
    print(result["counts"])
    assert not result["wrong"], "\n\n".join(result["wrong"])
    assert result["left"] == [], "nothing may be left on the disk"
    assert result["counts"]["trained"] >= N_EXAMPLES // 3
