# SPDX-License-Identifier: Apache-2.0
"""Which parts of the host path an engine has."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from tencache_ds.config import TenCacheConfig
from tencache_ds.host_path import HostPath, parts, prepare, startup
from tencache_ds.integration.seams import Feature


def zero_config(**prescribed: bool) -> Any:
    return SimpleNamespace(**{"use_all_reduce_for_fetch_params": False, "allgather_sequential": False} | prescribed)


def test_every_part_is_on_unless_it_is_switched_off() -> None:
    assert all(asdict(HostPath.of(TenCacheConfig(), zero_config())).values())
    assert HostPath.of(TenCacheConfig(host_path=False), zero_config()) == HostPath()
    assert not any(asdict(HostPath()).values())


@pytest.mark.parametrize("key", ["use_all_reduce_for_fetch_params", "allgather_sequential"])
def test_config_keys_of_deepspeed_count(key: str) -> None:
    found = HostPath.of(TenCacheConfig(), zero_config(**{key: True}))
    assert found.gathers
    assert not found.rank_gathers


@pytest.mark.parametrize(
    ("feature", "without"),
    [
        (Feature.FETCHES, {"fetches"}),
        (Feature.GATHERS, {"gathers", "rank_gathers"}),
        (Feature.BUCKETS, {"buckets"}),
        (Feature.NORMS, {"norms"}),
        (Feature.HOOKS, {"hooks"}),
        (Feature.LINEAR, {"linear"}),
        (Feature.MUON, set()),
    ],
)
def test_a_seam_that_differs_leaves_its_part_to_deepspeed(
    feature: Feature, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "works", lambda each: each is not feature)
    found = HostPath.of(TenCacheConfig(), zero_config())
    assert {name for name, on in asdict(found).items() if not on} == without


@pytest.mark.parametrize("on", [True, False])
def test_muon_is_imported_quickly_where_the_host_path_is_on(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[bool] = []
    monkeypatch.setattr("tencache_ds.host_path.compile_when_called", lambda: imported.append(True))
    prepare(TenCacheConfig(host_path=on))
    assert imported == [True] * on
    assert startup.MODULE.startswith("deepspeed.")
