# SPDX-License-Identifier: Apache-2.0
"""Whether what is read is what was last written."""
