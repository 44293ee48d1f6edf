# SPDX-License-Identifier: Apache-2.0
"""Tests marked ``long`` are trained where ``-m`` asks for them, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.long_cases import are_asked_for, marked, wanted


def config_with(expression: str) -> Any:
    return SimpleNamespace(getoption=lambda name, default: expression)


@pytest.mark.parametrize(
    ("expression", "asked"),
    [("", False), ("gpu", False), ("not long", False), ("prolong", False), ("long", True), ("long or not long", True)],
)
def test_the_expression_decides(expression: str, asked: bool) -> None:
    config = config_with(expression)
    assert are_asked_for(config) is asked
    assert wanted(config, ["a", "b"], {"b"}) == (["a", "b"] if asked else ["a"])


def test_only_those_named_are_marked() -> None:
    short, long = marked(["a", "b"], {"b"})
    assert short == "a"
    assert [mark.name for mark in long.marks] == ["long"]
    assert long.values == ("b",)
