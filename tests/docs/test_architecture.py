# SPDX-License-Identifier: Apache-2.0
"""The files and functions that docs/architecture.md sends its readers to are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| `([^`]+)` \| ([^|]+) \|", PAGE, re.MULTILINE)
BESIDE = re.findall(r"`((?:\w+/)+\w+\.py)`, `([\w.]+)`", PAGE)


def names_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tencache_ds" / file).read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize(("file", "read"), [(file, read) for _, file, read in ROWS] + BESIDE)
def test_what_a_row_names_is_there(file: str, read: str) -> None:
    asked = set(re.findall(r"[\w.]+", read))
    assert asked <= names_in(file)


def test_each_journey_has_twelve_rows() -> None:
    assert [int(number) for number, _, _ in ROWS] == [*range(1, 13)] * 3


@pytest.mark.parametrize("folder", re.findall(r"`(ops/csrc/\w+)`", PAGE))
def test_native_parts_are_there(folder: str) -> None:
    assert (ROOT / folder).is_dir()
