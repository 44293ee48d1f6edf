# SPDX-License-Identifier: Apache-2.0
"""Run the exactness core with other DeepSpeed versions, each in an environment of its own.

    python .ci/lines.py 0.16.9 0.18.9    # these
    python .ci/lines.py --all            # every version that TenCache says it was tested with; --oldest: the first one
    python .ci/lines.py --newest         # the newest one that the package index has
    python .ci/lines.py --prepare --oldest    # makes the environment only

An environment has that DeepSpeed and its own compiled operators; everything else it shares with the Python that runs
this. First to be seen is what the version breaks: the seams that differ, by feature, and the modules that cannot be
imported. Then the core is run (tests/integration/test_core.py), and a table shows all versions. Exit status 1 if one of
them failed.

Environments are kept in --folder, by default the one that TENCACHE_LINES names or .venv/lines: about four minutes to
make the first time on two cores, nothing later.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = "tests/integration/test_core.py"
OPERATORS = (
    "CPUAdamBuilder",
    "AsyncIOBuilder",
    "ShareMemCommBuilder",
    "tencache_ds.ops.tencache_aio:TenCacheAioBuilder",
    "tencache_ds.ops.tencache_update:TenCacheUpdateBuilder",
)
SHARED = "shared_packages.pth"
MINUTES_OF_CORE = 40

DIFFERENCES = """
import importlib, json, pkgutil
found = {"seams": [], "modules": {}}
def note(name, error):
    reason = f"{type(error).__name__}: {error}".partition(" (/")[0]
    found["modules"].setdefault(reason, []).append(name)
import tencache_ds.integration as package
try:
    from tencache_ds.integration import seams
    for mismatch in seams.mismatches(seams.deepspeed_version()):
        found["seams"].append([mismatch.seam.feature.group, mismatch.seam.name, mismatch.problem])
except Exception as error:
    note("seams", error)
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    try:
        importlib.import_module(module.name)
    except Exception as error:
        note(module.name.removeprefix(package.__name__ + "."), error)
print("DIFFERENCES " + json.dumps(found))
"""


class LineError(Exception):
    """An environment that cannot be made, with the reason."""


@dataclass(slots=True)
class Line:
    """One DeepSpeed version and what was found with it.

    Attributes:
        folder: of its environment.
        differences: seams that differ, by feature.
        modules: those of the integration that cannot be imported.
        passed, failed: tests of the core.
        stock: hash of what stock gave in each test.
        seconds: in all.
        error: reason why there is no result.
    """

    version: str
    folder: Path
    differences: Counter[str] = field(default_factory=Counter)
    modules: list[str] = field(default_factory=list)
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    stock: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def succeeded(self) -> bool:
        return self.passed > 0 and not self.failed and not self.error

    def environment(self) -> dict[str, str]:
        """Variables of every process of this line."""
        path = [self.folder / "bin", Path(sys.executable).parent, os.environ.get("PATH", "")]
        return os.environ | {
            "VIRTUAL_ENV": str(self.folder),
            "PATH": os.pathsep.join(map(str, path)),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
            "OMP_NUM_THREADS": "1",
        }


# Environments


def say(text: str) -> None:
    print(text, flush=True)


def checked(command: Sequence[str | Path], what: str, **options: object) -> str:
    """The output of a command.

    Raises:
        LineError: it failed; says ``what`` it was for, and the end of its output.
    """
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )  # type: ignore[call-overload]
    if done.returncode:
        raise LineError(f"{what} failed:\n" + "\n".join(done.stdout.splitlines()[-15:]))
    return str(done.stdout)


def pip(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]


def newest_version() -> str:
    """The last release of DeepSpeed that the package index has."""
    found = re.search(r"Available versions: ([^,\s]+)", checked(pip("index", "versions", "deepspeed"), "pip index"))
    if found is None:
        raise LineError("pip index names no version of deepspeed")
    return found[1]


def shared_packages() -> str:
    """The lines of a .pth file that makes the packages of this Python visible, editable ones included."""
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    folders += [path for path in site.getsitepackages() if path not in folders and Path(path).is_dir()]
    return "".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders)


def make(line: Line, wheels: Path) -> None:
    """Makes the environment, unless it is there and was made over the same packages.

    Raises:
        LineError: pip could not.
    """
    stamp, key = line.folder / "made-over", f"{sys.version} {sys.prefix} {importlib.metadata.version('torch')}"
    if stamp.exists() and stamp.read_text() == key:
        return
    say(f"[{line.version}] making {line.folder}")
    shutil.rmtree(line.folder, ignore_errors=True)
    # Built and installed from here: pip of the new environment would take the shared DeepSpeed for an older version.
    requirement, environment = f"deepspeed=={line.version}", os.environ | {"DS_BUILD_OPS": "0"}
    build = pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--find-links", wheels, "-w", wheels, requirement)
    checked(build, f"building {requirement}", env=environment, cwd=wheels)
    checked([sys.executable, "-m", "venv", "--without-pip", line.folder], "python -m venv")
    install = pip(
        "--python", line.python, "install", "-q", "--no-deps", "--no-index", "--find-links", wheels, requirement
    )
    checked(install, f"installing {requirement}")
    site_packages = checked([line.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python")
    Path(site_packages.strip(), SHARED).write_text(shared_packages())
    for unmet in unmet_requirements(line):
        checked(pip("--python", line.python, "install", "-q", "--no-deps", unmet), f"installing {unmet}")
    stamp.write_text(key)


UNMET = """
from importlib.metadata import PackageNotFoundError, requires, version
from packaging.requirements import Requirement
for requirement in map(Requirement, requires("deepspeed") or ()):
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        try:
            met = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            print("UNMET", f"{requirement.name}{requirement.specifier}")
"""


def unmet_requirements(line: Line) -> list[str]:
    output = checked([line.python, "-c", UNMET], "looking at the requirements", env=line.environment(), cwd=ROOT)
    return [text.removeprefix("UNMET ") for text in output.splitlines() if text.startswith("UNMET ")]


def build_operators(line: Line) -> None:
    """Raises LineError where one cannot be built."""
    command = [line.python, ROOT / ".ci" / "build_ops.py", *OPERATORS]
    output = checked(command, "building operators", env=line.environment(), cwd=ROOT)
    if output.strip():
        say(output.rstrip())


# What is looked at


def look_at_differences(line: Line) -> None:
    """Prints and notes what the version breaks."""
    command = [line.python, "-c", DIFFERENCES]
    output = checked(command, "looking at the seams", env=line.environment(), cwd=ROOT)
    (found,) = [text for text in output.splitlines() if text.startswith("DIFFERENCES ")]
    differences = json.loads(found.removeprefix("DIFFERENCES "))
    for feature, seam, problem in differences["seams"]:
        line.differences[feature] += 1
        say(f"[{line.version}] {feature}: {seam}: {problem}")
    for reason, modules in differences["modules"].items():
        line.modules += modules
        say(f"[{line.version}] {reason} in {', '.join(modules)}")


def run_core(line: Line, arguments: Sequence[str]) -> None:
    """Runs the tests and notes their outcomes."""
    report = line.folder / "core.xml"
    report.unlink(missing_ok=True)
    command = [line.python, "-m", "pytest", "-q", "-n", "0", f"--junitxml={report}", CORE, *arguments]
    command += ["-o", f"cache_dir={line.folder / 'pytest_cache'}", "-o", "junit_family=xunit1"]
    with open(line.folder / "core.log", "w") as log:
        subprocess.run(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=line.environment(), cwd=ROOT,
            timeout=MINUTES_OF_CORE * 60,
        )  # fmt: skip
    if not report.exists():
        tail = "\n".join((line.folder / "core.log").read_text().splitlines()[-15:])
        raise LineError(f"the core did not run:\n{tail}")
    for test in xml.etree.ElementTree.parse(report).iter("testcase"):
        problem = test.find("failure") if test.find("failure") is not None else test.find("error")
        name = str(test.get("name"))
        if problem is None:
            line.passed += 1
            line.stock.update((name, str(item.get("value"))) for item in test.iter("property"))
        else:
            line.failed.append(name)
            say(f"[{line.version}] FAILED {name}: {(problem.get('message') or '').splitlines()[0][:200]}")


def run(line: Line, wheels: Path, pytest_arguments: Sequence[str], *, only_prepare: bool = False) -> None:
    t_start = time.monotonic()
    try:
        make(line, wheels)
        if only_prepare:
            build_operators(line)
            return
        look_at_differences(line)
        build_operators(line)
        run_core(line, pytest_arguments)
    except (LineError, subprocess.TimeoutExpired) as error:
        line.error = str(error)
        say(f"[{line.version}] {error}")
    line.seconds = time.monotonic() - t_start


# The table


def usual_bits(lines: Sequence[Line]) -> dict[str, str]:
    """What most of the lines give in each test with stock."""
    given: dict[str, Counter[str]] = {}
    for line in lines:
        for test, value in line.stock.items():
            given.setdefault(test, Counter())[value] += 1
    return {test: values.most_common(1)[0][0] for test, values in given.items()}


def table(lines: Sequence[Line]) -> str:
    rows = [("DeepSpeed", "seams that differ", "modules", "core", "stock's bits", "minutes")]
    usual = usual_bits(lines)
    for line in lines:
        seams = ", ".join(f"{feature} {count}" for feature, count in sorted(line.differences.items())) or "none"
        modules = f"{len(line.modules)} cannot be imported" if line.modules else "all imported"
        core = line.error.splitlines()[0] if line.error else f"{line.passed} of {line.passed + len(line.failed)}"
        unusual = sum(value != usual[test] for test, value in line.stock.items())
        bits = f"{unusual} differ" if unusual else "as usual" if line.stock else "unknown"
        rows.append((line.version, seams, modules, core, bits, f"{line.seconds / 60:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", help="of DeepSpeed")
    parser.add_argument("--all", action="store_true", help="every version TenCache was tested with")
    parser.add_argument("--oldest", action="store_true", help="the oldest version TenCache was tested with")
    parser.add_argument("--newest", action="store_true", help="the newest release in the package index")
    parser.add_argument("--prepare", action="store_true", help="make environments and operators, and run nothing")
    parser.add_argument("--folder", type=Path, default=os.environ.get("TENCACHE_LINES") or ROOT / ".venv" / "lines")
    parser.add_argument("--pytest", default="", help='arguments for pytest, such as "-k ranks1 -x"')
    arguments = parser.parse_args()
    versions = list(arguments.versions)
    if arguments.all or arguments.oldest:
        from tencache_ds.integration.adapters.versions import TESTED

        versions += TESTED if arguments.all else TESTED[:1]
    if arguments.newest:
        versions.append(newest_version())
    if not versions:
        parser.error("name versions of DeepSpeed, or --all, --oldest or --newest")
    folder = arguments.folder.resolve()
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    lines = [Line(version, folder / version) for version in dict.fromkeys(versions)]
    for line in lines:
        run(line, wheels, arguments.pytest.split(), only_prepare=arguments.prepare)
    if arguments.prepare:
        return 1 if any(line.error for line in lines) else 0
    print(table(lines))
    return 0 if all(line.succeeded for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
