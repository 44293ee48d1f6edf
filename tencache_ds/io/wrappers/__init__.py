# SPDX-License-Identifier: Apache-2.0
"""Backends around backends: each says what it changes, the rest passes through."""
