# SPDX-License-Identifier: Apache-2.0
"""What a training printed and saved, and the comparison of two: nothing here runs a framework."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

KEPT = re.compile(r"(eval_|train_)?(loss|grad_norm|learning_rate|(mean_)?token_acc\w*|entropy)")
"""Metrics that depend on the training alone; the others are times, rates and memory."""
ACTIVE = "is active with DeepSpeed"
SUMMARY = "optimizer steps in"
ERROR = re.compile(r"^(\[\w+\]: ?)?[\w.]*(Error|Exception)\b.*$", re.MULTILINE)
"""The last line of a traceback, after the rank that torchrun writes before it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One training.

    Attributes:
        code: exit status; None if it had to be killed.
        metrics: of each logged step.
        saved: SHA-256 of each saved file of weights, by its path in the output folder.
        n_active: how often the activation line was printed.
        n_summaries: how often the summary at the end was.
        reason: first error in the log; its last line if there is none.
    """

    code: int | None
    metrics: tuple[dict[str, float], ...]
    saved: dict[str, str]
    n_active: int
    n_summaries: int
    reason: str

    @classmethod
    def of(cls, code: int | None, log: str, output: Path) -> Run:
        """Reads the log and the output folder of a training that has ended."""
        return cls(code, tuple(metrics(log)), saved(output), log.count(ACTIVE), log.count(SUMMARY), reason_in(log))


def reason_in(log: str) -> str:
    """Why a training ended early. Launchers add errors of their own, and warnings behind them."""
    error = ERROR.search(log)
    return error[0].strip() if error is not None else log.strip().rpartition("\n")[2].strip()


def metrics(log: str) -> list[dict[str, float]]:
    """The metrics of each line of a log that has a loss."""
    found = []
    for text in re.findall(r"\{[^{}\n]*loss[^{}\n]*\}", log):
        try:
            logged = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            continue  # not a line of metrics
        kept = {key: float(value) for key, value in logged.items() if KEPT.fullmatch(str(key))}
        if kept:
            found.append(kept)
    return found


def saved(output: Path) -> dict[str, str]:
    """SHA-256 of each file of weights below a folder."""
    files = [path for pattern in ("*.safetensors", "pytorch_model*.bin") for path in output.rglob(pattern)]
    return {str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A framework's training with stock and with TenCache.

    Attributes:
        name: of the framework.
        versions: what is installed.
        runs: by engine, ``stock`` and ``tencache``.
        failure: why there are none.
    """

    name: str
    versions: str
    runs: Mapping[str, Run] = field(default_factory=dict)
    failure: str = ""

    def complaints(self) -> list[str]:
        """Everything that should not be; empty if all is well."""
        if self.failure:
            return [self.failure]
        failed = [
            f"{engine} ended with {'a time-out' if run.code is None else f'exit status {run.code}'}: {run.reason}"
            for engine, run in self.runs.items()
            if run.code != 0
        ]
        if failed:
            return failed
        stock, ours = self.runs["stock"], self.runs["tencache"]
        found = []
        if not stock.metrics:
            found.append("stock's log has no loss")
        if not stock.saved:
            found.append("stock saved no weights")
        if stock.metrics != ours.metrics:
            found.append(f"metrics differ: {first_difference(stock.metrics, ours.metrics)}")
        if stock.saved != ours.saved:
            differing = {path for path, _ in stock.saved.items() ^ ours.saved.items()}
            found.append(f"saved weights differ: {', '.join(sorted(differing))}")
        if stock.n_active:
            found.append("TenCache was active in stock's run")
        for text, count in {"activation line": ours.n_active, "summary": ours.n_summaries}.items():
            if count != 1:
                found.append(f"the {text} was printed {count} times")
        return found


def first_difference(stock: Sequence[dict[str, float]], ours: Sequence[dict[str, float]]) -> str:
    """The first step whose metrics are not the same, of both."""
    for step, (expected, found) in enumerate(zip(stock, ours, strict=False), 1):
        if expected != found:
            return f"step {step}: {expected}, with TenCache {found}"
    return f"{len(stock)} lines, with TenCache {len(ours)}"


def table(comparisons: Sequence[Comparison]) -> str:
    """The result in Markdown, one row for each framework."""
    rows = ["| framework | versions | logged steps | last loss | saved files | result |", "|---|---|---|---|---|---|"]
    for comparison in comparisons:
        stock = comparison.runs.get("stock")
        losses = [step["loss"] for step in stock.metrics if "loss" in step] if stock else []
        rows.append(
            f"| {comparison.name} | {comparison.versions} | {len(losses)} | {losses[-1] if losses else '-'} | "
            f"{len(stock.saved) if stock else 0} | {'; '.join(comparison.complaints()) or 'identical'} |"
        )
    return "\n".join(rows)
