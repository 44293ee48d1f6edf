# SPDX-License-Identifier: Apache-2.0
"""One training with a framework, in its environment, by its own command."""

from __future__ import annotations

import copy
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.frameworks.comparison import Run
from tests.frameworks.environment import ROOT, Environment

ENGINES = ("stock", "tencache")
LIMIT_S = 1800.0
"""For one training, with the operators that it compiles."""


def config_for(engine: str, stock: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's config, with the one line that asks for TenCache."""
    config = copy.deepcopy(stock)
    if engine == "tencache":
        config["zero_optimization"]["offload_engine"] = "tencache"
    return config


def train(engine: str, framework: Path, folder: Path, environment: Environment) -> Run:
    """Runs ``train.sh`` of a framework's folder; its log is ``ENGINE.log`` in ``folder``."""
    inputs = folder / "inputs"
    if not inputs.exists():
        environment.python(str(Path(__file__).with_name("inputs.py")), str(inputs))
    output = folder / engine
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    config = folder / f"{engine}.json"
    stock = json.loads((framework.parent / "zero3_offload.json").read_text())
    config.write_text(json.dumps(config_for(engine, stock), indent=2))
    variables = environment.variables() | {
        "HERE": str(framework),
        "EXAMPLES": str(ROOT / "examples"),
        "MODEL": str(inputs / "model"),
        "DATA": str(inputs),
        "DS_CONFIG": str(config),
        "OUTPUT": str(output),
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
        "MODELSCOPE_CACHE": str(folder / "cache"),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    log = folder / f"{engine}.log"
    print(f"{framework.name} with {engine}: {log}", file=sys.stderr, flush=True)
    with open(log, "wb") as file:
        try:
            code = subprocess.run(
                ["bash", "-e", str(framework / "train.sh")], cwd=folder, env=variables, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = None
    return Run.of(code, log.read_text(errors="replace"), output)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
