# SPDX-License-Identifier: Apache-2.0
"""Loads the ops that most tests use when it is imported: by the fork server, whose children then have them. Otherwise
every rank of every test would ask ninja, for seconds, whether they are built.
"""

import deepspeed.runtime.zero.stage3  # noqa: F401  not imported by deepspeed itself
from deepspeed.accelerator import get_accelerator

from tencache_ds.integration.config_hook import is_set
from tencache_ds.names import DISABLE_VARIABLE

OPS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder", "AsyncIOBuilder")


def _load() -> None:
    builders = [get_accelerator().create_op_builder(name) for name in OPS]
    if not is_set(DISABLE_VARIABLE):
        from tencache_ds.ops.tencache_aio import TenCacheAioBuilder
        from tencache_ds.ops.tencache_update import TenCacheUpdateBuilder

        builders += [TenCacheAioBuilder(), TenCacheUpdateBuilder()]
    for builder in builders:
        if builder.is_compatible(verbose=False):
            builder.load(verbose=False)


_load()
