# SPDX-License-Identifier: Apache-2.0
"""``hugging_face_program.py`` with weights, gradients and optimizer state in device memory, where users of a GPU have
them; without one ordinary memory stands in for it, as in ``gpu_memory_cases.py`` and ``inference_cases.py``."""

from __future__ import annotations

from typing import Any

import gpu_memory_cases
import hugging_face_cases
import hugging_face_program
import inference_cases
import torch
import training
from deepspeed.accelerator import get_accelerator

import tencache_ds
from tencache_ds.integration import stage3_building
from tencache_ds.placement import step_observer


class Case(hugging_face_cases.Case):
    def check_engine(self, engine: Any) -> None:
        """The engine is the one that the config asks for. What of models is in device memory is noted: the most."""
        assert (getattr(engine.optimizer, "tencache", None) is not None) == (self.engine == "tencache")
        if self.engine == "tencache":
            suspended = getattr(engine.optimizer, "_suspended", None)
            now = {
                "gpu_weight_nbytes": tencache_ds.stats(engine).gpu_weight_nbytes,
                "modules_without_hooks": 0 if suspended is None else len(suspended.modules),
            }
            facts = self.seen["facts"]
            facts |= {key: max(value, facts.get(key, 0)) for key, value in now.items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    hugging_face_cases.Case = Case
    step_observer.MOST_STEPS = 1
    if get_accelerator().is_synchronized_device():
        gpu_memory_cases.use_ordinary_memory()
        stage3_building.open_memory = inference_cases.open_memory
    training.main(hugging_face_program.run, hugging_face_program.keeps)
