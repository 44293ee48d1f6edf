# SPDX-License-Identifier: Apache-2.0
"""Comparisons with stock ZeRO-Infinity: one run, one machine, alternating."""
