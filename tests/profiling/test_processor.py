# SPDX-License-Identifier: Apache-2.0
"""Quotas of control groups, in file trees like those of real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tencache_ds.profiling.host import core_quotas

V2 = "30 23 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "33 23 0:30 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def machine(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    files = files | {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mounts,
        "proc/sys/kernel/random/boot_id": "5e\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_process_without_groups_has_no_quota(tmp_path: Path) -> None:
    assert core_quotas(machine(tmp_path, "", "", {})) == ()


def test_version_2_counts_the_group_and_those_above(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/box/step/cpu.max": "750000 100000\n",
    }
    quotas = core_quotas(machine(tmp_path, "0::/pod/box/step\n", V2, files))
    assert [quota.cores for quota in quotas] == [7.5, 4.0]


def test_version_1_has_two_files_and_minus_one_for_no_quota(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/cpu,cpuacct"
    files = {
        f"{top}/box/cpu.cfs_quota_us": "150000\n",
        f"{top}/box/cpu.cfs_period_us": "100000\n",
        f"{top}/cpu.cfs_quota_us": "-1\n",
        f"{top}/cpu.cfs_period_us": "100000\n",
    }
    quotas = core_quotas(machine(tmp_path, "4:cpu,cpuacct:/box\n", V1, files))
    assert [quota.cores for quota in quotas] == [1.5]


def test_ranks_of_one_group_see_the_same_identity(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/pod/cpu.max": "400000 100000\n", "sys/fs/cgroup/pod/a/cpu.max": "max 100000\n"}
    root = machine(tmp_path, "0::/pod/a\n", V2, files)
    (first,) = core_quotas(root)
    (second,) = core_quotas(machine(root, "0::/pod\n", V2, files))
    assert first == second


@pytest.mark.parametrize("text", ["", "max\n", "100000 0\n", "nonsense 5\n"])
def test_what_cannot_be_read_is_no_quota(tmp_path: Path, text: str) -> None:
    assert core_quotas(machine(tmp_path, "0::/x\n", V2, {"sys/fs/cgroup/x/cpu.max": text})) == ()
