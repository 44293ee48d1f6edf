# SPDX-License-Identifier: Apache-2.0
"""Backends that wrap other backends: each overrides what it changes, the rest passes through."""
