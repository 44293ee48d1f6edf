# SPDX-License-Identifier: Apache-2.0
"""TenCache is active exactly where a config asks for it, however the script was started, and never half."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tencache_ds.integration.adapters.versions import SUPPORTED

pytestmark = pytest.mark.timeout(180)

ACTIVATION_LINE = "is active with DeepSpeed"

SCRIPT = """
import argparse, json, os, sys
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--configs", nargs="+")
arguments = parser.parse_args()

from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper
from deepspeed.runtime.zero import parameter_offload, partition_parameters, stage3
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

def facts():
    watched = {
        "coordinator": parameter_offload.PartitionedParameterCoordinator,
        "swapper": partition_parameters.AsyncPartitionedParameterSwapper,
        "optimizer": stage3.DeepSpeedZeroOptimizer_Stage3,
        "configure": engine_module.DeepSpeedEngine._configure_zero_optimizer,
        "partition": partition_parameters.Init._partition_param,
    }
    return {name: id(value) for name, value in watched.items()}

report = {"before": facts(), "engines": [], "errors": [], "argv": sys.argv, "main": __name__}
report["stock_classes"] = (
    parameter_offload.PartitionedParameterCoordinator is PartitionedParameterCoordinator
    and partition_parameters.AsyncPartitionedParameterSwapper is AsyncPartitionedParameterSwapper
)
if os.path.exists("change.py"):
    exec(open("change.py").read())
for path in arguments.configs:
    config = json.load(open(path))
    torch.manual_seed(7)
    try:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(2)))
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    except Exception as error:
        report["errors"].append(f"{type(error).__name__}: {error}")
        continue
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(3):
        x = torch.randn(2, 512, generator=generator, dtype=torch.bfloat16).to(engine.device)
        loss = engine(x).float().square().mean()
        losses.append(loss.item().hex())
        engine.backward(loss)
        engine.step()
    swapper = getattr(next(model.parameters()), "nvme_swapper", None)
    report["engines"].append({
        "optimizer": f"{type(engine.optimizer).__module__}.{type(engine.optimizer).__name__}",
        "coordinator": type(engine.optimizer._get_param_coordinator()).__name__,
        "swapper": "" if swapper is None else f"{type(swapper).__module__}.{type(swapper).__name__}",
        "losses": losses,
    })
    engine.destroy()
report["after"] = facts()
report["loaded"] = sorted(name for name in sys.modules if name.startswith("tencache_ds"))
rank = os.environ.get("RANK", "0")
with open(f"report_{rank}.json", "w") as file:
    json.dump(report, file)
if not any(engine["optimizer"].startswith("tencache_ds") for engine in report["engines"]):
    # With stock engines on NVMe alone, the end of the interpreter aborts once in some dozens of runs on a busy machine:
    # "terminate called without an active exception".
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


class Script:
    """The script, its configs and a folder to run it in."""

    def __init__(self, harness: Any) -> None:
        self.harness = harness
        self.folder: Path = harness.folder()
        self.path = self.folder / "train.py"
        self.path.write_text(SCRIPT)
        self.configs: list[str] = []

    def config(self, device: str, **changes: Any) -> Script:
        section = {"device": device} | ({"nvme_path": str(self.folder / "nvme")} if device == "nvme" else {})
        in_zero = changes.pop("zero", {})
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section} | in_zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        } | changes
        path = self.folder / f"config{len(self.configs)}.json"
        path.write_text(json.dumps(config))
        self.configs.append(str(path))
        return self

    @property
    def arguments(self) -> list[str]:
        return ["--configs", *self.configs]

    def python(self, before: Any = (), **env: str | None) -> tuple[Any, dict[str, Any]]:
        command = [sys.executable, *before, str(self.path), *self.arguments]
        finished = self.harness.execute(command, folder=self.folder, env=env, timeout_s=120).succeeded()
        return finished, self.report()

    def forked(self, change: str = "") -> tuple[Any, dict[str, Any]]:
        """Without a start of its own, where that is not in question; ``change`` is made after DeepSpeed's import."""
        (self.folder / "change.py").write_text(change)
        finished = self.harness.python([str(self.path), *self.arguments], folder=self.folder, timeout_s=120)
        return finished.succeeded(), self.report()

    def launcher(self, ranks: int, argv: list[str], **env: str | None) -> tuple[Any, dict[str, Any]]:
        finished = self.harness.launch(ranks, argv, folder=self.folder, env=env, timeout_s=120).succeeded()
        return finished, self.report()

    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report_0.json").read_text())


@pytest.fixture
def script(harness: Any) -> Script:
    return Script(harness)


def ours(report: dict[str, Any], index: int = 0) -> bool:
    engine = report["engines"][index]
    result = {
        engine["optimizer"] == "tencache_ds.integration.stage3.TenCacheZeroOptimizer_Stage3",
        engine["coordinator"] == "TenCacheCoordinator",
        engine["swapper"] == "tencache_ds.integration.param_swapper.ParamSwapper",
    }
    assert len(result) == 1, f"half active: {engine}"
    return result.pop()


def test_without_the_key_nothing_is_replaced(script: Script) -> None:
    finished, report = script.config("cpu").config("nvme").config("nvme", offload_engine=None).python()
    assert report["before"] == report["after"]
    assert report["stock_classes"]
    assert report["errors"] == []
    assert [ours(report, index) for index in range(3)] == [False] * 3
    assert ACTIVATION_LINE not in finished.log
    # What is loaded is what watches the config: no engine, no tiers, and (in the config) no torch or pydantic model.
    heavy = {"tencache_ds.runtime.engine", "tencache_ds.integration.stage3", "tencache_ds.io", "tencache_ds.memory"}
    assert not heavy & set(report["loaded"])


def test_stock_engine_after_ours_in_one_process(script: Script) -> None:
    script.config("nvme", offload_engine="tencache").config("cpu").config("nvme").config(
        "nvme", offload_engine="tencache"
    )
    finished, report = script.forked()
    assert [ours(report, index) for index in range(4)] == [True, False, False, True]
    for name in ("coordinator", "optimizer"):  # replaced only while one engine is built
        assert report["before"][name] == report["after"][name]
    assert finished.log.count(ACTIVATION_LINE) == 2  # each of the two engines says what it keeps where
    losses = [engine["losses"] for engine in report["engines"]]
    assert losses[0] == losses[1] == losses[3]


def test_unedited_script_under_the_launcher_with_the_alias(script: Script) -> None:
    script.config("nvme", zero={"offload_engine": "tencache"})
    finished, report = script.launcher(2, [str(script.path), *script.arguments])
    assert ours(report)
    assert "import tencache" not in SCRIPT
    assert finished.log.count(ACTIVATION_LINE) == 1, "one line, on rank 0 only"


def test_run_module_under_the_launcher(script: Script) -> None:
    script.config("nvme", offload_engine="tencache", tencache={"io_backend": "posix"})
    argv = ["--module", "tencache_ds.run", str(script.path), *script.arguments]
    _, report = script.launcher(1, argv, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ours(report)
    assert report["main"] == "__main__"
    assert report["argv"][0] == str(script.path)
    assert report["argv"][-2:] == script.arguments


@pytest.mark.parametrize("first", ["tencache_ds", "deepspeed"])
def test_explicit_import(script: Script, first: str) -> None:
    lines = ["import tencache_ds", "import deepspeed"]
    lines = lines if first == "tencache_ds" else lines[::-1]
    script.path.write_text("\n".join([*lines, SCRIPT]))
    _, report = script.config("nvme", offload_engine="tencache").python(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ours(report)


def test_disabled_by_the_environment(script: Script) -> None:
    script.config("cpu").config("cpu", offload_engine="tencache").config("cpu", zero={"offload_engine": "tencache"})
    finished, report = script.python(TENCACHE_DISABLE="1")
    assert [ours(report, index) for index in range(3)] == [False] * 3
    assert report["before"] == report["after"]
    # Each config is parsed twice, for zero.Init and for the engine; what is to be said about it is said once.
    assert finished.log.count("TenCache is OFF") == 2
    assert 'the config says "zero_optimization.offload_engine": "tencache", but TENCACHE_DISABLE is set' in finished.log


def test_what_looks_like_asking_is_never_passed_over(script: Script) -> None:
    """One process: configs that only nearly ask, and two that are meant as they are."""
    script.config("cpu", tencache={"io_lanes": 4}).config("cpu", offload_engines=None)  # run on stock, with a warning
    script.config("cpu", offload_engine=None, tencache={}).config("cpu", name="tencache")  # without a word
    script.config("cpu", offload_engin="tencache").config("cpu", **{"Offload-Engine": "TenCache"})
    script.config("cpu", use_engine="tencache").config("cpu", zero={"offload_engin": None})
    script.config("cpu", zero={"tencache": {}, "offload_engine": "tencache"})
    script.config("cpu", offload_engine="tencache", tencahe={"io_lanes": 4})
    finished, report = script.forked()
    assert [ours(report, index) for index in range(4)] == [False] * 4
    assert finished.log.count("TenCache is NOT ACTIVE") == 2
    assert finished.log.count('NOT ACTIVE: the config has "tencache", but nothing in it asks for the engine') == 1
    assert finished.log.count('NOT ACTIVE: the config has "offload_engines"') == 1
    wrong = ["offload_engin", "Offload-Engine", "use_engine", "zero_optimization.offload_engin",
             "zero_optimization.tencache", "tencahe"]  # fmt: skip
    for key, error in zip(wrong, report["errors"], strict=True):
        assert error.startswith(f'ConfigError: "{key}" (given: ')
        meant = "tencache" if key.endswith(("tencache", "tencahe")) else "offload_engine"
        assert f'Did you mean "{meant}"?' in error


def test_without_the_hook_deepspeed_refuses_the_recommended_spelling(script: Script) -> None:
    script.config("cpu", zero={"offload_engine": "tencache"})
    _, report = script.python(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    (error,) = report["errors"]
    assert error.startswith("ValidationError")
    assert "offload_engine" in error


def test_a_deepspeed_outside_the_declared_range_is_said_once(script: Script) -> None:
    change = "deepspeed.__version__ = '0.21.3'"
    script.config("cpu", offload_engine="tencache").config("cpu", offload_engine="tencache")
    finished, report = script.forked(change)
    assert len(report["engines"]) == 2
    outside = f"DeepSpeed 0.21.3 is outside the range that TenCache is tested with ({SUPPORTED})"
    assert finished.log.count(outside) == 1


def test_a_changed_seam_is_an_error_and_nothing_is_replaced(script: Script) -> None:
    change = "PartitionedParameterCoordinator.reset_step = lambda self, unknown: None; report['before'] = facts()"
    _, report = script.config("nvme", offload_engine="tencache").forked(change)
    assert report["engines"] == []
    (error,) = report["errors"]
    assert error.startswith("SeamError: DeepSpeed 0.")
    assert "PartitionedParameterCoordinator.reset_step" in error
    assert "unknown" in error
    assert report["before"] == report["after"]
    assert report["stock_classes"]


def test_a_missing_seam_is_an_error(script: Script) -> None:
    change = "del stage3.DeepSpeedZeroOptimizer_Stage3.get_fp32_grad_partitions"
    _, report = script.config("nvme", offload_engine="tencache").forked(change)
    (error,) = report["errors"]
    assert error.startswith("SeamError: DeepSpeed 0.")
    assert "get_fp32_grad_partitions" in error


def test_enabled_by_the_environment(script: Script) -> None:
    """One process: configs without the key, one that has it, one that says no, and two that are refused."""
    script.config("nvme").config("nvme", tencache={"io_lanes": 4}).config("nvme", offload_engine="tencache")
    script.config("cpu", offload_engine=None)
    script.config("cpu", offload_engin=None)
    script.config("cpu", zero={"zenflow": {"topk_ratio": 0.1, "update_interval": 4}})
    finished, report = script.python(TENCACHE_ENABLE="1")
    assert [ours(report, index) for index in range(3)] == [True] * 3
    assert report["engines"][3]["optimizer"].startswith("deepspeed.")
    because = ", because TENCACHE_ENABLE is set: per rank"
    assert finished.log.count(ACTIVATION_LINE) == 3
    assert finished.log.count(because) == 2, "the third config asks for it itself"
    no_effect = "TENCACHE_ENABLE is set, but has no effect on this DeepSpeed engine: "
    assert finished.log.count(f'{no_effect}the config says "offload_engine": null.') == 1
    misspelt, zenflow = report["errors"]
    assert misspelt.startswith('ConfigError: "offload_engin" (given: None)')
    assert zenflow.startswith('ConfigError: "zero_optimization.zenflow" cannot be combined')


def test_enabled_and_disabled_by_the_environment(script: Script) -> None:
    finished, report = script.config("cpu").python(TENCACHE_ENABLE="1", TENCACHE_DISABLE="1")
    assert not ours(report)
    assert report["before"] == report["after"]
    off = "TenCache is OFF: TENCACHE_ENABLE is set, but TENCACHE_DISABLE is set in the environment"
    assert finished.log.count(off) == 1
