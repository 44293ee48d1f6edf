# SPDX-License-Identifier: Apache-2.0
"""Messages shown to the user once, independent of DeepSpeed's log level, which hides INFO by default."""

from __future__ import annotations

import logging

from deepspeed import comm as dist
from deepspeed.utils import logger as deepspeed_logger


def announce(message: str) -> None:
    """Says it on rank 0."""
    if dist.get_rank() == 0:
        (deepspeed_logger.info if deepspeed_logger.isEnabledFor(logging.INFO) else print)(message)
