# SPDX-License-Identifier: Apache-2.0
# Sourced by examples/demo.sh and tests/run.sh, from any folder: makes the environment they run in and activates it.
#
#   TENCACHE_VENV   virtual environment to use; otherwise the active one; otherwise .venv in the checkout, created if absent
#   TENCACHE_EXTRAS extras to install (default: test)
#
# Existing packages are kept: an installed torch that the package accepts is never replaced.

TENCACHE_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TENCACHE_EXTRAS="${TENCACHE_EXTRAS-test}"
CPU_TORCH_INDEX="https://download.pytorch.org/whl/cpu"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

say() { printf '[tencache] %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# -- system packages ---------------------------------------------------------------------------------------------------

install_system_packages() {
    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null && sudo -n true 2>/dev/null; then as_root=(sudo); else as_root=(false); fi
    fi
    if [ "${as_root[*]}" = false ] || ! command -v apt-get >/dev/null; then
        fail "system packages are missing and cannot be installed from here. Run this, then start again:
    sudo apt-get update && sudo apt-get install -y $*"
    fi
    say "installing system packages: $*"
    "${as_root[@]}" apt-get update -q >&2
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$@" >&2 ||
        fail "apt-get could not install: $*"
}

python_is_usable() { # can run the package: 3.10 or later
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

python_has_headers() { # with which DeepSpeed's operators are compiled
    "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$name" >/dev/null && python_is_usable "$name"; then command -v "$name"; return 0; fi
    done
    return 1
}

system_python() { # the name of a fitting Python in this release of Debian or Ubuntu; nothing if it has none
    local ID="" VERSION_ID=""
    [ -r /etc/os-release ] && . /etc/os-release
    case "$ID:$VERSION_ID" in
        debian:9 | debian:10 | debian:11 | ubuntu:1* | ubuntu:20.* | ubuntu:21.*) return 1 ;;
        *) echo python3 ;;
    esac
}

system_packages_missing() { # one name per line; $1 is the Python that will be used, empty if there is none
    local name
    command -v "${CXX:-g++}" >/dev/null || echo g++
    [ -e /usr/include/libaio.h ] ||
        printf '#include <libaio.h>' | "${CXX:-g++}" -E -x c++ - >/dev/null 2>&1 || echo libaio-dev
    if [ -z "$1" ]; then
        if name="$(system_python)"; then printf '%s\n' "$name" "$name-venv" "$name-dev"; fi
        return
    fi
    name="$("$1" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    "$1" -c 'import ensurepip, venv' 2>/dev/null || [ -x "$TENCACHE_VENV/bin/python" ] || echo "$name-venv"
    python_has_headers "$1" || echo "$name-dev"
}

# -- the environment ---------------------------------------------------------------------------------------------------

has_nvidia_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

installed_torch() { # prints the version of a torch that the package accepts (2.4 or later), if there is one
    "$1" - <<'PY' 2>/dev/null
from importlib.metadata import version
found = version("torch")
if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) >= (2, 4):
    print(found)
PY
}

requirements_met() { # everything the package and the extras require is installed already
    "$1" - "$TENCACHE_ROOT/pyproject.toml" "$TENCACHE_EXTRAS" <<'PY' 2>/dev/null
import sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

project = tomllib.load(open(sys.argv[1], "rb"))
wanted = project["project"]["dependencies"] + project["build-system"]["requires"]
for extra in filter(None, sys.argv[2].split(",")):
    wanted += project["project"]["optional-dependencies"][extra]
for requirement in map(Requirement, wanted):
    if requirement.marker is not None and not requirement.marker.evaluate():
        continue
    try:
        if not requirement.specifier.contains(version(requirement.name), prereleases=True):
            sys.exit(1)
    except PackageNotFoundError:
        sys.exit(1)
PY
}

install_package() {
    local python="$1" constraints torch target="$TENCACHE_ROOT${TENCACHE_EXTRAS:+[$TENCACHE_EXTRAS]}"
    "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null || fail "there is no pip in $TENCACHE_VENV"
    if ! requirements_met "$python"; then
        constraints="$(mktemp)"
        torch="$(installed_torch "$python")" || true
        if [ -n "$torch" ]; then
            say "keeping the installed torch $torch"
            # Its numpy stays as well: a torch that came with a machine image is built against it.
            grep -v -E '^numpy==' "$TENCACHE_ROOT/.ci/constraints.txt" | sed "s/^torch==.*/torch==$torch/" >"$constraints"
        else
            cp "$TENCACHE_ROOT/.ci/constraints.txt" "$constraints"
            if ! has_nvidia_gpu; then
                if "$python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=10)' \
                    "$CPU_TORCH_INDEX/torch/" 2>/dev/null; then
                    say "installing torch for CPU"
                    # Only torch itself comes from there; its dependencies follow from the usual index below.
                    "$python" -m pip install -q -c "$constraints" --no-deps --index-url "$CPU_TORCH_INDEX" torch >&2 ||
                        fail "pip could not install torch from $CPU_TORCH_INDEX"
                else
                    say "$CPU_TORCH_INDEX is out of reach: torch comes from the usual index (a larger download)"
                fi
            fi
        fi
        say "installing the package and its dependencies (minutes, once)"
        "$python" -m pip install -q -c "$constraints" 'setuptools>=77' >&2 || fail "pip could not install setuptools"
        "$python" -m pip install -q -c "$constraints" --no-build-isolation -e "$target" >&2 ||
            fail "pip could not install the package"
        rm -f "$constraints"
    else
        "$python" -m pip install -q --no-deps --no-build-isolation -e "$TENCACHE_ROOT" >&2 ||
            fail "pip could not install the package"
    fi
}

prepare_environment() {
    local python missing stamp key
    TENCACHE_VENV="${TENCACHE_VENV:-${VIRTUAL_ENV:-$TENCACHE_ROOT/.venv}}"
    if [ -x "$TENCACHE_VENV/bin/python" ]; then python="$TENCACHE_VENV/bin/python"; else python="$(find_python)" || true; fi
    mapfile -t missing < <(system_packages_missing "$python")
    if [ "${#missing[@]}" -gt 0 ]; then
        install_system_packages "${missing[@]}"
        [ -n "$python" ] || python="$(find_python)" || true
    fi
    [ -n "$python" ] || fail "Python 3.10 or later is needed and this release has none: install it (for example with
    https://docs.astral.sh/uv), make a virtual environment with it, activate that, then start again."
    if [ ! -x "$TENCACHE_VENV/bin/python" ]; then
        say "making $TENCACHE_VENV with $("$python" --version)"
        if [ -n "$(installed_torch "$python")" ]; then
            "$python" -m venv --system-site-packages "$TENCACHE_VENV" || fail "python -m venv failed"
        else
            "$python" -m venv "$TENCACHE_VENV" || fail "python -m venv failed"
        fi
    fi
    python="$TENCACHE_VENV/bin/python"
    python_is_usable "$python" || fail "$python is older than Python 3.10; set TENCACHE_VENV to another environment"

    stamp="$TENCACHE_VENV/.tencache-ready-${TENCACHE_EXTRAS:-plain}"
    key="$(cd "$TENCACHE_ROOT" && { cat pyproject.toml setup.py .ci/constraints.txt .ci/environment.sh; pwd; } |
        sha256sum | cut -d' ' -f1)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$key" ]; then
        install_package "$python"
        echo "$key" >"$stamp"
    fi

    if [ "$TENCACHE_VENV" = "$TENCACHE_ROOT/.venv" ]; then
        # The paths of an environment are part of how ninja knows an operator: two environments that share torch's
        # default folder would rebuild each other's. Ours keeps its own.
        export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$TENCACHE_VENV/torch_extensions}"
    fi
    export VIRTUAL_ENV="$TENCACHE_VENV" PATH="$TENCACHE_VENV/bin:$PATH"
    if [ -z "${DS_ACCELERATOR:-}" ] && { ! has_nvidia_gpu ||
        ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }; then
        export DS_ACCELERATOR=cpu
    fi
}

prepare_environment
