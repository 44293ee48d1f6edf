# SPDX-License-Identifier: Apache-2.0
"""Writes docs/images/architecture.svg, the figure in how_it_works.md: ``python docs/architecture_figure.py``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FIGURE = Path(__file__).parent / "images" / "architecture.svg"
WIDTH, HEIGHT = 860, 562
STYLE = (
    "text{font-family:sans-serif;font-size:13px;fill:#1f2933;text-anchor:middle}.small{font-size:11px;fill:#52606d}"
    ".title{font-weight:bold}.arrow{stroke:#52606d;stroke-width:1.5;fill:none;marker-end:url(#head)}"
    ".both{marker-start:url(#head)}"
)


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and lines of small text; lengths in pixels."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = "#ffffff"

    def svg(self) -> str:
        middle = self.x + self.width / 2
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" fill="{self.fill}" '
            'stroke="#7b8794"/>',
            f'<text class="title" x="{middle:g}" y="{self.y + 21}">{escape(self.title)}</text>',
        ]
        for number, line in enumerate(self.lines):
            parts.append(f'<text class="small" x="{middle:g}" y="{self.y + 39 + 15 * number}">{escape(line)}</text>')
        return "\n".join(parts)


DEEPSPEED, POLICY, MECHANISM, PLACE = "#e6f0fa", "#fdf3d8", "#e7f5e9", "#f0e9f7"
BOXES = (
    Box(20, 20, 820, 52, "DeepSpeed ZeRO-3, unmodified", ("engine, coordinator, optimizer, checkpoints",), DEEPSPEED),
    Box(20, 102, 540, 52, "integration", ("plugs into DeepSpeed; adapters for its versions",), DEEPSPEED),
    Box(590, 102, 250, 52, "host_path", ("DeepSpeed's Python, made faster",), DEEPSPEED),
    Box(20, 184, 190, 84, "profiling", ("recorded order of accesses", "step profile", "hardware probe"), POLICY),
    Box(20, 298, 190, 130, "planning", (
        "pure functions:", "chunks, size classes", "budgets, placement", "look-ahead", "shares of NVMe paths",
        "bound and forecast",
    ), POLICY),
    Box(20, 458, 190, 84, "observability", ("counters, step records", "spans, traces", "log, monitor, watch"), POLICY),
    Box(250, 184, 310, 52, "runtime", ("builds the components of a model and an engine",), MECHANISM),
    Box(590, 184, 250, 52, "placement", ("what lives where while a model runs",), MECHANISM),
    Box(250, 266, 590, 84, "tiers", (
        "weights: read ahead, gathered, written back", "gradients: accumulated next to the state they update",
        "optimizer state: a stream of chunks through the update kernels",
    ), MECHANISM),
    Box(250, 380, 280, 52, "memory", ("arenas, size-class pools, leases",), MECHANISM),
    Box(560, 380, 280, 52, "io", ("extent store, lanes, fingerprints",), MECHANISM),
    Box(250, 490, 130, 52, "GPU memory", ("left free by training",), PLACE),
    Box(400, 490, 130, 52, "RAM", ("host_memory",), PLACE),
    Box(560, 490, 280, 52, "NVMe", ("nvme_path, nvme_paths",), PLACE),
)  # fmt: skip
ARROWS = (
    ("arrow both", "M290 72V102"),
    ("arrow both", "M715 72V102"),
    ("arrow", "M560 128H590"),
    ("arrow both", "M545 154V184"),
    ("arrow", "M115 154V184"),
    ("arrow", "M115 268V298"),
    ("arrow", "M210 330H230V308H250"),
    ("arrow both", "M545 236V266"),
    ("arrow", "M560 210H590"),
    ("arrow both", "M715 236V266"),
    ("arrow both", "M390 350V380"),
    ("arrow both", "M700 350V380"),
    ("arrow both", "M530 406H560"),
    ("arrow", "M250 340H238V500H210"),
    ("arrow both", "M315 432V490"),
    ("arrow both", "M465 432V490"),
    ("arrow both", "M700 432V490"),
)
LABELS = ((190, 172, "accesses of a step"), (168, 287, "recorded step"), (160, 448, "counts, spans"))


def svg() -> str:
    """The figure."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>DeepSpeed calls the integration, which uses the host path; profiling feeds planning; planning gives a "
        "placement to the tiers, which move data between GPU memory, RAM and NVMe through memory and io; observability "
        "gets counts and spans.</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#52606d"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *(f'<path class="{kind}" d="{path}"/>' for kind, path in ARROWS),
        *(box.svg() for box in BOXES),
        *(f'<text class="small" x="{x}" y="{y}">{escape(text)}</text>' for x, y, text in LABELS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(svg())
