# SPDX-License-Identifier: Apache-2.0
"""The documentation builds without a warning, and agrees with the code."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = ("tencache_ds", "ops")
HOLE = "…"
NOT_OURS = {"torch.OutOfMemoryError", "Input/output error (errno 5)"}
"""Messages in the table that come from torch or from the operating system."""


def script(name: str) -> ModuleType:
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
def test_the_site_builds_without_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = build_main(["-W", "--keep-going", "-q", str(DOCS), str(tmp_path)])
    assert (status, capfd.readouterr().err) == (0, "")
    command_line, options = ((tmp_path / f"{page}.html").read_text() for page in ("command_line", "configuration"))
    assert "--turns" in command_line, "an option of `tencache bench`"
    assert "--nvme-path" in command_line
    assert 'id="overlap-step"' in options


def test_generated_parts_are_up_to_date() -> None:
    generate, figure = script("generate"), script("architecture_figure")
    page = (DOCS / "configuration.md").read_text()
    assert page == generate.generated(page), "run python docs/generate.py"
    assert figure.FIGURE.read_text() == figure.svg(), "run python docs/architecture_figure.py"


def text_of(node: ast.AST) -> str:
    """A string as written in the code, with its variable parts as holes; "" for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[.\d]*[sdfr]", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return ""


@pytest.fixture(scope="module")
def strings() -> list[str]:
    """Every string of the code."""
    files = [file for folder in SOURCES for file in (ROOT / folder).rglob("*.py")]
    return [text for file in files for node in ast.walk(ast.parse(file.read_text())) if (text := text_of(node))]


def quoted_messages() -> Iterator[str]:
    """The messages in the first column of the tables on the page about troubleshooting."""
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        cell = re.match(r"\| `(?P<message>.+?)` \| ", line) or re.match(r"\| ``(?P<message>.+?)`` \| ", line)
        if cell is not None:
            yield cell["message"].strip()


@pytest.mark.parametrize("message", sorted({*quoted_messages()} - NOT_OURS))
def test_a_quoted_message_is_in_the_code(message: str, strings: list[str]) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split(HOLE))))
    assert any(pattern.search(text) for text in strings)
