# SPDX-License-Identifier: Apache-2.0
"""The process that trains and measures itself: one per rank and run, started by the ``deepspeed`` launcher."""
