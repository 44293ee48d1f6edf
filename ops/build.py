# SPDX-License-Identifier: Apache-2.0
"""Builds one op unless it is built already: ``python -m tencache_ds.ops.build AsyncIOBuilder`` (or ``module:Builder``).

DeepSpeed compiles an op at its first use, which blocks for a minute or more. This command builds it in advance: for CI,
and for benchmarks. Exit status 1, and the reason on standard error, where the op cannot be built or the accelerator has
none of that name.

A builder loads what its op needs, so AsyncIOBuilder builds DeepSpeed's pin_memory op as well.
"""

from __future__ import annotations

import importlib
import sys


def build(name: str) -> None:
    """Builds the op.

    Args:
        name: a builder of DeepSpeed for the current accelerator, or ``module:Builder`` for any other.

    Raises:
        Exception: of many kinds; DeepSpeed, torch or the compiler says why it cannot be built.
    """
    from deepspeed.accelerator import get_accelerator

    module, _, builder_name = name.rpartition(":")
    if module:
        builder = getattr(importlib.import_module(module), builder_name)()
    else:
        builder = get_accelerator().create_op_builder(builder_name)
        if builder is None or type(builder).__name__ == "NotImplementedBuilder":
            sys.exit(f"DeepSpeed has no {builder_name} for the accelerator {get_accelerator().device_name()!r}")
    builder.load(verbose=False)


if __name__ == "__main__":
    build(sys.argv[1])
