#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks in one command: sets everything up, lints, builds DeepSpeed's operators, runs the tests.
# Arguments go to pytest: paths there replace the whole of tests/. TENCACHE_TEST_WORKERS sets how many tests run at a time.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
cd "$TENCACHE_ROOT"

ruff check .
ruff format --check .
python .ci/build_ops.py

# Quick rooms first, training last: a mistake in the planner should not wait for all the training to show.
ordered=()
for room in planning profiling memory io observability tiers cli; do
    if [ -d "tests/$room" ]; then ordered+=("tests/$room"); fi
done
for entry in tests/*; do
    case "$entry" in *__pycache__ | tests/integration) continue ;; esac
    if [ -d "$entry" ] || [[ "$entry" == */test_*.py ]]; then
        [[ " ${ordered[*]} " == *" $entry "* ]] || ordered+=("$entry")
    fi
done
if [ -d tests/integration ]; then ordered+=(tests/integration); fi
for argument in "$@"; do
    if [ -e "${argument%%::*}" ]; then ordered=(); fi # the caller says which tests
done

if [ "${DS_ACCELERATOR:-}" = cpu ]; then
    workers="${TENCACHE_TEST_WORKERS:-2}"
    # Two training processes at a time with all cores each would only wait for one another.
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
else
    workers="${TENCACHE_TEST_WORKERS:-0}" # tests on one GPU measure and fill its memory: one at a time
fi
exec python -m pytest -n "$workers" --dist loadfile "${ordered[@]}" "$@"
