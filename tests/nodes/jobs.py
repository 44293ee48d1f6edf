# SPDX-License-Identifier: Apache-2.0
"""Jobs on the nodes of a cluster, launched from the first one as a user launches them: ``deepspeed --hostfile …``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.integration.conftest import HERE as CASES
from tests.integration.conftest import ROOT, Finished, Outcome
from tests.nodes.cluster import Cluster

PROGRAM = Path(__file__).with_name("node_cases.py")
SLOTS = 2
"""Ranks per node."""

VARIABLES = {
    "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
"""Variables of the ranks. DeepSpeed's launcher passes few of its own on: the others are in ``.deepspeed_env``."""


class Job:
    """Cases on all nodes, one process per slot. Their results are in a folder that all nodes share.

    Args:
        cluster: the nodes.
        folder: an empty folder.
        cases: name, case and engine of each.
        env: further variables of the ranks.
        options: of ``deepspeed``.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        cases: Sequence[tuple[str, dict[str, Any], str]],
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self._cluster = cluster
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "cases.json").write_text(json.dumps([list(case) for case in cases]))
        variables = VARIABLES | {"PATH": os.environ["PATH"]} | dict(env or {})
        if "TORCH_EXTENSIONS_DIR" in os.environ:
            variables["TORCH_EXTENSIONS_DIR"] = os.environ["TORCH_EXTENSIONS_DIR"]
        (folder / ".deepspeed_env").write_text("".join(f"{key}={value}\n" for key, value in variables.items()))
        words = [
            sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(cluster.hostfile(SLOTS)), *options,
            str(PROGRAM), "--cases", str(folder / "cases.json"), "--folder", str(folder),
        ]  # fmt: skip
        launcher_env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(CASES)]), "DS_ACCELERATOR": "cpu"}
        with open(folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                cluster.nodes[0].command(words, folder), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=launcher_env, start_new_session=True,
            )  # fmt: skip

    def finish(self, timeout_s: float) -> Outcome:
        """Waits for the job's end; one that takes longer counts as hung."""
        try:
            code: int | None = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            self._process.kill()
            self._process.wait()
        log = (self.folder / "log").read_text(errors="replace")
        results = []
        for rank in range(SLOTS * len(self._cluster.nodes)):
            path = self.folder / f"results_{rank}.json"
            results.append(json.loads(path.read_text()) if path.exists() else {})
        return Outcome(Finished(code, log, self.folder), tuple(results))
