# SPDX-License-Identifier: Apache-2.0
"""A cap on the host memory of a run: enforced through a control group where the system allows creating one.

Elsewhere the cap is only compared with the measurement, and the record says so.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tencache_ds.profiling.control_groups import own_groups, upwards

REMOVAL_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class HostLimit:
    """The cap of one run."""

    nbytes: int | None = None  # most bytes; None means no cap
    group: Path | None = None  # folder of the control group that enforces it, or None
    reason: str = ""  # why there is no control group, if one was requested

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
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                kills = re.search(r"^oom_kill (\d+)$", (self.group / name).read_text(), re.M)
                if kills and int(kills.group(1)) > 0:
                    return f"killed by the kernel at the cap of {self.nbytes / 2**30:.1f} GiB of host memory"
        return ""


@contextlib.contextmanager
def host_limit(nbytes: int | None, root: Path = Path("/")) -> Iterator[HostLimit]:
    """A cap for the runs started within; its control group, below those of ``root``, is removed afterwards."""
    if nbytes is None:
        yield HostLimit()
        return
    group, reason = _make_group(nbytes, root)
    try:
        yield HostLimit(nbytes, group, reason)
    finally:
        if group is not None:
            _remove(group)


def _make_group(nbytes: int, root: Path) -> tuple[Path | None, str]:
    """A group below our own, or else below the root of its hierarchy; or why neither."""
    reasons = []
    for mount, own in own_groups(root, "memory"):
        limits = {"memory.max": nbytes, "memory.swap.max": 0}
        if mount.version == 1:
            limits = {"memory.limit_in_bytes": nbytes}
        ancestors = list(upwards(mount, own))
        for parent in dict.fromkeys((ancestors[0], ancestors[-1])):
            group = parent / f"tencache-bench-{os.getpid()}"
            try:
                group.mkdir()
            except OSError as error:
                reasons.append(f"{parent.name}: {error.strerror}")
                continue
            try:
                for index, (file, value) in enumerate(limits.items()):
                    if index == 0 or (group / file).exists():  # not every kernel limits swap
                        (group / file).write_text(str(value))
                if (group / "cgroup.procs").exists():
                    return group, ""
                raise OSError(0, "not a control group")
            except OSError as error:
                reasons.append(f"{parent.name}: no memory controller ({error.strerror})")
                _remove(group)
    return None, "; ".join(dict.fromkeys(reasons)) or "no control group for memory is mounted"


def _remove(group: Path) -> None:
    deadline = time.monotonic() + REMOVAL_PATIENCE_S
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # its last process is still being taken down
            group.rmdir()
            return
        time.sleep(0.05)
