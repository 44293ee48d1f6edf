# SPDX-License-Identifier: Apache-2.0
"""Warnings about the folders of an engine."""

from __future__ import annotations

import pytest

from tencache_ds.integration import engine_building
from tencache_ds.profiling.filesystem import FileSystem


def test_folders_over_the_network_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    systems = {"/shared": FileSystem("nfs4", "/shared", "server:/export"), "/local": FileSystem("ext4", "/", "/dev/a")}
    monkeypatch.setattr(engine_building, "file_system_of", lambda path: systems[str(path)])
    monkeypatch.setattr(engine_building.logger, "propagate", True)
    with caplog.at_level("WARNING"):
        engine_building._warn_of_network_folders(("/local", "/shared", "/local", "/shared"))
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the NVMe path /shared is on nfs4, a file system over the network"
    ]
