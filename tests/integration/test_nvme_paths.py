# SPDX-License-Identifier: Apache-2.0
"""Several NVMe paths: the numbers are those of stock CPU offload wherever the bytes lie, while they move between paths,
and a path that fails says what was on it.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.long_cases import marked, wanted

pytestmark = pytest.mark.timeout(400)

PROGRAM = "path_cases.py"
STOP_WITHIN_S = 10.0
TURN = 6
"""Number of steps after which the other path is the slow one."""

SLOW_FIRST = "kind=delay,seconds=0.02,match={folder}/nvme/"
SLOW_SECOND = "kind=delay,seconds=0.02,match={folder}/second/"
CASES: dict[str, dict[str, Any]] = {
    "equal": {"paths": ["second"]},
    "drift": {"paths": ["second"], "steps": 20, "rules": {"0": SLOW_SECOND, str(TURN): SLOW_FIRST}},
    "drift_accumulation": {
        "paths": ["second", "third"],
        "accumulation": 2,
        "clipping": 0.1,
        "rules": {"0": SLOW_SECOND, str(TURN): SLOW_FIRST},
    },
}
LONG = {"drift_accumulation"}
FAULTS = {
    "eio": {"paths": ["second"], "rules": {"2": "kind=eio,op=write,match={folder}/second/"}},
    "hang": {
        "paths": ["second"],
        "rules": {"2": "kind=hang,op=read,match={folder}/second/"},
        "tencache": {"io_timeout_s": 1.0},
    },
}
APART = {"paths": ["common"], "optimizer_path": "optimizers", "steps": 2}


def cases_of(config: pytest.Config, faults: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
    chosen = {name: CASES[name] for name in wanted(config, CASES, LONG)}
    stock = [(name, {key: case[key] for key in case if key in ("accumulation", "clipping", "steps")}, "stock")
             for name, case in chosen.items()]  # fmt: skip
    return [*stock, *((name, case, "tencache") for name, case in (chosen | faults).items())]


@pytest.fixture(scope="module")
def one_rank(harness: Any, pytestconfig: pytest.Config) -> Any:
    return harness.run([*cases_of(pytestconfig, FAULTS), ("apart", APART, "tencache")], program=PROGRAM, timeout_s=350)


@pytest.fixture(scope="module")
def two_ranks(harness: Any, pytestconfig: pytest.Config) -> Any:
    return harness.run(cases_of(pytestconfig, {}), ranks=2, program=PROGRAM, timeout_s=350)


@pytest.fixture(params=["one_rank", "two_ranks"])
def outcome(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def part_on(held: dict[str, dict[str, int]], path: str, kind: str) -> float:
    return held[path][kind] / sum(kinds[kind] for kinds in held.values())


@pytest.mark.parametrize("name", marked(CASES, LONG))
def test_same_numbers_as_cpu_offload(outcome: Any, name: str) -> None:
    for rank in outcome.ranks:
        ours, stock = (outcome.result(name, engine, rank) for engine in ("tencache", "stock"))
        assert ours["failure"] == ""
        assert ours["losses"] == stock["losses"]
        assert ours["weights"] == stock["weights"]
        assert ours["threads"] == ours["left"] == []


@pytest.mark.parametrize("kind", ["weights", "optimizer"])
def test_extents_follow_the_bandwidth(outcome: Any, kind: str) -> None:
    for rank in outcome.ranks:
        result = outcome.result("drift", "tencache", rank)
        held = result["held"]
        assert result["relocated"] > 0
        assert 0.35 < part_on(held[0], "second", kind) < 0.65, "a start with equal shares"
        assert part_on(held[TURN], "second", kind) < 0.3, held
        assert part_on(held[-1], "second", kind) > 0.6, held


def test_every_path_is_counted_and_the_log_names_it(outcome: Any) -> None:
    for rank in outcome.ranks:
        result = outcome.result("equal", "tencache", rank)
        assert list(result["paths"]) == result["scratch"] == ["nvme", "second"]
        read, written = (sum(path[index] for path in result["paths"].values()) for index in (0, 1))
        assert (read, written) == (result["total"]["nvme_read"], result["total"]["nvme_write"])
        assert all(path[2] > 0 for path in result["paths"].values())
        assert "lanes per path, over 2 paths (" in result["line"]
        assert re.search(r"\(\S+/nvme [\d.]+ [MG]iB, \S+/second [\d.]+ [MG]iB\)", result["line"])


def test_paths_on_one_file_system_are_warned_of(one_rank: Any) -> None:
    assert re.search(r"the NVMe paths \S+/nvme and \S+/second are on the same file system", one_rank.finished.log)


def test_each_kind_keeps_its_own_path_and_shares_the_further_ones(one_rank: Any) -> None:
    held = one_rank.result("apart", "tencache")["held"][-1]
    assert {name: sorted(kinds) for name, kinds in held.items()} == {
        "nvme": ["weights"],
        "optimizers": ["optimizer"],
        "common": ["optimizer", "weights"],
    }
    assert all(nbytes > 0 for kinds in held.values() for nbytes in kinds.values())


@pytest.mark.parametrize(("name", "cause"), [("eio", "Input/output error"), ("hang", "not finished after 1.0 s")])
def test_a_path_that_fails_says_what_was_on_it(one_rank: Any, name: str, cause: str) -> None:
    result = one_rank.result(name, "tencache")
    assert cause in result["failure"]
    folder = result["path"].split("/second/")[0]
    assert result["path"].startswith(f"{folder}/second/tencache-")
    (note,) = result["notes"]
    assert re.match(
        r"Of this rank's state, 0.00 GiB of \d+ weights and 0.0\d GiB of optimizer state in \d\d chunks was on "
        f"{folder}/second",
        note,
    )
    assert result["seconds"] < STOP_WITHIN_S
    assert result["seconds_to_destroy"] < STOP_WITHIN_S
    assert result["threads"] == result["left"] == []
