# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from tencache_ds.observability.paths import Contents, PathStats, summed, what_was_on

GIB = 2**30


def stats(path, *, read=0, written=0, seconds=0.0, rate=None, contents=()):
    return PathStats(path, "native", read, written, seconds, seconds, rate, tuple(contents))


def test_rates_and_stored_bytes():
    one = stats(
        "/a", read=10, written=30, seconds=2.0, contents=[Contents("weights", 1, 5), Contents("optimizer", 2, 7)]
    )
    assert (one.read_bytes_per_s, one.write_bytes_per_s, one.stored_nbytes) == (5.0, 15.0, 12)
    idle = stats("/a")
    assert (idle.read_bytes_per_s, idle.write_bytes_per_s, idle.stored_nbytes) == (None, None, 0)


def test_engines_that_share_a_path_are_one_entry():
    weights, optimizer = Contents("weights", 1, 5), Contents("optimizer", 2, 7)
    result = summed(
        [
            stats("/a", read=1, written=2, seconds=1.0, contents=[weights]),
            stats("/b", read=50),
            stats("/a", read=10, written=20, seconds=0.5, rate=4.0, contents=[optimizer]),
        ]
    )
    assert result == (
        stats("/a", read=11, written=22, seconds=1.5, rate=4.0, contents=[weights, optimizer]),
        stats("/b", read=50),
    )


def test_what_was_on_a_path():
    contents = [Contents("weights", 12, GIB // 2), Contents("optimizer", 120, 4 * GIB)]
    said = what_was_on("/nvme2", contents)
    assert said.startswith(
        "Of this rank's state, 0.50 GiB of 12 weights and 4.00 GiB of optimizer state in 120 chunks was on /nvme2."
    )
    assert "last checkpoint" in said
    assert what_was_on("/nvme2", []).startswith("Of this rank's state, nothing was on /nvme2.")
