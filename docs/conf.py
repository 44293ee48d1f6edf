# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: ``sphinx-build -W --keep-going docs build/docs``, needing ``pip install '.[docs]'``.

Needs no network. ``sphinx-build -b linkcheck docs build/linkcheck`` also asks the servers of external links.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))

from tencache_ds import __version__  # noqa: E402

project = "TenCache for DeepSpeed"
author = "the TenCache authors"
copyright = author
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "command_line",
    "repository_links",
]
exclude_patterns = ["extensions"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path: list[str] = []
html_show_copyright = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
suppress_warnings = [
    "misc.highlighting_failure",  # "…" in JSON that shows only a part
    "toc.empty_glob",
]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_use_ivar = True
copybutton_exclude = ".linenos, .gp"
