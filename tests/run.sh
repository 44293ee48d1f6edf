#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks in one command: sets everything up, lints, checks types, builds DeepSpeed's operators, runs the tests.
# Arguments go to pytest: paths there replace the whole of tests/. TENCACHE_TEST_WORKERS sets how many tests run at a time.
# Without any, and without a GPU, the exactness core follows on the oldest DeepSpeed version. TENCACHE_TEST_LINES has other
# arguments of .ci/lines.py, such as --all; empty, it leaves this out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../.ci/environment.sh"
cd "$TENCACHE_ROOT"

lines=""
if [ $# = 0 ] && [ "${DS_ACCELERATOR:-}" = cpu ]; then lines="${TENCACHE_TEST_LINES---oldest}"; fi

build() {
    python .ci/build_ops.py || return
    # What fails here fails again, and for good, where the lines are run.
    # shellcheck disable=SC2086 # several words
    if [ -n "$lines" ]; then python .ci/lines.py --prepare $lines || true; fi
}

ruff check .
ruff format --check .
# Compilers beside the check of types, which takes a minute of one core; tests measure, and run alone.
build &
well_typed=0
mypy || well_typed=$?
wait $!
[ "$well_typed" = 0 ] || exit "$well_typed"

# Quick packages first, training last: a mistake in the planner should not wait for all the training to show. Of the rest
# the longest first, so that at the end no worker is left alone with minutes of work.
ordered=()
add() { # what exists and is not there yet
    local entry
    for entry in "$@"; do
        if [ -e "$entry" ] && [[ " ${ordered[*]} " != *" $entry "* ]]; then ordered+=("$entry"); fi
    done
}
add tests/{planning,placement,profiling,memory,io,observability,runtime,tiers,cli}
for entry in tests/*; do
    case "$entry" in tests/integration | tests/benchmarks) continue ;; esac
    if [[ "$entry" == */test_*.py ]] || compgen -G "$entry/test_*.py" >/dev/null; then add "$entry"; fi
done
add tests/integration/test_{core,user_api,exactness,gpu_memory,checkpoint,hugging_face,overlap,activations,gds,faults}.py
add tests/benchmarks/test_smoke.py tests/integration/test_*.py
add tests/benchmarks/test_*.py
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
# Without the option pytest-xdist begins with the files of most tests, and a few long ones come last.
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder --durations 40 --durations-min 5 "${ordered[@]}" "$@"

if [ -n "$lines" ]; then
    # shellcheck disable=SC2086 # several words
    python .ci/lines.py $lines
fi
