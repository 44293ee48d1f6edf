# SPDX-License-Identifier: Apache-2.0
"""Pure functions from observations to decisions. No tensors, no I/O, no DeepSpeed."""
