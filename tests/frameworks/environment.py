# SPDX-License-Identifier: Apache-2.0
"""The virtual environment of a framework: its own requirements first, then TenCache, which may change none of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = ("axolotl", "llamafactory", "ms-swift", "trl", "transformers", "accelerate", "deepspeed", "torch")


class InstallationFailed(Exception):
    """pip could not install the framework, or TenCache beside it."""


class Environment:
    """A virtual environment with one framework and this checkout of TenCache.

    Args:
        folder: of the environment; kept from run to run.
        requirements: file with those of the framework.
        replacements: requirements in place of the file's for the same packages.
    """

    def __init__(self, folder: Path, requirements: Path, replacements: Sequence[str]) -> None:
        self.folder = folder
        self.requirements = replaced(requirements.read_text().splitlines(), replacements)

    def make(self) -> None:
        """Installs everything, unless that was done before with the same requirements.

        Raises:
            InstallationFailed: with the last line of pip's output.
        """
        wanted = self.folder / "requirements.txt"
        if wanted.exists() and wanted.read_text().splitlines() == self.requirements:
            return
        wanted.unlink(missing_ok=True)
        venv.create(self.folder, with_pip=True)
        self._pip("ninja", "setuptools", "wheel", *self.requirements)
        chosen = self.folder / "chosen.txt"  # what the framework's own requirements led to
        chosen.write_text(self.python("-m", "pip", "freeze"))
        self._pip("--constraint", str(chosen), "--editable", str(ROOT))
        wanted.write_text("\n".join(self.requirements) + "\n")

    def versions(self) -> str:
        """Those that matter, as ``name version``."""
        lines = [line for line in self.python("-m", "pip", "freeze").splitlines() if "==" in line]
        installed = {package(line): line.partition("==")[2] for line in lines}
        return ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)

    def python(self, *words: str) -> str:
        """What ``python words`` prints in the environment."""
        command = [str(self.folder / "bin" / "python"), *words]
        return subprocess.run(command, env=self.variables(), check=True, capture_output=True, text=True).stdout

    def variables(self) -> dict[str, str]:
        """Environment variables of a program in the environment."""
        outer = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        variables = {key: value for key, value in os.environ.items() if key not in outer}
        return variables | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), os.environ.get("PATH", "")]),
            "VIRTUAL_ENV": str(self.folder),
        }

    def _pip(self, *words: str) -> None:
        print(f"pip install {' '.join(words)}", file=sys.stderr, flush=True)
        command = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *words]
        finished = subprocess.run(command, env=self.variables(), capture_output=True, text=True)
        if finished.returncode:
            raise InstallationFailed(f"pip install {words[-1]}: {reason(finished.stderr)}")


def replaced(requirements: Sequence[str], replacements: Sequence[str]) -> list[str]:
    """The requirements of a file without its comments, those of a package replaced that is in ``replacements``."""
    kept = [line.partition("#")[0].strip() for line in requirements]
    new = {package(line) for line in replacements}
    return [line for line in kept if line and package(line) not in new] + list(replacements)


def package(requirement: str) -> str:
    """Normalized name of the package that a requirement is about."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[=<>!~@;]", requirement.strip(), maxsplit=1)[0]).lower()


def reason(output: str) -> str:
    """The errors in pip's output, in one line."""
    errors = [line.removeprefix("ERROR:").strip() for line in output.splitlines() if line.startswith("ERROR:")]
    return " ".join(errors or output.splitlines()[-1:])
