# SPDX-License-Identifier: Apache-2.0
"""The search finds the best of its trials, ends, and continues from given trials."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.comparison.tuning import MARGIN, Search, Trial

SPACE: dict[str, tuple[Any, ...]] = {"threads": (4, 8, 1), "depth": (32, 8), "pipeline": (True,)}


def search(
    space: dict[str, tuple[Any, ...]], cost: Any, fixed: dict[str, Any] | None = None, **limits: Any
) -> list[Trial]:
    trials: list[Trial] = []
    rules = Search(space, fixed or {}, **limits)
    while (point := rules.next_trial(trials)) is not None:
        assert len(trials) < 1000, "the search does not end"
        trials.append(Trial(point, cost(point)))
    return trials


def test_one_knob_after_the_other_at_the_best_so_far_and_the_winner_once_more() -> None:
    trials = search(SPACE, lambda point: {4: 5.0, 8: 3.0, 1: 9.0}[point["threads"]] + point["depth"] / 100)
    points = [(t.knobs["threads"], t.knobs["depth"]) for t in trials]
    assert points == [(4, 32), (8, 32), (1, 32), (8, 8), (4, 32), (8, 8)]
    assert Search(SPACE, {}).best(trials) == {"threads": 8, "depth": 8, "pipeline": True}
    assert Search(SPACE, {}).best(trials[:-1]) == {"threads": 4, "depth": 32, "pipeline": True}  # not confirmed yet
    assert Search(SPACE, {}, confirm=False).best(trials[:-1]) == {"threads": 8, "depth": 8, "pipeline": True}


def test_who_was_lucky_once_is_not_taken() -> None:
    lucky = iter([10.0, 9.0, 10.0, 10.0, 9.9, 9.8])
    trials = search(SPACE, lambda point: next(lucky))
    assert len(trials) == 6
    assert Search(SPACE, {}).best(trials) == {"threads": 4, "depth": 32, "pipeline": True}


def test_a_little_faster_is_not_better() -> None:
    trials = search(SPACE, lambda point: 10.0 if point["threads"] == 4 else 10.0 * (1 - MARGIN / 2))
    assert len(trials) == 4  # nothing to confirm
    assert Search(SPACE, {}).best(trials)["threads"] == 4


def test_the_number_of_points_is_limited_and_confirming_comes_on_top() -> None:
    trials = search(SPACE, lambda point: float(point["threads"] == 4) + 1, most=2)
    assert [t.knobs["threads"] for t in trials] == [4, 8, 4, 8]
    assert Search(SPACE, {}).best(trials)["threads"] == 8
    assert search(SPACE, lambda point: 1.0, most=0) == []
    assert len(search(SPACE, lambda point: float(point["threads"] == 4) + 1, most=2, confirm=False)) == 2


def test_what_the_caller_fixed_is_not_searched() -> None:
    trials = search(SPACE, lambda point: float(point["depth"]), {"threads": 8})
    assert [(t.knobs["threads"], t.knobs["depth"]) for t in trials] == [(8, 32), (8, 8)] * 2
    assert Search({"ratio": (0.5,)}, {}).next_trial([]) is None
    assert Search(SPACE, {"threads": 2, "depth": 3}).next_trial([]) is None


def test_points_that_fail_are_never_the_best() -> None:
    trials = search(SPACE, lambda point: math.inf if point["threads"] == 4 else 1.0 + point["threads"])
    assert Search(SPACE, {}).best(trials)["threads"] == 1
    nothing_runs = search(SPACE, lambda point: math.inf)
    assert Search(SPACE, {}).best(nothing_runs) == {"threads": 4, "depth": 32, "pipeline": True}


@given(st.data())
def test_any_interruption_gives_the_same_search(data: st.DataObject) -> None:
    knobs = data.draw(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 9), min_size=1, max_size=4,
                                                                        unique=True), min_size=1))  # fmt: skip
    space = {knob: tuple(values) for knob, values in knobs.items()}
    costs: dict[str, float] = {}

    def cost(point: dict[str, Any]) -> float:
        return costs.setdefault(str(sorted(point.items())), data.draw(st.floats(0.1, 10)))

    trials = search(space, cost)
    for cut in range(len(trials)):
        assert Search(space, {}).next_trial(trials[:cut]) == trials[cut].knobs
    assert len(trials) <= 3 + sum(len(values) - 1 for values in space.values())
    if trials:
        fastest = min(trial.seconds for trial in trials)
        found = cost(Search(space, {}).best(trials))
        assert found <= trials[0].seconds
        assert found * (1 - MARGIN) <= fastest
