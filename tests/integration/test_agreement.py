# SPDX-License-Identifier: Apache-2.0
"""Ranks that decide together: threads in place of processes, on real stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tencache_ds.errors import AgreementError
from tencache_ds.integration import agreement
from tencache_ds.integration.agreement import Agreement, Post, compare_options, compare_weights

pytestmark = pytest.mark.timeout(60)

RANKS = 3


def hash_stores(folder: Path) -> list[Any]:
    return [torch.distributed.HashStore()] * RANKS


def file_stores(folder: Path) -> list[Any]:
    return [torch.distributed.FileStore(str(folder / "store"), RANKS) for _ in range(RANKS)]


def tcp_stores(folder: Path) -> list[Any]:
    first = torch.distributed.TCPStore("127.0.0.1", 0, None, True)
    others = [torch.distributed.TCPStore("127.0.0.1", first.port, None, False) for _ in range(RANKS - 1)]
    return [first, *others]


@pytest.fixture(params=[hash_stores, file_stores, tcp_stores])
def stores(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(agreement, "GRACE_S", 0.5)
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.05)
    return [torch.distributed.PrefixStore("default_pg/", store) for store in request.param(tmp_path)]


def on_ranks(
    stores: Sequence[Any],
    act: Callable[[Agreement, int], Any],
    ranks: Sequence[int] = range(RANKS),
    timeout_s: float = 20,
) -> list[Any]:
    """What ``act`` gave on each rank, or its error; None where the rank did not come."""
    results: list[Any] = [None] * RANKS

    def run(rank: int) -> None:
        try:
            results[rank] = act(Agreement(stores[rank], rank, RANKS, timeout_s), rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    return results


def values(posts: Sequence[Post]) -> list[Any]:
    return [post.value for post in posts]


def test_all_get_what_the_first_rank_makes_of_all_posts(stores: list[Any]) -> None:
    for meeting in range(3):
        result = on_ranks(stores, lambda one, rank: one.reach("memory", {"rank": rank, "n": meeting}, values))  # noqa: B023
        assert result == [[{"rank": rank, "n": meeting} for rank in range(RANKS)]] * RANKS


def test_an_error_is_raised_on_every_rank(stores: list[Any]) -> None:
    def refuse(posts: Sequence[Post]) -> None:
        raise AgreementError(agreement.difference("the device", values(posts), posts))

    result = on_ranks(stores, lambda one, rank: one.reach("memory", "cpu" if rank == 1 else "nvme", refuse))
    for error in result:
        assert isinstance(error, AgreementError)
        assert "the ranks differ in the device: nvme on ranks 0, 2 (" in str(error)
        assert "; cpu on rank 1 (" in str(error)


def test_a_bug_on_the_first_rank_keeps_nobody_waiting(stores: list[Any]) -> None:
    result = on_ranks(stores, lambda one, rank: one.reach("memory", rank, lambda posts: posts[RANKS]))
    assert isinstance(result[0], IndexError)
    assert [type(error) for error in result[1:]] == [AgreementError] * 2


def test_ranks_at_different_places_of_a_program_are_told(stores: list[Any]) -> None:
    result = on_ranks(stores, lambda one, rank: one.reach("memory" if rank else "weights", rank, values))
    for error in result:
        assert "weights on rank 0 (" in str(error)
        assert "memory on ranks 1, 2 (" in str(error)


@pytest.mark.parametrize(("present", "missing"), [((0, 2), "rank 1"), ((1, 2), "rank 0"), ((0,), "ranks 1, 2")])
def test_who_does_not_come_is_named(
    stores: list[Any], present: Sequence[int], missing: str, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(agreement.logger, "propagate", True)
    with caplog.at_level("WARNING"):
        result = on_ranks(stores, lambda one, rank: one.reach("memory", rank, values), present, timeout_s=0.3)
    for rank in present:
        assert f"{missing} did not respond within" in str(result[rank])
        assert '"offload_engine": "tencache"' in str(result[rank])
    assert f"is waiting for {missing} to agree on memory" in caplog.text


def test_one_rank_agrees_with_itself_without_a_store() -> None:
    assert Agreement(None, 0, 1, 0.0).reach("memory", 5, values) == [5]


def posts(*contributions: Any) -> list[Post]:
    return [Post(f"host{index}", "", value) for index, value in enumerate(contributions)]


def test_options_name_the_key_and_the_ranks() -> None:
    same = {"zero_optimization.offload_param.device": "nvme", "gradient_accumulation_steps": 2}
    compare_options(posts(same, dict(same), dict(same)))
    with pytest.raises(AgreementError, match=r'"gradient_accumulation_steps": 2 on ranks 0, 2 \(host0\); 4 on rank 1 '):
        compare_options(posts(same, same | {"gradient_accumulation_steps": 4}, same))
    with pytest.raises(AgreementError, match=r"the version of tencache_ds: null on rank 0 .*; 0.2 on rank 1 \(host1\)"):
        compare_options(posts(same, same | {"the version of tencache_ds": "0.2"}))


def test_weights_name_the_first_weight_that_differs() -> None:
    first, second = ["a.weight", 0, "64 elements, on NVMe"], ["b.weight", 1, "64 elements, in host memory"]
    compare_weights(posts([first, second], [first, second]))
    with pytest.raises(AgreementError) as caught:
        compare_weights(posts([first, second], [first, ["b.weight", 1, "64 elements, on NVMe"]], [first, second]))
    for fragment in (
        "weight 'b.weight'",
        "64 elements, in host memory on ranks 0, 2 (host0)",
        "on NVMe on rank 1 (host1)",
    ):
        assert fragment in str(caught.value)
    with pytest.raises(AgreementError, match=r"'b.weight'.* no such weight on rank 0 \(host0\)"):
        compare_weights(posts([first], [first, second]))
