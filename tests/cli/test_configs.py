# SPDX-License-Identifier: Apache-2.0
"""The ready config files: found where the package is installed, valid, and each asking for TenCache."""

from __future__ import annotations

import json

import pytest

from tencache_ds import configs


def test_names() -> None:
    assert configs.names() == ["cpu_offload", "ram_and_nvme", "zero_infinity_nvme"]


@pytest.mark.parametrize("name", configs.names())
def test_each_file_asks_for_tencache(name: str) -> None:
    config = json.loads(configs.path(name).read_text())
    assert config["zero_optimization"]["offload_engine"] == "tencache"
    assert config["zero_optimization"]["stage"] == 3
    assert configs.path(f"{name}.json") == configs.path(name)


@pytest.mark.parametrize("name", configs.names())
def test_deepspeed_accepts_each_file_but_for_the_engine(name: str) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = json.loads(configs.path(name).read_text())["zero_optimization"]
    with pytest.raises(ValueError, match="offload_engine"):  # so nobody runs without TenCache unawares
        DeepSpeedZeroConfig(**zero)
    del zero["offload_engine"]
    DeepSpeedZeroConfig(**zero)


def test_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ValueError, match="cpu_offload, ram_and_nvme, zero_infinity_nvme"):
        configs.path("nvme")
