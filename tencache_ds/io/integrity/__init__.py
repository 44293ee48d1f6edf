# SPDX-License-Identifier: Apache-2.0
"""Integrity checks of data read back from storage."""
