# SPDX-License-Identifier: Apache-2.0
"""Names of the kinds of optimizer state that TenCache itself updates."""

MASTER, EXP_AVG, EXP_AVG_SQ = "master", "exp_avg", "exp_avg_sq"

REMAINDER = "remainder"
"""What a split master weight is beside its 16-bit weight: the lower half of their difference."""
