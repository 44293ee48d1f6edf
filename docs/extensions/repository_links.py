# SPDX-License-Identifier: Apache-2.0
"""Links to files of the repository outside docs/, which the site does not have: they are checked and shown as paths.

The pages are read in the repository too, where these links work.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[([^\]]*)\]\(((?!https?:|#|mailto:)[^)\s#]+)(#[^)\s]*)?\)")
WHOLE_FILES = {"contributing": ROOT / "CONTRIBUTING.md", "changelog": ROOT / "CHANGELOG.md"}
"""Pages that are a file of the repository; their own source is only a pointer to it."""


def replace_links(app: Sphinx, document: str, content: list[str]) -> None:
    """Replaces links that leave docs/ by the path of the file; one that leads nowhere is a warning."""
    source = app.env.doc2path(document)
    if document in WHOLE_FILES:
        source = WHOLE_FILES[document]
        app.env.note_dependency(str(source), docname=document)
        content[0] = source.read_text()

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        path = (Path(source).parent / target).resolve()
        if not path.exists():
            logger.warning("link to %s, which does not exist", target, location=document)
        if path.is_relative_to(app.srcdir) and path.is_file():
            page = Path(os.path.relpath(path, Path(app.srcdir, document).parent)).as_posix()
            return f"[{text}]({page}{anchor or ''})"
        shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        return f"`{shown}`" if text.strip("`") == shown else f"{text} (`{shown}`)"

    content[0] = LINK.sub(replace, content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", replace_links)
    return {"parallel_read_safe": True}
