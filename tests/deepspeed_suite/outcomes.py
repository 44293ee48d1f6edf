# SPDX-License-Identifier: Apache-2.0
"""What the tests did in each mode, how a mode differs from stock, and which differences are accounted for. Pure, but
for reading files.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tencache_ds.names import StrEnum
from tests.deepspeed_suite.forcing import Mode, Seen, changes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Outcome(StrEnum):
    passed = "passed"
    failed = "failed"
    skipped = "skipped"
    hung = "hung"
    """Stopped at its time limit."""

    crashed = "crashed"
    """The process of pytest ended during the test."""


@dataclass(frozen=True, slots=True)
class Result:
    """One test in one mode.

    Attributes:
        error: first line of the failure, or the reason for skipping.
        seen: what its configs asked for by themselves.
    """

    test: str
    outcome: Outcome
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    seen: frozenset[Seen] = frozenset()


class Kind(StrEnum):
    """Why a test need not pass."""

    refusal = "refusal"
    """TenCache refuses the config with an error that says so; ``docs/configuration.md`` lists it."""

    internals = "internals"
    """The test looks at objects of stock's swapper, or at where stock keeps a tensor between two steps."""

    forcing = "forcing"
    """What the suite does to the config contradicts what the test is about."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Tests that may fail.

    Attributes:
        tests: node id in which ``*`` stands for anything.
        modes: where they may fail.
        error: part of the first line of the failure that is meant, so that another failure shows.
    """

    tests: str
    modes: frozenset[Mode]
    kind: Kind
    error: str
    reason: str

    def names(self, test: str) -> bool:
        """Whether this is about a test, whatever became of it."""
        return re.fullmatch(re.escape(self.tests).replace(r"\*", ".*"), test) is not None

    def covers(self, mode: Mode, result: Result) -> bool:
        """Whether this is the failure that is meant."""
        return mode in self.modes and self.names(result.test) and self.error in result.error


@dataclass(frozen=True, slots=True)
class Difference:
    """A test that stock passes and a mode does not.

    Attributes:
        exclusion: what accounts for it.
        shared: stock's CPU offload fails likewise.
    """

    mode: Mode
    result: Result
    exclusion: Exclusion | None
    shared: bool

    @property
    def accounted_for(self) -> bool:
        return self.shared or self.exclusion is not None


def read_results(path: Path) -> dict[str, Result]:
    """The results in a file of JSON lines, the last of each test; tests that started and never ended are missing."""
    results: dict[str, Result] = {}
    for line in _lines(path):
        if "outcome" in line:
            given = {key: value for key, value in line.items() if key in Result.__dataclass_fields__}
            given |= {"outcome": Outcome(line["outcome"])}
            given |= {"seen": frozenset(Seen(name) for name in line.get("seen", ()))}
            results[line["test"]] = Result(**given)
    return results


def unfinished(path: Path, nth_line: int = 0) -> list[str]:
    """Tests that started after ``nth_line`` of a file of JSON lines and have no result."""
    started: dict[str, None] = {}
    for line in _lines(path)[nth_line:]:
        if "started" in line:
            started[line["test"]] = None
        elif "outcome" in line:
            started.pop(line["test"], None)
    return list(started)


def forget(path: Path, parts: Sequence[str]) -> None:
    """Drops results from a file of JSON lines: of tests whose id contains one of ``parts``; without parts, of all that
    did not pass.
    """
    kept = []
    for line in _lines(path):
        named = any(part in line["test"] for part in parts)
        if not (named if parts else line.get("outcome", Outcome.failed) != Outcome.passed):
            kept.append(json.dumps(line) + "\n")
    path.write_text("".join(kept))


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_exclusions(path: Path) -> list[Exclusion]:
    """The table of ``exclusions.toml``.

    Raises:
        ValueError: an entry without a reason, an error or a mode, or with a key that nothing reads.
    """
    exclusions = []
    for entry in tomllib.loads(path.read_text())["excluded"]:
        wanted = set(Exclusion.__dataclass_fields__)
        if set(entry) != wanted or not all(entry.values()):
            raise ValueError(f"an exclusion has the keys {sorted(wanted)}, none of them empty, not {entry}")
        modes = frozenset(Mode(mode) for mode in entry["modes"])
        exclusions.append(Exclusion(**entry | {"modes": modes, "kind": Kind(entry["kind"])}))
    return exclusions


def to_run(mode: Mode, stock: Mapping[str, Result]) -> list[str]:
    """Tests that stock passes and whose configs ``mode`` changes."""
    return [
        test for test, result in stock.items() if result.outcome == Outcome.passed and changes(mode, set(result.seen))
    ]


def differences(
    stock: Mapping[str, Result],
    with_mode: Mapping[Mode, Mapping[str, Result]],
    exclusions: Sequence[Exclusion],
) -> list[Difference]:
    """Every test that stock passes and ``line`` or ``nvme`` does not.

    A failure of ``nvme`` that stock's CPU offload shares, with the same error but for numbers, is marked so.
    """
    unexpected = []
    shared_with = with_mode.get(Mode.offload, {})
    for mode in (Mode.line, Mode.nvme):
        for test in to_run(mode, stock):
            result = with_mode.get(mode, {}).get(test)
            if result is None or result.outcome == Outcome.passed:
                continue
            exclusion = next((entry for entry in exclusions if entry.covers(mode, result)), None)
            other = shared_with.get(test) if mode == Mode.nvme else None
            shared = other is not None and _same_failure(result, other)
            unexpected.append(Difference(mode, result, exclusion, shared))
    return unexpected


def _same_failure(result: Result, other: Result) -> bool:
    return result.outcome == other.outcome and _without_numbers(result.error) == _without_numbers(other.error)


def _without_numbers(error: str) -> str:
    """The first line of a failure without what differs from run to run: values, addresses, ports."""
    return re.sub(r"[-+]?\b(0x[0-9a-f]+|\d[\d.]*(e[-+]?\d+)?)", "#", error)


def stale(
    exclusions: Iterable[Exclusion], stock: Mapping[str, Result], differences: Sequence[Difference], complete: bool
) -> list[str]:
    """Problems of the table itself: entries that account for no failure.

    Args:
        complete: whether all tests of the selection were run. If not, entries about tests that did not run are left
            alone.
    """
    complaints = []
    for entry in exclusions:
        if any(difference.exclusion is entry for difference in differences):
            continue
        named = [test for test in stock if entry.names(test)]
        if named or complete:
            tests = f"none of {len(named)} tests fails so" if named else "there is no such test"
            complaints.append(f"{entry.tests}: {tests}; remove the entry from exclusions.toml")
    return complaints


def report(
    stock: Mapping[str, Result],
    with_mode: Mapping[Mode, Mapping[str, Result]],
    unexpected: Sequence[Difference],
    complaints: Sequence[str],
) -> str:
    """The tables that the runner prints."""
    columns = [outcome.value for outcome in Outcome]
    lines = ["", f"{'mode':8} {'tests':>6} " + " ".join(f"{name:>8}" for name in columns)]
    for mode, results in ({Mode.stock: stock} | dict(with_mode)).items():
        counts = Counter(result.outcome for result in results.values())
        lines.append(f"{mode:8} {len(results):6} " + " ".join(f"{counts[outcome]:8}" for outcome in Outcome))
    for title, chosen in (
        ("not accounted for", [item for item in unexpected if not item.accounted_for]),
        ("excluded", [item for item in unexpected if item.exclusion is not None]),
        ("stock's CPU offload fails likewise", [item for item in unexpected if item.exclusion is None and item.shared]),
    ):
        lines += ["", f"{title}: {len(chosen)}"]
        for item in chosen:
            lines.append(f"  {item.mode} {item.result.outcome}: {item.result.test}")
            lines.append(f"      {item.result.error[:240]}")
            if item.exclusion is not None:
                lines.append(f"      {item.exclusion.kind}: {item.exclusion.reason}")
    if complaints:
        lines += ["", "the table of exclusions:", *(f"  {complaint}" for complaint in complaints)]
    return "\n".join(lines)
