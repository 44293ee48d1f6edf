# SPDX-License-Identifier: Apache-2.0
"""The kinds of optimizer state that TenCache itself updates."""

from __future__ import annotations

import torch

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"

ADAM_IN_FP32 = dict.fromkeys((MASTER, EXP_AVG, EXP_AVG_SQ), torch.float32)
"""Dtypes of the state that can be split, and updated in files."""

REMAINDER = "remainder"
"""What a split master weight is beside its 16-bit weight: the lower half of their difference."""
