# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks``: see :mod:`.command`."""

from __future__ import annotations

import sys

from .command import main

sys.exit(main())
