# SPDX-License-Identifier: Apache-2.0
"""TenCache's update op: a team of threads without barriers, Adam in one pass, and a thread that samples what a device
does (``csrc/update``).

Built like every DeepSpeed op; the instruction set is chosen when it runs, not when it is built.
"""

from __future__ import annotations

from types import ModuleType

from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from tencache_ds.ops.async_io import load_op
from tencache_ds.ops.own_op import OwnOp


class TenCacheUpdateBuilder(OwnOp, CPUOpBuilder):
    """Builds ``tencache_update`` into torch's extension cache at its first use."""

    BUILD_VAR = "DS_BUILD_TENCACHE_UPDATE"
    NAME = "tencache_update"
    FOLDER = "update"
    FILES = (
        "adam.cpp",
        "adam_avx512.cpp",
        "adam_avx2.cpp",
        "adam_neon.cpp",
        "sampler.cpp",
        "team.cpp",
        "py_update.cpp",
    )

    def __init__(self) -> None:
        super().__init__(name=self.NAME)

    def cxx_args(self) -> list[str]:
        """Every fused product is written as one: the compiler adds none."""
        return ["-O3", "-ffp-contract=off", "-fno-math-errno"]

    def extra_ldflags(self) -> list[str]:
        """Threads, and no OpenMP."""
        return ["-pthread"]


def load_tencache_update() -> ModuleType:
    """The tencache_update op (``Team``, ``AdamScalars``, ``Sampler``). Any thread.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    return load_op(
        TenCacheUpdateBuilder(), TenCacheUpdateBuilder.NAME, without="DeepSpeed's own op is used, in several passes"
    )
