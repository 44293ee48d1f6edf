# SPDX-License-Identifier: Apache-2.0
"""The names a user writes in a DeepSpeed config or in the environment.

This module imports nothing: the parse of every DeepSpeed config needs these names, also in programs that do not use
TenCache, which must not depend on anything else of it.
"""

ENGINE_KEY = "offload_engine"
ENGINE_NAME = "tencache"
OPTIONS_KEY = "tencache"
ZERO_KEY = "zero_optimization"
ENABLE_VARIABLE = "TENCACHE_ENABLE"
DISABLE_VARIABLE = "TENCACHE_DISABLE"
FAULTS_VARIABLE = "TENCACHE_FAULTS"
