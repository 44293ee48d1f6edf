# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.io.integrity import sampled_fingerprint, whole_fingerprint
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


def test_fingerprints_sample_every_page_and_other_words_each_time():
    data = aligned(32 * PAGE, fill=None)
    reference = [sampled_fingerprint(data, generation) for generation in range(512)]
    assert len(set(reference)) == 512
    assert reference == [sampled_fingerprint(data.clone(), generation) for generation in range(512)]
    data[5 * PAGE + 8 * 100] ^= 1  # one word: exactly one position in 512 sees it
    changed = [sampled_fingerprint(data, generation) != before for generation, before in enumerate(reference)]
    assert sum(changed) == 1
    data[9 * PAGE : 10 * PAGE] ^= 255  # a whole page: every position does
    assert all(sampled_fingerprint(data, generation) != before for generation, before in enumerate(reference))


def test_whole_fingerprints_see_every_bit():
    data = aligned(4 * PAGE, fill=None)
    reference = whole_fingerprint(data, 3)
    assert whole_fingerprint(data.clone(), 3) == reference
    assert whole_fingerprint(data, 4) != reference  # an old version of the same bytes is another write
    for position in (0, 1, PAGE - 1, PAGE, 2 * PAGE + 777, 4 * PAGE - 1):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert whole_fingerprint(data, 3) != reference
            data[position] ^= 1 << bit
