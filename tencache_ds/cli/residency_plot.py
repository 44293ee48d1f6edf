# SPDX-License-Identifier: Apache-2.0
"""``tencache plan --job --plot``: what a running job keeps where, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tencache_ds.cli.console import PLACES
from tencache_ds.plotting import BLUE, DPI, INK, ORANGE, VERMILION, bare, new_figure

GIB = 2**30
COLOURS = (BLUE, ORANGE, VERMILION)
"""Colours of :data:`PLACES`."""

KINDS = ("weights", "gradients", "optimizer state")

ROW_IN = 0.17
"""Height of a layer's bar, in inches."""

Residency = Mapping[str, Mapping[str, Sequence[int]]]
"""For each weight or layer, the bytes of each kind by place."""


def layer_of(name: str) -> str:
    """The layer that a weight belongs to: the part of its name up to the first number, or else its module."""
    parts = name.split(".")
    for position, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: position + 1])
    return ".".join(parts[:-1]) or name


def by_layer(ranks: Iterable[Residency]) -> dict[str, dict[str, list[int]]]:
    """The sums of all ranks' bytes for each layer, in the order of the model."""
    layers: dict[str, dict[str, list[int]]] = {}
    for rank in ranks:
        for name, kinds in rank.items():
            sums = layers.setdefault(layer_of(name), {kind: [0] * len(PLACES) for kind in KINDS})
            for kind in KINDS:
                sums[kind] = [total + nbytes for total, nbytes in zip(sums[kind], kinds[kind], strict=True)]
    return layers


def write_residency_plot(path: Path, title: str, layers: Residency) -> None:
    """Draws a bar for each layer and kind, divided by place; the first layer is on top.

    Args:
        path: the file; its suffix determines the format.
        title: of the figure.
        layers: of :func:`by_layer`.
    """
    height_in = 1.5 + ROW_IN * len(layers)
    figure = new_figure(9.6, height_in, title)
    rows = range(len(layers))
    for axes, kind in zip(figure.subplots(1, len(KINDS), sharey=True), KINDS, strict=True):
        left = [0.0] * len(layers)
        for place, (name, colour) in enumerate(zip(PLACES, COLOURS, strict=True)):
            widths = [kinds[kind][place] / GIB for kinds in layers.values()]
            axes.barh(rows, widths, left=left, color=colour, label=name, height=0.8)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_title(f"{kind}, {sum(left):.2f} GiB", fontsize=8.5, color=INK, loc="left")
        axes.set_xlim(0, 1.05 * max([*left, 1e-9]))
        axes.set_xlabel("GiB per layer")
        axes.set_yticks(rows, layers)
        axes.set_ylim(len(layers) - 0.4, -0.6)
        bare(axes)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, fontsize=8, ncols=len(PLACES), loc="outside lower center")
    figure.savefig(path, dpi=DPI)
