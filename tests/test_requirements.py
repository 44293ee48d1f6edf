# SPDX-License-Identifier: Apache-2.0
"""Whatever the code imports is required by the package or by the extra that says so in pyproject.toml."""

import ast
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
# Folder of Python files -> the extra with which they run.
FOLDERS = {"tencache_ds": "bench", "benchmarks": "bench", "docs": "docs", "examples": "test", "tests": "test"}
# Imported only where it is found, by the code that says how to install it, or by an example that only runs on GPUs.
OPTIONAL = {"kvikio", "kvikio-cu12", "kvikio-cu13", "lightning"}


def imported(folder: str) -> Iterator[tuple[str, Path]]:
    """Every module outside the standard library that a file in the folder imports, by its top-level name."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            for name in names:
                if name.split(".")[0] not in sys.stdlib_module_names:
                    yield name.split(".")[0], path.relative_to(ROOT)


def required_by(extra: str) -> set[str]:
    """Distributions that installing the package with this extra brings along, theirs included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"][extra]]
    names: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in names:
            continue
        names.add(name)
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # wanted on another platform
        for line in map(Requirement, lines):
            if line.marker is None or any(line.marker.evaluate({"extra": e}) for e in ("", *requirement.extras)):
                waiting.append(line)
    return names


@pytest.mark.parametrize(("folder", "extra"), FOLDERS.items())
def test_the_extra_brings_what_is_imported(folder: str, extra: str) -> None:
    distributions = packages_distributions()
    required = required_by(extra) | OPTIONAL | {"tencache-ds"}
    files = [path for part in FOLDERS for path in (ROOT / part).rglob("*.py")]
    ours = {path.stem for path in files} | {path.parent.name for path in files}
    missing = {
        name: str(path)
        for name, path in imported(folder)
        if name not in ours and not {canonicalize_name(one) for one in distributions.get(name, [name])} & required
    }
    assert not missing, f"pyproject.toml: the extra {extra} does not bring {missing}"
