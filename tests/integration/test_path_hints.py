# SPDX-License-Identifier: Apache-2.0
"""What is said about a path that was lost on its way into the config."""

from __future__ import annotations

import pytest

from tencache_ds.errors import ConfigError
from tencache_ds.integration.config_checks import check_nvme_path

KEY = "zero_optimization.offload_param.nvme_path"


@pytest.mark.parametrize("path", [None, "none"])
def test_lost_by_the_launcher_of_accelerate(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ConfigError, match="does not pass --offload_param_nvme_path on.* set ACCELERATE_DEEPSPEED_OFF"):
        check_nvme_path(KEY, path)
    with pytest.raises(ConfigError, match=r"on the NVMe drive\.$"):
        check_nvme_path("tencache.nvme_paths[0]", path)


def test_missing_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    with pytest.raises(ConfigError, match=r"on the NVMe drive\.$"):
        check_nvme_path(KEY, None)


def test_auto() -> None:
    with pytest.raises(ConfigError, match='"auto" is not filled in here'):
        check_nvme_path(KEY, "auto")
