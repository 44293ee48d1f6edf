# SPDX-License-Identifier: Apache-2.0
"""What a pass saves and when backward needs it, taken down as it happens. Not thread-safe."""

from __future__ import annotations

from tencache_ds.placement.activation_policy import RecordedPass, SavedBlock


class PassRecorder:
    """Recorder of one forward and backward pass."""

    def __init__(self) -> None:
        self._saved: list[tuple[int, float]] = []
        self._needed: dict[int, float] = {}
        self._held_elsewhere: set[int] = set()

    @property
    def n_saved(self) -> int:
        """Blocks saved so far: the position of the next one."""
        return len(self._saved)

    @property
    def in_backward(self) -> bool:
        """Whether one of them has been needed."""
        return bool(self._needed)

    def saved(self, nbytes: int, t_s: float) -> int:
        """A block was saved; returns its position."""
        self._saved.append((nbytes, t_s))
        return len(self._saved) - 1

    def needed(self, position: int, t_s: float, *, held_elsewhere: bool) -> None:
        """Backward needs a block; only the first time counts."""
        if position not in self._needed:
            self._needed[position] = t_s
            if held_elsewhere:
                self._held_elsewhere.add(position)

    def result(self) -> RecordedPass:
        """The pass as it was."""
        blocks = tuple(
            SavedBlock(nbytes, t_s, self._needed.get(position), position in self._held_elsewhere)
            for position, (nbytes, t_s) in enumerate(self._saved)
        )
        return RecordedPass(blocks, tuple(self._needed))
