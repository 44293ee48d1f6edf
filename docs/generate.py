# SPDX-License-Identifier: Apache-2.0
"""Writes the options into docs/configuration.md, from the docstrings of tencache_ds/config.py.

    python docs/generate.py            # after a change to an option
    python docs/generate.py --check    # exit status 1 if the page is out of date

The text is kept in the page, and not only in the built site, for those who read the sources.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from enum import Enum
from pathlib import Path

from tencache_ds import config

PAGE = Path(__file__).parent / "configuration.md"
BEGIN = "<!-- options: written by docs/generate.py from tencache_ds/config.py -->\n"
END = "<!-- end of options -->\n"


def docstrings(of: type) -> dict[str, str]:
    """The docstring under each attribute of a class, by name."""
    (tree,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        text = following.value if isinstance(following, ast.Expr) else None
        if isinstance(target, ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            texts[target.id] = inspect.cleandoc(text.value).replace("``", "`")
    return texts


def shown(default: object) -> str:
    """A default as it would be written in the config."""
    if default is None:
        return "automatic"
    if isinstance(default, int) and default and default % 2**20 == 0:
        default = f"{default // 2**20}MiB"
    return f"`{json.dumps(default)}`"


def options() -> str:
    """The reference of all options, in Markdown: a section for each, and a list of its values where they have names.

    Raises:
        KeyError: an option or a named value has no docstring.
    """
    texts, parts = docstrings(config.TenCacheConfig), []
    for name, field in config.TenCacheConfig.model_fields.items():
        default = field.get_default(call_default_factory=True)
        parts.append(f"### `{name}`\n\n**Default: {shown(default)}.**\n\n{texts[name]}\n")
        if isinstance(default, Enum):
            values = docstrings(type(default))
            items = [f"- `{json.dumps(value)}`: {values[value.name]}" for value in type(default)]
            parts.append("\n".join(item.replace("\n", "\n  ") for item in items) + "\n")
    return "\n".join(parts)


def generated(page: str) -> str:
    """The page with its options as they are in the code."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{options()}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the options into docs/configuration.md.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if the page is out of date")
    check = parser.parse_args().check
    page = PAGE.read_text()
    wanted = generated(page)
    if wanted == page:
        return 0
    if check:
        print(f"{PAGE} is out of date: run python docs/generate.py", file=sys.stderr)
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
