# SPDX-License-Identifier: Apache-2.0
"""Markdown and plots from a finished record."""
