# SPDX-License-Identifier: Apache-2.0
"""What was observed: the recorded order of accesses."""
