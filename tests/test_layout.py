# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.layout import gib


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.00 GiB"),
        (2**40, "1024.00 GiB"),
        (2**30, "1.00 GiB"),
        (108 * 2**20, "0.11 GiB"),
        (100 * 2**20, "100.00 MiB"),
        (105_000, "0.10 MiB"),
        (16384, "16.00 KiB"),
        (10, "0.01 KiB"),
    ],
)
def test_small_amounts_keep_their_digits(nbytes: int, text: str) -> None:
    assert gib(nbytes) == text
