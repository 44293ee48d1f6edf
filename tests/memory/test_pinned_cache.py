# SPDX-License-Identifier: Apache-2.0
"""Pinned memory that nothing uses goes back to the system."""

from __future__ import annotations

import psutil
import pytest
import torch

from tencache_ds.memory.arena import empty_pinned_cache

NBYTES = 640 << 20  # for which torch pins a GiB


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_memory_of_tensors_that_are_gone_goes_back() -> None:
    process = psutil.Process()
    torch.ones(1, device="cuda")
    empty_pinned_cache()
    before = process.memory_info().rss
    tensor = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    kept = torch.full((4096,), 7, dtype=torch.uint8).pin_memory()
    del tensor
    held = process.memory_info().rss
    empty_pinned_cache()
    assert held - before >= NBYTES
    assert process.memory_info().rss - before < NBYTES // 4
    assert kept.eq(7).all()


def test_without_a_gpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: pytest.fail("there is no such cache"), raising=False)
    empty_pinned_cache()


def test_builds_of_torch_that_cannot_keep_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(torch._C, "_host_emptyCache", raising=False)
    empty_pinned_cache()
