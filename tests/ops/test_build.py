# SPDX-License-Identifier: Apache-2.0
"""The program that builds one op before anything waits for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tencache_ds.ops
from tencache_ds.ops.build import build
from tencache_ds.ops.tencache_aio import TenCacheAioBuilder
from tencache_ds.ops.tencache_update import TenCacheUpdateBuilder

pytestmark = pytest.mark.timeout(300)  # the first run builds the op


def test_an_op_is_built_by_the_name_of_its_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = TenCacheAioBuilder.load
    monkeypatch.setattr(TenCacheAioBuilder, "load", lambda self, verbose: loaded.append(load(self, verbose).__name__))
    build("tencache_ds.ops.tencache_aio:TenCacheAioBuilder")
    assert loaded == [TenCacheAioBuilder.NAME]


@pytest.mark.parametrize("name", ["RocketBuilder", "tencache_ds.ops.tencache_aio:RocketBuilder"])
def test_a_name_that_nobody_knows_is_in_the_error(name: str) -> None:
    with pytest.raises((SystemExit, AttributeError), match="RocketBuilder"):
        build(name)


def test_the_native_op_is_optimised_and_asks_nothing_about_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise AssertionError("py-cpuinfo takes a second")

    monkeypatch.setattr("cpuinfo.get_cpu_info", ask)
    flags = TenCacheAioBuilder().cxx_args()
    assert "-O3" in flags
    assert "-O0" not in flags
    assert not [flag for flag in flags if flag.startswith("-march") or not flag]


def test_an_op_compiled_at_installation_is_used_with_its_version_of_torch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / TenCacheAioBuilder().prebuilt_name().split(".")[-2]
    folder.mkdir()
    (folder / "tencache_aio.py").write_text("ORIGIN = 'installation'")
    monkeypatch.setattr(tencache_ds.ops, "__path__", [*tencache_ds.ops.__path__, str(tmp_path)])
    try:
        assert TenCacheAioBuilder().load().ORIGIN == "installation"
        assert TenCacheUpdateBuilder().prebuilt() is None
        monkeypatch.setattr("torch.__version__", "2.4.1+cu124")
        assert TenCacheAioBuilder().prebuilt() is None
    finally:  # or the tests that follow in this process would find the folder, and the module in it
        for name in [name for name in sys.modules if name.startswith("tencache_ds.ops.prebuilt_")]:
            del sys.modules[name]
