# SPDX-License-Identifier: Apache-2.0
"""``deepspeed --module tencache_ds.run train.py ...``: activates TenCache explicitly, then runs a script.

For environments where torch's entry points are switched off (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``) or torch is 2.4,
which loads none. The script sees the same ``sys.argv`` and ``__main__`` as without this wrapper.
"""

from __future__ import annotations

import os
import runpy
import sys

from tencache_ds import _autoload


def main() -> None:
    """Runs ``sys.argv[1]`` as ``__main__``.

    Raises:
        SystemExit: no script was named, or the named one does not exist.
    """
    # The launcher puts --local_rank before or after the script's name, depending on its version.
    arguments = sys.argv[1:]
    position = next((i for i, word in enumerate(arguments) if not word.startswith("-")), None)
    if position is None:
        raise SystemExit("usage: deepspeed --module tencache_ds.run train.py [the script's own arguments]")
    script = arguments[position]
    if not os.path.exists(script):
        raise SystemExit(f"tencache_ds.run: no script {script!r} in {os.getcwd()}")
    sys.argv = [script, *arguments[:position], *arguments[position + 1 :]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    _autoload.install()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
