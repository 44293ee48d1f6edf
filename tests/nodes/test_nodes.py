# SPDX-License-Identifier: Apache-2.0
"""Training on several nodes, two ranks on each, next to stock DeepSpeed: see :mod:`tests.nodes.cluster`.

To run it, as root: ``TENCACHE_TEST_NODES=1 pytest tests/nodes``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Outcome
from tests.nodes.cluster import LOCAL_DRIVE, Cluster, NodeSpec, what_is_missing
from tests.nodes.jobs import Job

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(1800)]

RANKS = range(4)
DRIVE = f"{LOCAL_DRIVE}/nvme"
MLP: dict[str, Any] = {"model": "mlp", "steps": 4, "nvme_path": DRIVE}
LLAMA = MLP | {"model": "llama", "accumulation": 2, "clipping": 0.5, "steps": 3}
TWO_MACHINES = [NodeSpec("node0", "node0", 0), NodeSpec("node1", "node1", 1, available_nbytes=4 << 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = what_is_missing()
    if missing:
        pytest.fail(f"no nodes can be made: {missing}")
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with Cluster(TWO_MACHINES, folder / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def trained(cluster: Cluster, folder: Path) -> Outcome:
    shared = folder / "shared_nvme"
    automatic = MLP | {"tencache": {"host_memory": None}}
    late = MLP | {"late_ranks": [2, 3], "late_s": 1.0}
    cases = [
        ("mlp", MLP, "stock"), ("mlp", MLP, "tencache"), ("llama", LLAMA, "stock"), ("llama", LLAMA, "tencache"),
        ("automatic", automatic, "tencache"), ("shared", MLP | {"nvme_path": str(shared)}, "tencache"),
        ("late", late, "tencache"),
    ]  # fmt: skip
    return Job(cluster, folder / "trained", cases).finish(600)


@pytest.mark.parametrize(("name", "oracle"), [
    ("mlp", "mlp"), ("llama", "llama"), ("automatic", "mlp"), ("shared", "mlp"), ("late", "mlp"),
])  # fmt: skip
def test_losses_are_those_of_stock(trained: Outcome, name: str, oracle: str) -> None:
    for rank in RANKS:
        result = trained.result(name, "tencache", rank)
        assert result["losses"] == trained.result(oracle, "stock", rank)["losses"]
        assert result["host"] == ("node0" if rank < 2 else "node1")
    assert trained.finished.succeeded()


def test_memory_and_cores_are_divided_by_the_ranks_of_a_node(trained: Outcome) -> None:
    results = [trained.result("automatic", "tencache", rank) for rank in RANKS]
    assert [result["local_ranks"] for result in results] == [2, 2, 2, 2]
    assert {result["host_nbytes"] for result in results} == {int(0.8 * (4 << 30)) // 2}
    for result in results:
        assert result["host_reason"] == (
            "80% of the 4.00 GiB that this machine has available, divided by its 2 ranks; "
            "the smallest figure of all ranks, that of rank 2 on node1"
        )


def test_each_rank_has_scratch_files_of_its_own(trained: Outcome) -> None:
    for name in ("mlp", "shared"):
        scratch = [path for rank in RANKS for path in trained.result(name, "tencache", rank)["scratch"]]
        assert len(scratch) == len(set(scratch)) == len(RANKS)


def test_a_variable_in_deepspeed_env_reaches_every_rank(trained: Outcome, cluster: Cluster, folder: Path) -> None:
    without_the_line = ("mlp", MLP, "stock_nvme")
    outcome = Job(cluster, folder / "enabled", [without_the_line], {"TENCACHE_ENABLE": "1"}).finish(300)
    for rank in RANKS:
        result = outcome.result("mlp", "stock_nvme", rank)
        assert result["optimizer"] == "TenCacheZeroOptimizer_Stage3"
        assert result["losses"] == trained.result("mlp", "stock", rank)["losses"]


# Nodes that call themselves the same


@pytest.mark.parametrize(("machines", "local_ranks"), [((0, 1), 2), ((0, 0), 4)], ids=["machines", "containers"])
def test_a_common_host_name_misleads_nobody(folder: Path, machines: tuple[int, int], local_ranks: int) -> None:
    specs = [NodeSpec(f"node{n}", "localhost", machine) for n, machine in enumerate(machines)]
    case = MLP | {"tencache": {"host_memory": None}}
    base = folder / f"localhost_{local_ranks}"
    with Cluster(specs, base / "cluster") as cluster:
        outcome = Job(cluster, base / "job", [("mlp", MLP, "stock"), ("mlp", case, "tencache")]).finish(300)
    for rank in RANKS:
        result = outcome.result("mlp", "tencache", rank)
        assert result["host"] == "localhost"
        assert result["losses"] == outcome.result("mlp", "stock", rank)["losses"]
        assert result["local_ranks"] == local_ranks


# Checkpoints

NODE_LOCAL = {"config": {"checkpoint": {"use_node_local_storage": True}}}
PLACES = {"shared": {}, "own_drives": NODE_LOCAL, "own_drives_undeclared": {}}
"""Where checkpoints are, and the config that goes with it."""


def checkpoint_in(folder: Path, place: str) -> str:
    return str(folder / "checkpoints") if place == "shared" else f"{LOCAL_DRIVE}/{place}"


@pytest.fixture(scope="module")
def saved(cluster: Cluster, folder: Path) -> Outcome:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("never_stopped", MLP | {"action": "save", "checkpoint": "", "only_train": True}, "stock")
    ]
    cases += [
        (place, MLP | config | {"action": "save", "checkpoint": checkpoint_in(folder, place)}, "tencache")
        for place, config in PLACES.items()
    ]
    return Job(cluster, folder / "saved", cases).finish(300)


@pytest.fixture(scope="module")
def resumed(cluster: Cluster, folder: Path, saved: Outcome) -> Outcome:
    saved.finished.succeeded()
    cases = [
        (place, MLP | PLACES[place] | {"action": "load", "checkpoint": checkpoint_in(folder, place)}, "tencache")
        for place in ("shared", "own_drives", "own_drives_undeclared")
    ]
    return Job(cluster, folder / "resumed", cases).finish(300)


@pytest.mark.parametrize("place", ["shared", "own_drives"])
def test_a_new_launch_continues_as_the_run_that_never_stopped(saved: Outcome, resumed: Outcome, place: str) -> None:
    for rank in RANKS:
        expected = saved.result("never_stopped", "stock", rank)
        for result in (saved.result(place, "tencache", rank), resumed.result(place, "tencache", rank)):
            assert result["losses"] == expected["losses"]
            assert result["final_weights"] == expected["final_weights"]


def test_each_node_has_its_own_part_and_latest(cluster: Cluster, saved: Outcome) -> None:
    for number, node in enumerate(cluster.nodes):
        folder = f"{LOCAL_DRIVE}/own_drives"
        assert node.run("cat", f"{folder}/latest") == "save0"
        names = node.run("ls", f"{folder}/save0").split()
        ranks = range(2 * number, 2 * number + 2)
        assert sorted(names) == sorted(
            name
            for rank in ranks
            for name in (
                f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
                f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
        )


def test_a_node_without_latest_is_named(resumed: Outcome) -> None:
    for rank in RANKS:
        error = resumed.per_rank[rank]["own_drives_undeclared/tencache"]["error"]
        assert error.startswith("AgreementError: the ranks differ in the checkpoint to load: ")
        assert "tag 'save0' on ranks 0, 1 (node0)" in error
        assert f"none, because {LOCAL_DRIVE}/own_drives_undeclared/latest is not there on ranks 2, 3 (node1)" in error


@pytest.fixture(scope="module")
def full(cluster: Cluster, folder: Path) -> Outcome:
    case = MLP | NODE_LOCAL | {"action": "full"}
    cases = [
        (f"full{node}", case | {"checkpoint": f"{LOCAL_DRIVE}/full{node}", "full_on": [2 * node]}, "tencache")
        for node in (0, 1)
    ]
    return Job(cluster, folder / "full", [("mlp", MLP, "stock"), *cases]).finish(300)


@pytest.mark.parametrize("node", [0, 1])
def test_a_full_drive_of_one_node_leaves_the_previous_checkpoint(full: Outcome, node: int) -> None:
    for rank in RANKS:
        result = full.result(f"full{node}", "tencache", rank)
        if rank // 2 == node:
            assert result["failure"].startswith("SpaceError: ")
            assert "No space left on device" in result["failure"]
        else:
            assert result["failure"].startswith("CheckpointError: the checkpoint was not saved: ranks ")
        assert result["latest"] == "first"
        assert result["left"] == []
        assert result["latest_after"] == "third"
        assert result["losses"] == full.result("mlp", "stock", rank)["losses"]


# A node that is gone


TIMEOUT_S = 60.0
AT_ONCE_S = 50.0
"""With the seconds that DeepSpeed's launcher and processes on a busy machine take to end."""
ENDS = {
    ("forward", 1): ("Connection closed by peer", AT_ONCE_S),
    ("update", 1): ("ranks 2, 3 did not come to the update of an optimizer step within 60 s", TIMEOUT_S + AT_ONCE_S),
    ("forward", 0): ("Connection closed by peer", AT_ONCE_S),
    ("update", 0): ("lost the store of the process group at the update of an optimizer step", AT_ONCE_S),
}
"""What the ranks of the other node say, and how soon, by what they did when a node was killed."""


@pytest.mark.parametrize(("stuck_in", "gone"), ENDS)
def test_a_job_ends_with_a_killed_node_and_resumes(saved: Outcome, folder: Path, stuck_in: str, gone: int) -> None:
    base = folder / f"killed_{stuck_in}_{gone}"
    of_gone = [2 * gone, 2 * gone + 1]
    of_others = [rank for rank in RANKS if rank not in of_gone]
    case = MLP | NODE_LOCAL | {"action": "interrupted", "checkpoint": f"{LOCAL_DRIVE}/checkpoints"}
    case |= {"stuck_in": stuck_in, "stuck_ranks": of_gone}
    with Cluster(TWO_MACHINES, base / "cluster") as cluster:
        minutes = f"{TIMEOUT_S / 60:.0f}"
        # Logs of their own: with the first node goes the terminal of all ranks.
        options = ["--enable_each_rank_log", str(base / "ranks")]
        job = Job(cluster, base / "job", [("mlp", case, "tencache")], {"DEEPSPEED_TIMEOUT": minutes}, options)
        until(lambda: all((job.folder / f"stuck_{rank}").exists() for rank in of_gone), 300)
        time.sleep(3)  # the others wait by now
        cluster.nodes[gone].kill()
        t_start = time.monotonic()
        until(lambda: not cluster.nodes[1 - gone].runs("node_cases"), 200)
        seconds = time.monotonic() - t_start
        outcome = job.finish(60)
        cluster.restart(gone)
        again = MLP | NODE_LOCAL | {"action": "load", "checkpoint": f"{LOCAL_DRIVE}/checkpoints", "after": 3}
        resumed = Job(cluster, base / "again", [("mlp", again, "tencache")]).finish(300)
    message, limit_s = ENDS[stuck_in, gone]
    for rank in of_others:
        assert message in outcome.per_rank[rank]["mlp/tencache"]["error"]
    assert seconds < limit_s
    for rank in RANKS:
        expected = saved.result("never_stopped", "stock", rank)["losses"][:3]
        assert resumed.result("mlp", "tencache", rank)["losses"] == expected


def until(happened: Callable[[], bool], limit_s: float) -> None:
    t_end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < t_end
        time.sleep(0.2)
