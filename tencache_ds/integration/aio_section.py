# SPDX-License-Identifier: Apache-2.0
"""The ``aio`` section of a DeepSpeed config, for what looks at it without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.swap_tensor.aio_config import get_aio_config


def read_aio_section(config: Mapping[str, Any]) -> dict[str, bool | int]:
    """The section as DeepSpeed understands it, with its defaults for what is not set. Any thread.

    Args:
        config: a whole DeepSpeed config; an empty one gives the defaults. Sizes are in bytes.
    """
    return dict(get_aio_config(dict(config)))
