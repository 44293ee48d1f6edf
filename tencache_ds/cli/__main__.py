# SPDX-License-Identifier: Apache-2.0
"""``python -m tencache_ds.cli``: the ``tencache`` command where scripts are not on PATH."""

import sys

from tencache_ds.cli import main

sys.exit(main())
