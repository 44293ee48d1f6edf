# SPDX-License-Identifier: Apache-2.0
"""Turns: alternation of runs that stay in memory together on one machine.

The benchmark holds a :class:`Turnstile` for each run, the training program a :class:`Gate`; they communicate by empty
files in a folder, which works through any launcher.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.01
"""Interval at which a waiting program looks. Checking one file takes microseconds and does not disturb another run."""


@dataclass(frozen=True, slots=True)
class Turnstile:
    """The benchmark's side, with a folder of this run alone."""

    folder: Path

    def prepare(self, owner_pid: int) -> None:
        """Makes the folder, or empties one of an earlier run; programs stop waiting when process ``owner_pid`` ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            file.unlink()
        (self.folder / "benchmark").write_text(str(owner_pid))

    def is_waiting(self, turn: int) -> bool:
        """Whether the program waits for its turn: all ranks have finished the work before it."""
        return (self.folder / f"waiting_{turn}").exists()

    def open(self, turn: int) -> None:
        """Lets the program have its turn."""
        (self.folder / f"open_{turn}").touch()


class Gate:
    """The training program's side, one in every rank, with the folder of the :class:`Turnstile`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owner = Path("/proc") / (folder / "benchmark").read_text()

    def announce(self, turn: int) -> None:
        """Says that all ranks wait for ``turn``; for one rank to call."""
        (self._folder / f"waiting_{turn}").touch()

    def wait(self, turn: int) -> None:
        """Returns when the turn is given.

        Raises:
            RuntimeError: the benchmark process has ended, so the turn never comes.
        """
        while not (self._folder / f"open_{turn}").exists():
            if not self._owner.exists():
                raise RuntimeError("the benchmark process that controls the turns has ended")
            time.sleep(POLL_S)
