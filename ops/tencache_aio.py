# SPDX-License-Identifier: Apache-2.0
"""TenCache's own aio op: Linux AIO in lanes, every result checked (see ``csrc/aio/io_queue.h``).

It is built like every DeepSpeed op and with DeepSpeed's checks and flags for libaio, except that it is optimised. It
compiles nothing of DeepSpeed's ``csrc/aio``: there, ``io_setup`` and ``io_event.res`` go unchecked and a partial
``io_submit`` hangs, in the very functions that could be shared.
"""

from __future__ import annotations

from types import ModuleType

# The builder for the CPU, on every accelerator: the op touches host memory only, and DeepSpeed's builder for CUDA asks
# for the CUDA toolkit. DeepSpeed does the same for its CPU optimizers.
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

from tencache_ds.ops.async_io import load_op
from tencache_ds.ops.own_op import OwnOp


class TenCacheAioBuilder(OwnOp, AsyncIOBuilder):
    """Builds ``tencache_aio`` into torch's extension cache at its first use."""

    BUILD_VAR = "DS_BUILD_TENCACHE_AIO"
    NAME = "tencache_aio"
    FOLDER = "aio"
    FILES = ("lane.cpp", "core.cpp", "io_queue.cpp", "py_io_queue.cpp")

    def cxx_args(self) -> list[str]:
        """DeepSpeed's flags for async_io, with its -O0 replaced."""
        return [argument for argument in super().cxx_args() if argument not in ("", "-O0")] + ["-O3"]


def load_tencache_aio() -> ModuleType:
    """The tencache_aio op (``IoQueue``). Any thread.

    Raises:
        ConfigError: names the missing part and the package to install.
    """
    return load_op(TenCacheAioBuilder(), TenCacheAioBuilder.NAME)
