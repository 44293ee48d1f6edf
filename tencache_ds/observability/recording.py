# SPDX-License-Identifier: Apache-2.0
"""A rank's recorded steps as plain values, and as lines on their way to the command that asked for them. Imports
neither torch nor DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SPANS_PER_LINE = 256
"""Encoding this many takes about a millisecond, for which the training threads may have to wait."""


@dataclass(slots=True)
class RankRecording:
    """What one rank recorded.

    Attributes:
        rank, world_size, pid, host, run_id: of the process.
        training_thread: identifier of the thread that takes steps.
        steps: ``step``, ``t_start_ns``, ``t_end_ns`` and ``record`` of each recorded step.
        threads: names of threads by identifier; "" for those that Python did not start.
        weights: names of parameters by their id in weights' names.
        modules: names of modules by their id.
        n_dropped: spans that did not fit into the recorder's memory.
        spans: ``category, name, track, t_start_ns, t_end_ns, what, nbytes, arguments`` of each.
    """

    rank: int
    world_size: int
    pid: int
    host: str
    run_id: str
    training_thread: int
    steps: list[dict[str, Any]]
    threads: dict[str, str]
    weights: dict[str, str]
    modules: dict[str, str]
    n_dropped: int
    spans: list[Sequence[Any]] = field(default_factory=list)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Its parts, each small enough to be encoded without a noticeable pause."""
        spans = self.spans
        yield {"recording": asdict_without_spans(self)}
        for start in range(0, len(spans), SPANS_PER_LINE):
            yield {"spans": spans[start : start + SPANS_PER_LINE]}
        yield {"end": len(spans)}

    @classmethod
    def from_lines(cls, lines: Iterable[dict[str, Any]]) -> RankRecording:
        """The recording whose :meth:`lines` these are.

        Raises:
            ValueError: they are incomplete.
        """
        recording: RankRecording | None = None
        for line in lines:
            if "recording" in line:
                recording = cls(**line["recording"])
            elif recording is not None and "spans" in line:
                recording.spans.extend(line["spans"])
            elif recording is not None and line.get("end") == len(recording.spans):
                return recording
        raise ValueError("the recording is incomplete")


def asdict_without_spans(recording: RankRecording) -> dict[str, Any]:
    """The fields but for the spans."""
    spans, recording.spans = recording.spans, []
    try:
        fields = asdict(recording)
    finally:
        recording.spans = spans
    del fields["spans"]
    return fields
