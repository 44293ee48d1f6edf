# SPDX-License-Identifier: Apache-2.0
"""A cap on host memory is real where a control group can be made, and admitted to be none where not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.comparison.conditions import HostLimit, host_limit

GIB = 2**30


def test_no_cap() -> None:
    with host_limit(None) as limit:
        assert limit == HostLimit()
        assert limit.wrap(["train"]) == ["train"]
        assert limit.enforced_by == ""


def test_without_control_groups_the_cap_is_only_measured(tmp_path: Path) -> None:
    with host_limit(GIB, tmp_path / "absent") as limit:
        assert limit.enforced_by == "measured"
        assert limit.wrap(["train"]) == ["train"]


@pytest.mark.parametrize(
    ("own", "mount"),
    [("0::/job", "cgroup2 none rw"), ("4:cpu,memory:/job", "cgroup none rw,memory")],
)
def test_a_folder_that_is_no_control_group_is_not_taken_for_one(
    own: str, mount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files written into a plain folder stay there, and so does the folder.
    monkeypatch.setattr("benchmarks.comparison.conditions.REMOVAL_PATIENCE_S", 0.1)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"{own}\n")
    (tmp_path / "proc" / "self" / "mountinfo").write_text(f"30 1 0:1 / /group rw - {mount}\n")
    (tmp_path / "group" / "job").mkdir(parents=True)
    with host_limit(GIB, tmp_path) as limit:
        assert limit.enforced_by == "measured"


def test_a_process_is_started_inside_its_group(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    limit = HostLimit(GIB, tmp_path)
    done = subprocess.run(limit.wrap(["sh", "-c", "echo $$"]), capture_output=True, text=True, check=True, timeout=20)
    assert (tmp_path / "cgroup.procs").read_text() == done.stdout  # the command has the process that joined the group
    assert limit.enforced_by == "cgroup"
    assert "1.0 GiB" in limit.explain()


def test_a_command_fails_rather_than_run_outside_its_group(tmp_path: Path) -> None:
    limit = HostLimit(GIB, tmp_path / "gone")
    done = subprocess.run(limit.wrap(["echo", "ran"]), capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode != 0
    assert "ran" not in done.stdout


@pytest.mark.parametrize("events", ["oom_kill 0\n", "nonsense without numbers here\n"])
def test_only_a_kill_is_explained(tmp_path: Path, events: str) -> None:
    (tmp_path / "memory.events").write_text(events)
    assert HostLimit(GIB, tmp_path).explain() == ""
