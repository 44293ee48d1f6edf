# SPDX-License-Identifier: Apache-2.0
"""The processor of this host: what Linux says of it, and the CPU quota of the control groups of this process, such as a
container's."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from tencache_ds.profiling.control_groups import (
    identity_of,
    machine_identity,
    number_in,
    own_groups,
    text_of,
    upwards,
)


def processor_field(*names: str, cpuinfo: str | None = None) -> str | None:
    """The first of some fields that has a value; None where none has, or there is no such file.

    Args:
        names: as in ``/proc/cpuinfo``; they differ between architectures.
        cpuinfo: its text; this machine's when omitted.
    """
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace")
        except OSError:
            return None
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


def processor_name(cpuinfo: str | None = None) -> str:
    """Model of the processor, of the text of ``/proc/cpuinfo`` (this machine's when omitted); else its architecture."""
    return processor_field("model name", "Model", "cpu model", cpuinfo=cpuinfo) or platform.machine()


@dataclass(frozen=True, slots=True)
class CoreQuota:
    """Time on cores that the processes of a control group share.

    Attributes:
        identity: the same for all processes of the group, in any container that sees it.
        cores: cores' worth of time, such as 3.5.
    """

    identity: str
    cores: float


def core_quotas(root: Path = Path("/")) -> tuple[CoreQuota, ...]:
    """The quotas of this process's control groups, innermost first; empty without any.

    Args:
        root: where ``/proc`` and the mounted hierarchies are looked for.
    """
    machine = machine_identity(root)
    by_group: dict[str, CoreQuota] = {}
    for mount, group in own_groups(root, "cpu"):
        for folder in upwards(mount, group):
            cores = _cores_v2(folder) if mount.version == 2 else _cores_v1(folder)
            identity = identity_of(folder, machine)
            if cores is not None and identity is not None:
                by_group.setdefault(identity, CoreQuota(identity, cores))
    return tuple(by_group.values())


def _cores_v2(folder: Path) -> float | None:
    quota, _, period = text_of(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _cores_v1(folder: Path) -> float | None:
    quota, period = number_in(folder / "cpu.cfs_quota_us"), number_in(folder / "cpu.cfs_period_us")
    return quota / period if quota is not None and period else None  # "-1" is no quota
