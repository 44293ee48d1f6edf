# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tencache_ds.observability import channel, channel_client


@pytest.fixture
def channel_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where processes serve and commands look: no job of this user's is found there."""
    path = tmp_path / "tencache"
    for module in (channel, channel_client):
        monkeypatch.setattr(module, "folders", lambda: [path])
    return path
