# SPDX-License-Identifier: Apache-2.0
"""Common base of TenCache's own ops: their sources, without DeepSpeed's processor flags, and their compilation at
installation (``TENCACHE_BUILD_OPS=1``, see ``setup.py``)."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from tencache_ds.ops.build_lock import only_loader

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
        """Where the op's own headers are, and those of all ops."""
        return [str(_SOURCES / self.FOLDER), str(_SOURCES)]

    def cpu_arch(self) -> str:
        """No flag: sources that need an instruction set name it, and DeepSpeed's answer takes py-cpuinfo a second at
        every start."""
        return ""

    def simd_width(self) -> str:
        """No flag, for the same reason."""
        return ""

    def prebuilt_name(self) -> str:
        """Name of the extension module compiled at installation, which works with this version of torch only."""
        import torch

        return f"tencache_ds.ops.prebuilt_torch_{re.sub(r'[^0-9a-zA-Z]', '_', torch.__version__)}.{self.NAME}"

    def prebuilt(self) -> ModuleType | None:
        """The op that was compiled at installation; None if there is none for this version of torch."""
        name = self.prebuilt_name()
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and name.startswith(error.name):
                return None
            raise

    def load(self, verbose: bool = False) -> ModuleType:
        """Imports the op, from the installation if it was compiled there; otherwise builds it if needed. Unlike some of
        DeepSpeed's builders it loads no other op before.

        Raises:
            RuntimeError: it cannot be built; DeepSpeed says why.
        """
        from deepspeed.ops.op_builder.builder import OpBuilder

        prebuilt = self.prebuilt()
        if prebuilt is not None:
            return prebuilt
        with only_loader(self.NAME):
            return OpBuilder.load(self, verbose)

    def extension(self, root: Path) -> Any:
        """The op as an extension module for setuptools, with sources relative to ``root``."""
        from torch.utils.cpp_extension import CppExtension

        return CppExtension(
            name=self.prebuilt_name(),
            sources=[os.path.relpath(source, root) for source in self.sources()],
            include_dirs=self.include_paths(),
            extra_compile_args={"cxx": [*self.cxx_args(), "-UC10_USE_GLOG"]},
            extra_link_args=self.extra_ldflags(),
        )

    def cxx_args(self) -> list[str]:
        """Flags of the compiler, from DeepSpeed's builder."""
        return super().cxx_args()  # type: ignore[misc]

    def extra_ldflags(self) -> list[str]:
        """Flags of the linker, from DeepSpeed's builder."""
        return super().extra_ldflags()  # type: ignore[misc]
