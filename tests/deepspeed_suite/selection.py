# SPDX-License-Identifier: Apache-2.0
"""Which of DeepSpeed's tests are tried: files below ``tests/unit`` in which ZeRO-3 runs without a GPU.

Within them the tests choose themselves: a mode runs what stock passes and what has a config that the mode changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SELECTED = (
    "v1/zero/test_*.py",
    "runtime/zero/test_*.py",
    # Saving, loading, reshaping, universal checkpoints.
    "checkpoint/test_zero_optimizer.py",
    "checkpoint/test_universal_checkpoint.py",
    "checkpoint/test_lr_scheduler.py",
    "checkpoint/test_convert_checkpoint.py",
    # Overflow, dtypes, several models, initialize() itself.
    "runtime/half_precision/test_fp16.py",
    "runtime/half_precision/test_zero_optim_overflow.py",
    "v1/half_precision/test_*.py",
    "runtime/test_multiple_models.py",
    "runtime/test_ds_initialize.py",
    "runtime/test_no_sync_ctxt.py",
    "ops/muon/test_muon.py",
    "v1/pin_memory/test_destroy_unpin.py",
    "ulysses_alst/test_tiled_compute.py",
)

LEFT_OUT = (
    # Stages 1 and 2 only.
    "runtime/zero/test_ignore_unused_parameters.py",
    "v1/zero/test_overlap_comm_record_stream.py",
    "v1/zero/test_stage2_flatten_on_gpu.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    # No engine at all.
    "runtime/zero/test_zero_tiled.py",
    "v1/zero/test_zero_init_pg_contradiction.py",
)

MARKERS = (
    "not nightly and not inference and not seq_inference and not inference_ops and not inference_v2"
    " and not inference_v2_ops and not stable_diffusion and not evaluation"
)
"""DeepSpeed's own choice, with ``sequential`` tests: those of NVMe carry that mark."""

STAGE_PARAMETERS = ("zero_stage", "stage")
"""Parameters by which a test names the stage that it is about."""


def is_about_another_stage(parameters: Mapping[str, object]) -> bool:
    """Whether a test's parameters say that it is not about ZeRO-3."""
    stages = [parameters[name] for name in STAGE_PARAMETERS if isinstance(parameters.get(name), int)]
    return bool(stages) and 3 not in stages


def selected_files(tests: Path) -> list[str]:
    """The selected files, relative to the ``tests`` folder of a checkout.

    Raises:
        FileNotFoundError: a pattern finds nothing: the checkout is of another version, or none.
    """
    selected: dict[str, None] = {}
    for pattern in SELECTED:
        matches = sorted((tests / "unit").glob(pattern))
        if not matches:
            raise FileNotFoundError(f"{tests / 'unit' / pattern} finds no file of DeepSpeed's tests")
        selected |= dict.fromkeys(str(path.relative_to(tests)) for path in matches)
    return [file for file in selected if file.removeprefix("unit/") not in LEFT_OUT]
