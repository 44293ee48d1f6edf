# SPDX-License-Identifier: Apache-2.0
"""The settings of an engine from the ``aio`` section."""

from __future__ import annotations

import pytest

from tencache_ds.integration.config_checks import aio_settings


@pytest.mark.parametrize("section", [{}, {"queue_depth": 8}, None])
def test_without_a_block_size_the_engine_chooses_it(section: dict[str, int] | None) -> None:
    assert aio_settings({} if section is None else {"aio": section}).block_nbytes is None


@pytest.mark.parametrize("block", [2**20, 2**22, 1e6])
def test_a_block_size_that_is_given_counts_also_where_it_is_deepspeeds_default(block: float) -> None:
    assert aio_settings({"aio": {"block_size": block}}).block_nbytes == block


def test_other_keys_have_deepspeeds_defaults_and_flags_may_be_quoted() -> None:
    settings = aio_settings({"aio": {"single_submit": "true", "overlap_events": "false"}})
    assert (settings.queue_depth, settings.single_submit, settings.overlap_events) == (8, True, False)
