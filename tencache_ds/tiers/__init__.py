# SPDX-License-Identifier: Apache-2.0
"""The paths of weights, gradients and optimizer chunks between NVMe, host memory and the device."""
