# SPDX-License-Identifier: Apache-2.0
"""Side effects of importing the package, each tested in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str, *folders: Path, **variables: str) -> str:
    """Standard output of ``code`` with ``folders`` and this checkout first on the path."""
    path = os.pathsep.join(str(folder) for folder in (*folders, ROOT))
    environment = os.environ | {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu"} | variables
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def fake_deepspeed(folder: Path, *, package: str = "", config: str = "class DeepSpeedConfig: pass") -> Path:
    runtime = folder / "deepspeed" / "runtime"
    runtime.mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text(package)
    (runtime / "__init__.py").write_text("")
    (runtime / "config.py").write_text(config + "\n")
    return folder


def test_the_import_is_light_and_quick():
    code = (
        "import sys, time\n"
        "t0 = time.process_time()\n"
        "import tencache_ds\n"
        "spent = time.process_time() - t0\n"
        "heavy = {'deepspeed', 'torch', 'numpy', 'kvikio', 'cpuinfo', 'pynvml', 'pydantic', 'psutil'}\n"
        "print(sorted(heavy & sys.modules.keys()), spent < 0.5)"
    )
    assert run_python(code).split("\n")[0] == "[] True"


def test_only_the_integration_and_the_host_path_import_deepspeed():
    code = (
        "import importlib, pkgutil, sys\n"
        "import tencache_ds\n"
        "outside = {'integration', 'host_path', 'ops', 'benchmarks', 'cli', 'run'}\n"
        "def names(path, prefix):\n"
        "    for found in pkgutil.iter_modules(path, prefix):\n"
        "        if found.name.split('.')[1] in outside or found.name.endswith('__main__'):\n"
        "            continue\n"
        "        yield found.name\n"
        "        if found.ispkg:\n"
        "            yield from names(importlib.import_module(found.name).__path__, found.name + '.')\n"
        "found = list(names(tencache_ds.__path__, 'tencache_ds.'))\n"
        "for name in found:\n"
        "    importlib.import_module(name)\n"
        "print(sorted({'deepspeed', 'kvikio', 'cpuinfo'} & sys.modules.keys()), len(found) > 100)"
    )
    assert run_python(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").split("\n")[0] == "[] True"


def test_the_finder_is_installed_once_and_leaves_other_modules_alone():
    code = (
        "import importlib, sys\n"
        "from tencache_ds import _autoload\n"
        "_autoload.autoload(); _autoload.install()\n"
        "finders = [f for f in sys.meta_path if isinstance(f, _autoload._PostImportFinder)]\n"
        "assert len(finders) == 1\n"
        "names = ('json', 'deepspeed', 'deepspeed.runtime', 'deepspeed.runtime.engine', 'config')\n"
        "print([finders[0].find_spec(name, None) for name in names])\n"
        "import wave\n"
        "print(type(wave.__loader__).__name__)"
    )
    assert run_python(code).split("\n")[:2] == ["[None, None, None, None, None]", "SourceFileLoader"]


def test_without_deepspeed_the_finder_finds_nothing(tmp_path):
    fake_deepspeed(tmp_path)
    (tmp_path / "deepspeed" / "runtime" / "config.py").unlink()
    code = (
        "import tencache_ds\n"
        "try:\n"
        "    import deepspeed.runtime.config\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name)"
    )
    assert run_python(code, tmp_path).split("\n")[0] == "deepspeed.runtime.config"


@pytest.mark.parametrize("broken", ["package", "config"])
def test_a_deepspeed_that_cannot_be_imported_fails_with_its_own_error(tmp_path, broken):
    fake_deepspeed(tmp_path, **{broken: "raise RuntimeError('this DeepSpeed is broken')"})
    code = (
        "import tencache_ds\n"
        "tencache_ds._autoload.autoload()\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        import deepspeed.runtime.config\n"
        "    except RuntimeError as error:\n"
        "        print(error)\n"
        "tencache_ds._autoload.autoload()"
    )
    assert run_python(code, tmp_path).split("\n")[:2] == ["this DeepSpeed is broken"] * 2


def test_a_deepspeed_without_the_seam_goes_on_with_a_warning(tmp_path):
    fake_deepspeed(tmp_path, config="other = 1")
    code = "import tencache_ds, deepspeed.runtime.config as c; print(c.other); tencache_ds._autoload.autoload()"
    printed = run_python(code, tmp_path)
    assert printed.startswith("1\n")
    assert "TenCache could not be hooked into DeepSpeed and stays inactive" in printed


def test_a_broken_tencache_does_not_break_deepspeed(tmp_path):
    fake_deepspeed(tmp_path)
    code = (
        "import sys, tencache_ds\n"
        "sys.modules['tencache_ds.integration.config_hook'] = None\n"
        "import deepspeed.runtime.config as config\n"
        "print(config.DeepSpeedConfig.__name__)\n"
        "tencache_ds._autoload.autoload()"
    )
    printed = run_python(code, tmp_path)
    assert printed.startswith("DeepSpeedConfig\n")
    assert printed.count("stays inactive") == 2


def test_a_module_half_imported_by_somebody_else_is_waited_for():
    code = (
        "import sys, types\n"
        "sys.modules['deepspeed.runtime.config'] = types.ModuleType('deepspeed.runtime.config')\n"
        "from tencache_ds import _autoload\n"
        "print(sum(isinstance(f, _autoload._PostImportFinder) for f in sys.meta_path))"
    )
    assert run_python(code) == "1\n"


@pytest.mark.parametrize(("value", "on"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_variables_that_switch_it_on_and_off(value, on):
    code = (
        "from tencache_ds.integration.config_hook import is_set\n"
        "from tencache_ds.names import DISABLE_VARIABLE, ENABLE_VARIABLE\n"
        "print(is_set(DISABLE_VARIABLE), is_set(ENABLE_VARIABLE))"
    )
    assert run_python(code, TENCACHE_DISABLE=value, TENCACHE_ENABLE=value) == f"{on} {on}\n"


PARSE = """
import importlib.abc, sys
import tencache_ds, torch, deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in broken:
            raise kind(f"{name} is broken here", name=name)

def parse(**keys):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}} | keys.pop("zero", {})
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero} | keys
    try:
        return "with TenCache" if getattr(DeepSpeedConfig(config), "tencache", None) else "stock"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

kept = ("tencache_ds", "tencache_ds._autoload", "tencache_ds.integration", "tencache_ds.integration.config_hook",
        "tencache_ds.names")
sys.meta_path.insert(0, Broken())
kind = ImportError
for broken in (["xxhash"], ["tencache_ds.config"], ["tencache_ds.runtime.engine"], ["tencache_ds.errors"],
               ["tencache_ds.integration.engine_choice", "tencache_ds.io"], ["xxhash"]):
    for name in [n for n in sys.modules if n in broken or (n.startswith("tencache_ds") and n not in kept)]:
        del sys.modules[name]
    print(parse(), "|", parse(zero={"offload_param": {"device": "cpu"}}), "|", parse(offload_engine="tencache"))
    if broken == ["tencache_ds.integration.engine_choice", "tencache_ds.io"]:
        kind = ModuleNotFoundError
"""


def test_only_a_config_that_asks_needs_an_installation_that_works():
    """One process: what a config needs that does not ask for TenCache is loaded before anything is broken."""
    printed = [line.split(" | ") for line in run_python(PARSE).splitlines() if " | " in line]
    assert [line[:2] for line in printed] == [["stock", "stock"]] * 6
    for broken, (_, _, asked) in zip(
        ("xxhash", "tencache_ds.config", "tencache_ds.runtime.engine"), printed, strict=False
    ):
        assert asked.startswith("InstallationError: ")
        assert f"ImportError: {broken} is broken here" in asked
        assert "pip install --force-reinstall --no-deps tencache-ds" in asked
        assert 'remove "offload_engine"' in asked
    assert printed[3][2] == "ImportError: tencache_ds.errors is broken here"
    assert printed[4][2] == "ImportError: tencache_ds.integration.engine_choice is broken here"
    missing = printed[5][2]
    assert "ModuleNotFoundError: xxhash is broken here. Install what is missing (pip install tencache-ds" in missing


REAL_DEEPSPEED = """
import {first}
import inspect, linecache, importlib
import deepspeed.runtime.config as config
from deepspeed.runtime import engine
source = inspect.getsource(config)
assert "class DeepSpeedConfig" in source
assert "class DeepSpeedConfig" in inspect.getsource(config.DeepSpeedConfig)
assert config.__spec__.loader.get_source(config.__name__) == source
assert config.__spec__.loader.is_package(config.__name__) is False
assert linecache.getline(config.__file__, 1) == source.splitlines(True)[0]
print(type(config.__spec__.loader).__name__, type(engine.__spec__.loader).__name__)
"""


def test_deepspeed_keeps_its_source():
    printed = run_python(REAL_DEEPSPEED.format(first="tencache_ds"))
    assert "_HookingLoader SourceFileLoader\n" in printed
    assert "stays inactive" not in printed
