#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job in one command: sets everything up, trains with stock ZeRO-Infinity and with TenCache, compares.
# Arguments go to examples/demo.py: --nvme-path, --size, --steps, --host-memory.
set -euo pipefail
TENCACHE_EXTRAS="${TENCACHE_EXTRAS-}"
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
python "$TENCACHE_ROOT/.ci/build_ops.py" AsyncIOBuilder CPUAdamBuilder ShareMemCommBuilder \
    tencache_ds.ops.tencache_aio:TenCacheAioBuilder tencache_ds.ops.tencache_update:TenCacheUpdateBuilder
exec python "$TENCACHE_ROOT/examples/demo.py" "$@"
