# SPDX-License-Identifier: Apache-2.0
"""Counters, spans, per-step records and traces, and the channel on which others ask for them. Nothing here moves a
weight or decides anything.
"""
