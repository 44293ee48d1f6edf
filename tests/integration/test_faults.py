# SPDX-License-Identifier: Apache-2.0
"""Storage that fails in the middle of training: the run stops at once with an error that says what and where, or it
continues with correct numbers. It never continues with wrong ones.

The table in ``docs/failures.md`` lists the results.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.io.conftest import build_libaio_faults
from tests.long_cases import are_asked_for

pytestmark = pytest.mark.timeout(300)

PROGRAM = "fault_cases.py"
STOP_WITHIN_S = 10.0
IO_TIMEOUT_S = 1.0
"""Time-out of the cases that hang; closing an engine takes a few times as long."""
N_STEPS = 5


def inject(rule: str, **more: Any) -> dict[str, Any]:
    return {"act": "inject", "rule": rule, **more}


HANG = {"tencache": {"io_timeout_s": IO_TIMEOUT_S}}
WHOLE = {"tencache": {"verify": "full"}}
STORAGE_ERRORS = ("StorageError", "StorageTimeoutError", "SpaceError", "CorruptionError")
KINDS = {"weights": "weight id", "optimizer": "optimizer chunk"}
STOPS: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "eio_read": (inject("kind=eio,op=read"), "Input/output error", 5),
    "eio_write": (inject("kind=eio,op=write"), "Input/output error", 5),
    "enospc": (inject("kind=enospc,op=write"), "No space left on device", 28),
    "short_read": (inject("kind=short,op=read"), "file ends after", None),
    "short_write": (inject("kind=short,op=write"), "the device accepted", 5),
    "torn": (inject("kind=torn,op=write,times=1"), "it was lost or torn", None),
    "lost": (inject("kind=lost"), "No such device", 19),
    "truncated": ({"act": "truncate"}, "file ends after 8192 bytes", None),
    "forbidden": ({"act": "forbid", "reopen": True}, "Permission denied", 13),
    "read_only": (inject("kind=erofs,op=write"), "Read-only file system", 30),
    "bitflip_write": (inject("kind=bitflip,op=write,times=1", **WHOLE), "it was lost or torn", None),
    "hang_write": (inject("kind=hang,op=write", **HANG), f"not finished after {IO_TIMEOUT_S} s", 110),
    "hang_read": (inject("kind=hang,op=read", **HANG), f"not finished after {IO_TIMEOUT_S} s", 110),
}
"""What stops the run: the fault, a part of the cause and the errno."""

GOES_ON: dict[str, dict[str, Any]] = {
    "delayed": inject("kind=delay,seconds=0.01"),
    "removed": {"act": "remove", "reopen": True},
    "forbidden_while_open": {"act": "forbid"},
    "bitflip_read": inject("kind=bitflip,op=read,times=3", **WHOLE),  # a second reading is right
}
"""What does not harm a run: files that are open stay so, and have no names that could vanish."""


def below(rule: str, **more: Any) -> dict[str, Any]:
    """A fault between the native op and libaio: what a kernel or a device would do."""
    return {"act": "libaio", "rule": rule, **more}


STOPS_BELOW: dict[str, tuple[dict[str, Any], str, int | None]] = {
    "eio_read_below": (below("kind=eio,op=read"), "Input/output error", 5),
    "eio_write_below": (below("kind=eio,op=write"), "Input/output error", 5),
    "enospc_below": (below("kind=enospc,op=write"), "No space left on device", 28),
    "torn_below": (below("kind=torn,op=write,times=1"), "it was lost or torn", None),
    "flip_write_below": (below("kind=flip,op=write,times=1", **WHOLE), "it was lost or torn", None),
    "hang_read_below": (below("kind=hang,op=read", **HANG), f"not finished after {IO_TIMEOUT_S} s", 110),
}
GOES_ON_BELOW = {
    "short_read_below": below("kind=short,op=read"),
    "short_write_below": below("kind=short,op=write"),
    "flip_read_below": below("kind=flip,op=read,times=1", **WHOLE),
}
"""Short transfers are continued, and what differs is read again."""

LATE_S = 4.5
LATE = inject("kind=hang,op=read,times=1,seconds=4,match=weight id", answers_after_s=LATE_S, what="weights", **HANG)
"""A read that the device answers when the engine is long closed."""

EVERY_PAIR = [(name, kind) for kind in KINDS for name in (*STOPS, *GOES_ON)]
A_FEW_PAIRS = [
    ("eio_read", "weights"),
    ("eio_write", "optimizer"),
    ("torn", "weights"),
    ("truncated", "optimizer"),
    ("forbidden", "weights"),
    ("hang_read", "optimizer"),
    ("removed", "weights"),
]
"""Of those on two ranks, where every rank takes the same path as a rank alone."""
EVERY_PAIR_BELOW = [(name, kind) for kind in KINDS for name in (*STOPS_BELOW, *GOES_ON_BELOW)]
A_FEW_PAIRS_BELOW = [
    (name, kind) for name, kind in EVERY_PAIR_BELOW if kind == ("weights" if "read" in name else "optimizer")
]
"""Libaio knows nothing of what it moves."""


def marked(pairs: list[tuple[str, str]], few: list[tuple[str, str]]) -> list[Any]:
    return [pair if pair in few else pytest.param(*pair, marks=pytest.mark.long) for pair in pairs]


def case_of(name: str, kind: str) -> dict[str, Any]:
    stops, goes_on = STOPS | STOPS_BELOW, GOES_ON | GOES_ON_BELOW
    case = dict(stops[name][0] if name in stops else goes_on[name])
    case["what"] = kind
    if case["act"] == "inject":
        case["rule"] += f",match={kind}-" if kind == "optimizer" else f",match={kind}"
    return case


def cases_of(pairs: list[tuple[str, str]]) -> list[tuple[str, dict[str, Any], str]]:
    cases = [(f"{name}_{kind}", case_of(name, kind), "tencache") for name, kind in pairs]
    return [("none", inject("none"), "tencache"), *cases]


@pytest.fixture(scope="module")
def alone(harness: Any) -> Any:
    small = ("small_device", {"act": "small_device", "size": "8m"}, "tencache")
    late = ("late", LATE, "tencache")
    return harness.run([*cases_of(EVERY_PAIR), small, late], program=PROGRAM, timeout_s=200)


@pytest.fixture(scope="module")
def alone_below(harness: Any, pytestconfig: pytest.Config) -> Any:
    folder = harness.folder()
    preload = {"LD_PRELOAD": str(build_libaio_faults(folder)), "AIO_FAULT_FILE": str(folder / "rule")}
    pairs = EVERY_PAIR_BELOW if are_asked_for(pytestconfig) else A_FEW_PAIRS_BELOW
    return harness.run(cases_of(pairs), program=PROGRAM, folder=folder, env=preload, timeout_s=200)


@pytest.fixture(scope="module")
def together(harness: Any, pytestconfig: pytest.Config) -> Any:
    """Every rank meets the fault at the same point, so that the processes survive it."""
    pairs = EVERY_PAIR if are_asked_for(pytestconfig) else A_FEW_PAIRS
    return harness.run(cases_of(pairs), ranks=2, program=PROGRAM, timeout_s=280)


def check_it_stopped(outcome: Any, name: str, kind: str, rank: int) -> None:
    result = outcome.result(f"{name}_{kind}", "tencache", rank)
    _, cause, number = (STOPS | STOPS_BELOW)[name]
    assert cause in result["failure"]
    assert result["tag"].startswith(KINDS[kind])
    for part in (result["tag"], result["path"], f"offset {result['offset']}"):
        assert part in result["failure"]
    assert f"-rank{rank}-{kind}" in result["path"]
    assert result["errno"] == number
    assert result["seconds"] < STOP_WITHIN_S
    assert result["seconds_to_destroy"] < STOP_WITHIN_S
    assert result.get("at_the_end", "StorageError").startswith(STORAGE_ERRORS), "what had failed may be told again"
    assert result["threads"] == []
    # The steps that were completed are the right ones.
    assert result["losses"] == outcome.result("none", "tencache", rank)["losses"][: len(result["losses"])]


def check_it_went_on(outcome: Any, name: str, kind: str, rank: int) -> None:
    result, reference = (outcome.result(n, "tencache", rank) for n in (f"{name}_{kind}", "none"))
    assert result["failure"] == ""
    assert len(result["losses"]) == N_STEPS
    assert (result["losses"], result["weights"]) == (reference["losses"], reference["weights"])
    assert result["threads"] == []
    assert "flip" not in name or result["healed"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STOPS)
def test_the_run_stops_with_the_reason(alone: Any, name: str, kind: str) -> None:
    check_it_stopped(alone, name, kind, 0)


def test_a_device_that_answers_after_the_end_harms_nobody(alone: Any) -> None:
    result = alone.result("late", "tencache")
    assert f"not finished after {IO_TIMEOUT_S} s" in result["failure"]
    assert result["seconds_to_destroy"] < STOP_WITHIN_S
    assert "stay mapped until the process ends" in alone.finished.log
    assert "the device has answered, and this process lives" in alone.finished.log


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GOES_ON)
def test_the_run_goes_on_with_the_right_numbers(alone: Any, name: str, kind: str) -> None:
    check_it_went_on(alone, name, kind, 0)


@pytest.mark.parametrize(("name", "kind"), marked(EVERY_PAIR_BELOW, A_FEW_PAIRS_BELOW))
def test_a_run_stops_or_goes_on_when_libaio_misbehaves(alone_below: Any, name: str, kind: str) -> None:
    (check_it_went_on if name in GOES_ON_BELOW else check_it_stopped)(alone_below, name, kind, 0)


def test_a_small_device_is_found_before_training(alone: Any) -> None:
    result = alone.result("small_device", "tencache")
    if "skipped" in result:
        pytest.skip(f"no file system can be mounted here: {result['skipped']}")
    assert result["failure"].startswith("SpaceError")
    assert result["errno"] == 28


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("name", "kind"), marked(EVERY_PAIR, A_FEW_PAIRS))
def test_every_rank_says_what_happened_to_it(together: Any, name: str, kind: str, rank: int) -> None:
    (check_it_went_on if name in GOES_ON else check_it_stopped)(together, name, kind, rank)


@pytest.mark.parametrize(
    ("rule", "rank", "named"),
    [
        ("kind=eio,op=write,match=optimizer-,rank=1", 1, "Input/output error"),
        pytest.param(
            "kind=hang,op=read,match=weights,rank=0", 0, f"not finished after {IO_TIMEOUT_S} s", marks=pytest.mark.long
        ),
    ],
)
def test_a_fault_on_one_rank_ends_the_job(harness: Any, rule: str, rank: int, named: str) -> None:
    """The other one waits in a collective, which nobody will complete: the launcher ends it."""
    outcome = harness.run(
        [("fault", inject(rule, dies=True, **HANG), "tencache")],
        ranks=2,
        program=PROGRAM,
        launcher=True,
        timeout_s=120,
    )
    seconds = time.time() - float((outcome.finished.folder / "inject-began").read_text())
    print(f"the job ended {seconds:.1f} s after the fault began")
    assert outcome.finished.code not in (0, None)
    # Twice: the launcher looks after its ranks every few seconds, and both processes have to end.
    assert seconds < 2 * STOP_WITHIN_S + (5 * IO_TIMEOUT_S if "hang" in rule else 0)
    assert f"[rank {rank}] Storage" in outcome.finished.log
    assert f"-rank{rank}-" in outcome.per_rank[rank]["fault/tencache"]["error"]
    assert named in outcome.finished.log
