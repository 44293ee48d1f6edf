# SPDX-License-Identifier: Apache-2.0
"""Tensors that a forward pass saves for backward, moved to host memory and NVMe until they are needed."""
