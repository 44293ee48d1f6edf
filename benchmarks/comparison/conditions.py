# SPDX-License-Identifier: Apache-2.0
"""The conditions under which all configurations run: a cap on host memory, and other programs that keep cores busy.

The cap is enforced through a control group where the system allows creating one. Elsewhere it is only compared with the
measurement, and the record says so.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tencache_ds.profiling.host import fields_of, own_groups, upwards

REMOVAL_PATIENCE_S = 5.0

# Ends with its parent too: who measures may be killed, and nothing would stop it then.
_LOOP = """
import os, sys, time
parent = int(sys.argv[1])
while os.getppid() == parent:
    t_end = time.monotonic() + 0.5
    while time.monotonic() < t_end:
        pass
"""


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keeps this number of cores busy, chosen by the scheduler."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP, str(os.getpid())]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The cap on the host memory of one run."""

    nbytes: int | None = None  # None means no cap
    group: Path | None = None  # folder of the control group that enforces it, or None

    @property
    def enforced_by(self) -> str:
        """See :attr:`..record.Caps.host_enforced_by`."""
        if self.nbytes is None:
            return ""
        return "cgroup" if self.group else "measured"

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command, started inside the group."""
        if self.group is None:
            return list(command)
        return ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(self.group), *command]

    def explain(self) -> str:
        """Message for a run that the kernel killed at the cap; empty if it did not."""
        if self.group is None or self.nbytes is None:
            return ""
        events = fields_of(self.group / "memory.events") | fields_of(self.group / "memory.oom_control")
        if not events.get("oom_kill"):
            return ""
        return f"killed by the kernel at the cap of {self.nbytes / 2**30:.1f} GiB of host memory"


@contextlib.contextmanager
def host_limit(nbytes: int | None, root: Path = Path("/")) -> Iterator[HostLimit]:
    """A cap for the runs started within; its control group, below those of ``root``, is removed afterwards."""
    group = None if nbytes is None else _make_group(nbytes, root)
    try:
        yield HostLimit(nbytes, group)
    finally:
        if group is not None:
            _remove(group)


def _make_group(nbytes: int, root: Path) -> Path | None:
    """A group below our own, or else below the root of its hierarchy; None where neither can be made."""
    for mount, own in own_groups(root, "memory"):
        limits = {"memory.max": nbytes, "memory.swap.max": 0}
        if mount.version == 1:
            limits = {"memory.limit_in_bytes": nbytes}
        ancestors = list(upwards(mount, own))
        for parent in (ancestors[0], ancestors[-1]):
            group = parent / f"tencache-bench-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                for index, (file, value) in enumerate(limits.items()):
                    if index == 0 or (group / file).exists():  # not every kernel limits swap
                        (group / file).write_text(str(value))
                if (group / "cgroup.procs").exists():  # else it is an ordinary folder
                    return group
            _remove(group)
    return None


def _remove(group: Path) -> None:
    deadline = time.monotonic() + REMOVAL_PATIENCE_S
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # its last process is still being taken down
            group.rmdir()
            return
        time.sleep(0.05)
