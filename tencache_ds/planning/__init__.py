# SPDX-License-Identifier: Apache-2.0
"""Pure functions from what was observed to what to do. No tensors, no I/O, no DeepSpeed."""
