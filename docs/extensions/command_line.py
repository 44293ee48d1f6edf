# SPDX-License-Identifier: Apache-2.0
"""The directive ``command-line``: every command of ``tencache`` with its options, from its argparse parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tencache_ds import cli


class CommandLine(SphinxDirective):
    """A section for each command: description, usage, and a definition list per group of options."""

    has_content = False

    def run(self) -> list[nodes.Node]:
        return [node for name, summary, parser in commands() for node in [section(self, name, summary, parser)]]


def commands() -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, summary and parser of each command, in the order of ``tencache --help``."""
    for action in cli.make_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, parser in action.choices.items():
                yield name, summaries[name], cli.bench.make_parser() if name == "bench" else parser


def section(directive: SphinxDirective, name: str, summary: str, parser: argparse.ArgumentParser) -> nodes.section:
    """The section of one command."""
    title = f"tencache {name}"
    result = nodes.section(ids=[nodes.make_id(title)], names=[title])
    result += nodes.title("", "", nodes.literal(text=title))
    description = parser.description or f"{summary[:1].upper()}{summary[1:]}."
    result += directive.parse_text_to_nodes(description % {"prog": parser.prog})
    formatter = argparse.HelpFormatter(parser.prog, width=100)
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups, prefix="")
    usage = formatter.format_help().strip()
    result += nodes.literal_block(usage, usage, language="text")
    for group in parser._action_groups:
        arguments = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        arguments = [action for action in arguments if not isinstance(action, argparse._HelpAction)]
        if not arguments:
            continue
        if group.title not in ("positional arguments", "options"):
            result += nodes.rubric(text=f"{group.title}"[:1].upper() + f"{group.title}"[1:])
        result += nodes.definition_list("", *(definition(directive, parser, action) for action in arguments))
    return result


def definition(
    directive: SphinxDirective, parser: argparse.ArgumentParser, action: argparse.Action
) -> nodes.definition_list_item:
    """An option or argument with its help, as argparse would expand it."""
    formatter = argparse.HelpFormatter(parser.prog)
    values = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    term = ", ".join(action.option_strings) or formatter._metavar_formatter(action, action.dest)(1)[0]
    if action.option_strings and values:
        term = f"{term} {values}"
    text = nodes.paragraph(text=formatter._expand_help(action) if action.help else "")
    return nodes.definition_list_item("", nodes.term("", "", nodes.literal(text=term)), nodes.definition("", text))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
