# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.integration.config_checks import unused_keys


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        ({}, ()),
        ({"zero_optimization": None, "aio": "auto"}, ()),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/a"}}, "aio": {"queue_depth": 8}},
            (),
        ),
        (
            {"zero_optimization": {"offload_param": {"buffer_count": 5}}},
            ("zero_optimization.offload_param.buffer_count",),
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"fast_init": False}}, "aio": {"use_gds": True}},
            ("zero_optimization.offload_optimizer.fast_init", "aio.use_gds"),
        ),
    ],
)
def test_keys_of_deepspeeds_own_engine(config: dict, unused: tuple[str, ...]) -> None:
    assert unused_keys(config) == unused
