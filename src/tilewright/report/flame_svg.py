"""A flame graph as an SVG file without scripts; the title of each frame has its figures."""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

from tilewright.records.atomic_file import write_document
from tilewright.report.flame import TITLES, Node, flames, in_order
from tilewright.report.kinds import kind_of
from tilewright.report.quantity import duration
from tilewright.trace.flame import Flame

_WIDTH, _ROW, _TOP, _LETTER = 1400, 17, 46, 6.7
_NARROWEST = 0.4
_MOST_NODES = 20_000
# Characters that XML 1.0 excludes, even escaped.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLOURS = {
    "compute": "#9fbde2", "pointwise": "#9ed3bf", "reduction": "#eac696", "layout": "#d2d5d8", "random": "#cab3e2",
    "library": "#93d0d8", "launch": "#9fcdd7", "wait": "#e0a29d", "range": "#b3cae1", "python": "#e2e4e6",
}  # fmt: skip


def write_flame(run: Path, out: Path) -> Path:
    """The flame graph by device time if the run has one, else by host time; returns `out`.

    Raises:
        StoreError: the run is missing, damaged or without a timeline, or `out` cannot be written.
    """
    return write_document(out, flame_svg(flames(run)[-1]), "flame graph")


def flame_svg(tree: Flame) -> str:
    """`tree` from the root down, a row per depth; frames too narrow to see are omitted and counted."""
    scale = _WIDTH / max(int(tree.total[0]), 1)
    placed = [node for node in in_order(tree, _MOST_NODES) if node.total * scale >= _NARROWEST]
    height = _TOP + _ROW * (1 + max(node.depth for node in placed)) + 8
    boxes = "\n".join(_box(tree, node, scale) for node in placed)
    steps = f" over {tree.steps} steps" if tree.steps else ""
    hidden = tree.parent.size - len(placed)
    left_out = f"; {hidden:,} narrower frames are not drawn" if hidden else ""
    title = f"{TITLES[tree.weight]}: {duration(int(tree.total[0]) / 1000)}{steps}{left_out}"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">
<style>
text {{ font: 11px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; fill: #1c2024 }}
.title {{ font: 15px Charter, Georgia, serif }}
rect {{ stroke: #fff; stroke-width: .6 }}
rect:hover {{ stroke: #1c2024; stroke-width: 1 }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
<text class="title" x="8" y="26">{escape(title)}</text>
{boxes}
</svg>
"""


def _box(tree: Flame, node: Node, scale: float) -> str:
    name = _NO_XML.sub("\ufffd", tree.names[node.frame])
    x, width, y = node.start * scale, node.total * scale, _TOP + node.depth * _ROW
    share = 100 * node.total / max(int(tree.total[0]), 1)
    title = f"{name}\n{duration(node.total / 1000)}, {share:.2f} %; own {duration(node.own / 1000)}; {node.calls} calls"
    letters = int((width - 6) / _LETTER)
    label = "" if letters < 3 else name if len(name) <= letters else name[: letters - 1] + "…"
    text = f'<text x="{x + 3:.2f}" y="{y + 12}">{escape(label)}</text>' if label else ""
    fill = _COLOURS[kind_of(name, tree.categories[node.frame])]
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" '
        f'fill="{fill}"/>{text}</g>'
    )
