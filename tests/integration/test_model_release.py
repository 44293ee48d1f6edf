# SPDX-License-Identifier: Apache-2.0
"""Gathers that are under way when an engine ends."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tencache_ds.integration import release
from tencache_ds.integration.release import finish_gathers

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def waiting_blocks(monkeypatch):
    """As on the CPU accelerator; on a GPU it orders streams."""
    monkeypatch.setattr(release, "get_accelerator", lambda: SimpleNamespace(is_synchronized_device=lambda: True))


class Gather:
    def __init__(self, begun_everywhere: bool = True, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.error = error
        if begun_everywhere:
            self.ended.set()
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self.ended.wait()
        if self.error is not None:
            raise self.error


def module_with(*gathers: Gather) -> torch.nn.Module:
    module = torch.nn.Linear(2, 2)
    module.ds_inflight_param_registry = dict(enumerate(gathers))
    return module


def test_each_gather_is_waited_for_once():
    gather, gave_up = Gather(), []
    module = module_with(gather, gather)
    finish_gathers(module, lambda: gave_up.append(1))
    assert gather.waits == 1
    assert module.ds_inflight_param_registry == {}
    assert gave_up == []
    finish_gathers(torch.nn.Linear(2, 2), lambda: gave_up.append(1))
    assert gave_up == []


def test_a_gather_that_no_other_rank_begins_is_given_up(caplog):
    gather, gave_up = Gather(begun_everywhere=False), []
    t_start_s = time.monotonic()
    finish_gathers(module_with(Gather(), gather), lambda: gave_up.append(1), timeout_s=0.1)
    assert time.monotonic() - t_start_s < 10
    assert gave_up == [1]
    assert "2 gathers started here" in caplog.text
    gather.ended.set()


def test_the_error_of_a_gather_is_raised():
    with pytest.raises(RuntimeError, match="connection closed"):
        finish_gathers(module_with(Gather(error=RuntimeError("connection closed"))), lambda: None)
