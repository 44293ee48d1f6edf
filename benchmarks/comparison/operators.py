# SPDX-License-Identifier: Apache-2.0
"""Builds one operator that the configurations use: the program that a benchmark starts, once per operator, before all.

Otherwise whichever run comes first would build them, and its start would be that of a compiler. Exit status 0: it is
there, or this accelerator has none of that name.
"""

from __future__ import annotations

import sys

NAMES = ("AsyncIOBuilder", "CPUAdamBuilder", "PinMemoryBuilder", "TenCacheAioBuilder")
ON_GPU = ("FusedAdamBuilder",)


def main(name: str) -> None:
    """Builds, or finds, the operator of this builder."""
    if name == "TenCacheAioBuilder":
        from tencache_ds.ops.tencache_aio import load_tencache_aio

        load_tencache_aio()
        return
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(name)
    if builder is not None and type(builder).__name__ != "NotImplementedBuilder":
        builder.load(verbose=False)


if __name__ == "__main__":
    main(sys.argv[1])
