# SPDX-License-Identifier: Apache-2.0
"""What a weight, a gradient and an optimizer chunk go through on their way between NVMe, host memory and the device."""
