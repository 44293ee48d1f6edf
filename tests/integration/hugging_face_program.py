# SPDX-License-Identifier: Apache-2.0
"""Runs the scenarios of transformers, accelerate, PEFT and TRL, as ``training.py`` runs its cases."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import accelerate_cases
import hugging_face_cases
import training
import trl_cases

SCENARIOS = hugging_face_cases.SCENARIOS | accelerate_cases.SCENARIOS | trl_cases.SCENARIOS


def run(case: dict[str, Any], engine: str, folder: str, rank: int) -> dict[str, Any]:
    name = case["scenario"]
    scenario = hugging_face_cases.Case(engine, folder, rank, name)
    with mock.patch.dict(os.environ):
        hugging_face_cases.begin_anew()
        SCENARIOS[name](scenario)
    return scenario.seen


def keeps(case: dict[str, Any]) -> bool:
    return case["scenario"] != "trainer_trains"  # whose checkpoint others resume from


if __name__ == "__main__":
    training.main(run, keeps)
