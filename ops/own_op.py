# SPDX-License-Identifier: Apache-2.0
"""Common base of TenCache's own ops: the place of their sources, and no processor flags of DeepSpeed's."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

_SOURCES = Path(__file__).parent / "csrc"


class OwnOp:
    """Put before one of DeepSpeed's builders as a base class.

    Attributes:
        NAME: of the op.
        FOLDER: of its sources and headers, below ``csrc``.
        FILES: its sources.
    """

    NAME: ClassVar[str]
    FOLDER: ClassVar[str]
    FILES: ClassVar[tuple[str, ...]]

    def absolute_name(self) -> str:
        """Name of the extension module."""
        return f"tencache_ds.ops.{self.NAME}_op"

    def sources(self) -> list[str]:
        """Absolute paths, which DeepSpeed leaves as they are."""
        return [str(_SOURCES / self.FOLDER / name) for name in self.FILES]

    def include_paths(self) -> list[str]:
        """Where the op's own headers are."""
        return [str(_SOURCES / self.FOLDER)]

    def cpu_arch(self) -> str:
        """No flag: sources that need an instruction set name it, and DeepSpeed's answer takes py-cpuinfo a second at
        every start."""
        return ""

    def simd_width(self) -> str:
        """No flag, for the same reason."""
        return ""
