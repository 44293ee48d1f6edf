# SPDX-License-Identifier: Apache-2.0
"""TenCache's op of lent GPU memory: torch's allocator takes it back where an allocation would fail otherwise
(``csrc/lend``).

Built like every DeepSpeed op, on machines with a CUDA device only.
"""

from __future__ import annotations

from types import ModuleType

from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from tencache_ds.ops.async_io import load_op
from tencache_ds.ops.own_op import OwnOp


class TenCacheLendBuilder(OwnOp, CPUOpBuilder):
    """Builds ``tencache_lend`` into torch's extension cache at its first use. It is C++ that calls CUDA's runtime: the
    toolkit's headers are needed, its compiler is not."""

    BUILD_VAR = "DS_BUILD_TENCACHE_LEND"
    NAME = "tencache_lend"
    FOLDER = "lend"
    FILES = ("py_lend.cpp",)

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def cxx_args(self) -> list[str]:
        """No flag of a processor: it computes nothing."""
        return ["-O2"]

    def include_paths(self) -> list[str]:
        """Its own headers and those of CUDA's runtime."""
        from torch.utils.cpp_extension import CUDA_HOME

        return [*super().include_paths(), *([] if CUDA_HOME is None else [f"{CUDA_HOME}/include"])]

    def extra_ldflags(self) -> list[str]:
        """Torch's CUDA library, whose dependency is the very runtime that torch uses."""
        return ["-lc10_cuda"]


def load_tencache_lend() -> ModuleType:
    """The tencache_lend op (``open_device``). Any thread.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    return load_op(
        TenCacheLendBuilder(),
        TenCacheLendBuilder.NAME,
        without="optimizer state leaves GPU memory between modules only, not within an allocation that needs it",
    )
