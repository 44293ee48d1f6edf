# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tencache_ds.io.fingerprint import fingerprint
from tests.io.conftest import aligned

pytestmark = pytest.mark.timeout(60)

PAGE = 4096


def test_fingerprints_sample_every_page_and_other_words_each_time():
    data = aligned(32 * PAGE, fill=None)
    reference = [fingerprint(data, generation) for generation in range(512)]
    assert len(set(reference)) == 512
    assert reference == [fingerprint(data.clone(), generation) for generation in range(512)]
    data[5 * PAGE + 8 * 100] ^= 1  # one word: exactly one position in 512 sees it
    changed = [fingerprint(data, generation) != before for generation, before in enumerate(reference)]
    assert sum(changed) == 1
    data[9 * PAGE : 10 * PAGE] ^= 255  # a whole page: every position does
    assert all(fingerprint(data, generation) != before for generation, before in enumerate(reference))
