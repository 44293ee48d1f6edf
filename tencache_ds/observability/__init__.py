# SPDX-License-Identifier: Apache-2.0
"""Counters, spans and per-step records. Holds values only: nothing here moves a byte or decides anything."""
