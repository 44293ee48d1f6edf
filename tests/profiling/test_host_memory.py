# SPDX-License-Identifier: Apache-2.0
"""How much memory a process may use, on machines and in containers of which only the files are real."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from tencache_ds.profiling.host import available_nbytes, machine_identity, memory_domains, memory_nbytes

GIB = 1 << 30
UNLIMITED_V1 = str((1 << 63) - 4096)
MEMINFO = "MemTotal:  2147483648 kB\nMemFree:  1 kB\nMemAvailable:  2040109466 kB\n"
V2_MOUNT = "31 23 0:28 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,memory\n"
V1_CPU_MOUNT = "36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"


class Machine:
    """A tree of fake ``/proc`` and ``/sys/fs/cgroup``: 2 TiB of memory, 1.9 of them available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", MEMINFO)
        self.write("proc/sys/kernel/random/boot_id", "5e1c\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def process(self, cgroup: str, mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write("proc/self/mountinfo", "23 1 8:1 / / rw - ext4 /dev/sda rw\n" + mounts)

    def v2(self, folder: str, limit: str = "max", used: int = 0, *, idle: int = 0, high: str = "max") -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{used}\n")
        self.write(f"{folder}/memory.stat", f"anon 5\ninactive_file {idle}\nactive_file 7\n")

    def v1(self, folder: str, limit: str, used: int = 0, *, idle: int = 0, above: str = UNLIMITED_V1) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{used}\n")
        stat = f"cache 5\ninactive_file 1\nhierarchical_memory_limit {above}\ntotal_inactive_file {idle}\n"
        self.write(f"{folder}/memory.stat", stat)

    def headrooms(self) -> Mapping[str, int]:
        """GiB available, by the last part of the group's folder."""
        return {domain.name.rsplit("/", 1)[-1]: domain.available_nbytes // GIB for domain in memory_domains(self.root)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_it_is_the_machines(machine: Machine) -> None:
    (domain,) = memory_domains(machine.root)
    assert (domain.identity, domain.name) == ("5e1c", "this machine")
    assert memory_nbytes(machine.root) == 2048 * GIB
    assert available_nbytes(machine.root) == 2040109466 * 1024


def test_a_pod_of_64_gib_on_a_node_of_2_tib(machine: Machine) -> None:
    # cgroup v2 with its own namespace: the container's group is the root of all it sees.
    machine.process("0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup", str(64 * GIB), 4 * GIB, idle=1 * GIB)
    assert memory_nbytes(machine.root) == 64 * GIB
    assert available_nbytes(machine.root) == 61 * GIB  # 4 are in use, but 1 of them is cache that nobody needs
    assert memory_domains(machine.root)[1].name == f"control group {machine.root}/sys/fs/cgroup"


def test_the_tightest_of_all_ancestors_counts(machine: Machine) -> None:
    machine.process("0::/user.slice/job/step\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.write("sys/fs/cgroup/cgroup.controllers", "memory\n")  # the true root has no limits
    machine.v2("sys/fs/cgroup/user.slice", str(500 * GIB), 490 * GIB)
    machine.v2("sys/fs/cgroup/user.slice/job", str(100 * GIB), 10 * GIB)
    machine.v2("sys/fs/cgroup/user.slice/job/step")
    machine.v2("sys/fs/cgroup/user.slice/other", str(1 * GIB))
    assert machine.headrooms() == {"this machine": 1945, "job": 90, "user.slice": 10}
    assert memory_nbytes(machine.root) == 100 * GIB
    assert available_nbytes(machine.root) == 10 * GIB


def test_memory_high_is_a_limit_too(machine: Machine) -> None:
    machine.process("0::/job\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup/job", str(100 * GIB), 10 * GIB, high=str(40 * GIB))
    assert available_nbytes(machine.root) == 30 * GIB


def test_more_in_use_than_the_limit_is_no_room(machine: Machine) -> None:
    machine.process("0::/job\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup/job", str(100 * GIB), 101 * GIB)
    assert available_nbytes(machine.root) == 0


def test_version_1(machine: Machine) -> None:
    machine.process(
        "9:name=systemd:/x\n4:memory:/slurm/job_7/step_0\n1:cpu,cpuacct:/slurm\n0::/\n",
        V1_CPU_MOUNT + V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"),
    )
    machine.v1("sys/fs/cgroup/memory", UNLIMITED_V1)
    machine.v1("sys/fs/cgroup/memory/slurm", UNLIMITED_V1)
    machine.v1("sys/fs/cgroup/memory/slurm/job_7", str(128 * GIB), 30 * GIB, idle=2 * GIB)
    machine.v1("sys/fs/cgroup/memory/slurm/job_7/step_0", UNLIMITED_V1, above=str(128 * GIB))
    assert memory_nbytes(machine.root) == 128 * GIB
    assert available_nbytes(machine.root) == 100 * GIB


def test_version_1_in_a_container_that_sees_its_own_group_only(machine: Machine) -> None:
    # Docker and Kubernetes: the host's path in /proc/self/cgroup, the container's part of the tree mounted.
    pod = "/kubepods/burstable/pod1/c2"
    machine.process(f"4:memory:{pod}/worker\n", V1_MOUNT.format(root=pod, point="/sys/fs/cgroup/memory"))
    machine.v1("sys/fs/cgroup/memory", UNLIMITED_V1, above=str(64 * GIB))  # the pod's, which cannot be looked at
    machine.v1("sys/fs/cgroup/memory/worker", str(48 * GIB), 8 * GIB, above=str(48 * GIB))
    assert memory_nbytes(machine.root) == 48 * GIB
    assert available_nbytes(machine.root) == 40 * GIB
    assert len(memory_domains(machine.root)) == 3


def test_version_1_ancestor_that_does_not_count_its_children(machine: Machine) -> None:
    machine.process("4:memory:/a/b\n", V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory"))
    machine.v1("sys/fs/cgroup/memory/a", str(1 * GIB))
    machine.write("sys/fs/cgroup/memory/a/memory.use_hierarchy", "0\n")
    machine.v1("sys/fs/cgroup/memory/a/b", str(10 * GIB))
    assert available_nbytes(machine.root) == 10 * GIB


def test_hybrid_takes_the_hierarchy_that_has_the_memory_controller(machine: Machine) -> None:
    machine.process(
        "4:memory:/job\n0::/job\n",
        V1_MOUNT.format(root="/", point="/sys/fs/cgroup/memory")
        + V2_MOUNT.format(root="/", point="/sys/fs/cgroup/unified"),
    )
    machine.write("sys/fs/cgroup/unified/job/cgroup.procs", "1\n")
    machine.v1("sys/fs/cgroup/memory/job", str(20 * GIB), 5 * GIB)
    assert machine.headrooms() == {"this machine": 1945, "job": 15}


@pytest.mark.parametrize("group", ["/..", "/../..", "/../other", "/gone/too"])
def test_a_group_that_cannot_be_seen_from_here(machine: Machine, group: str) -> None:
    # A cgroup namespace shows groups outside of it as "/..": the nearest that is known is the root of the mount.
    machine.process(f"0::{group}\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
    machine.v2("sys/fs/cgroup", str(64 * GIB), 4 * GIB)
    assert available_nbytes(machine.root) == 60 * GIB


def test_the_same_group_mounted_twice_counts_once_and_blanks_in_paths_are_understood(machine: Machine) -> None:
    machine.process(
        "0::/job\n",
        V2_MOUNT.format(root="/", point="/sys/fs/cgroup") + V2_MOUNT.format(root="/job", point="/mnt/a\\040b"),
    )
    machine.v2("sys/fs/cgroup/job", str(64 * GIB))
    (machine.root / "mnt").mkdir()
    (machine.root / "mnt" / "a b").symlink_to(machine.root / "sys/fs/cgroup/job")
    assert len(memory_domains(machine.root)) == 2
    machine.process("0::/job\n", V2_MOUNT.format(root="/job", point="/mnt/a\\040b"))
    assert memory_nbytes(machine.root) == 64 * GIB


@pytest.mark.parametrize("broken", ["", "nonsense\n", "0::\n", "1 2 3 - cgroup2\n", "4:memory:relative\n"])
def test_files_that_say_nothing(machine: Machine, broken: str) -> None:
    machine.process(broken, broken)
    assert available_nbytes(machine.root) == 2040109466 * 1024


def test_containers_on_one_machine_are_told_from_each_other_and_not_from_their_machine(tmp_path: Path) -> None:
    domains = []
    for name in "ab":
        container = Machine(tmp_path / name)
        container.process("0::/\n", V2_MOUNT.format(root="/", point="/sys/fs/cgroup"))
        container.v2("sys/fs/cgroup", str(64 * GIB))
        domains.append(memory_domains(container.root))
    assert domains[0][0].identity == domains[1][0].identity
    assert domains[0][1].identity != domains[1][1].identity
    assert domains[0][1].identity == memory_domains(tmp_path / "a")[1].identity


def test_without_a_boot_id_the_host_name_serves(tmp_path: Path) -> None:
    assert machine_identity(tmp_path) == socket.gethostname()


def test_this_machine() -> None:
    domains = memory_domains()
    assert 0 < available_nbytes() <= memory_nbytes() <= domains[0].limit_nbytes
