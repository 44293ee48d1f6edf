# SPDX-License-Identifier: Apache-2.0
"""Measurements: the recorded order of accesses, and the properties and speed of the machine and its storage."""
