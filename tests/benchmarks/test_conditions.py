# SPDX-License-Identifier: Apache-2.0
"""A cap on host memory is real where a control group can be made, and said to be none elsewhere; cores are busy."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.comparison.conditions import HostLimit, busy_cores, host_limit

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


def children(before: list[psutil.Process]) -> list[psutil.Process]:
    """Those of this process that were not there before: the tests of training keep one for their programs."""
    return [each for each in psutil.Process().children() if each not in before]


def wait_until_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=10)[1]


def test_cores_are_busy_until_the_end() -> None:
    before = psutil.Process().children()
    with busy_cores(2):
        loops = children(before)
        t_end = time.monotonic() + 20
        while min(sum(loop.cpu_times()[:2]) for loop in loops) < 0.1 and time.monotonic() < t_end:
            time.sleep(0.05)
        assert [sum(loop.cpu_times()[:2]) >= 0.1 for loop in loops] == [True, True]
    assert wait_until_gone(loops) == []


def test_they_end_with_an_error() -> None:
    before = psutil.Process().children()
    loops = []

    def fail() -> None:
        with busy_cores(1):
            loops.extend(children(before))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert len(loops) == 1
    assert wait_until_gone(loops) == []


def test_they_end_with_a_measurement_that_is_killed() -> None:
    program = (
        "from benchmarks.comparison.conditions import busy_cores\nwith busy_cores(1): print('on', flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "on\n"
    loops = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    assert len(loops) == 1
    assert wait_until_gone(loops) == []
