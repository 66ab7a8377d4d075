"""Results as HTML, for notebooks: the tables and lines that a terminal shows, without control characters or scripts."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.protocol import rich_cast
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.report.rows import TableOrList
from tilewright.report.tables import FittedTable

_CSS = (
    ".tilewright{overflow-x:auto}.tilewright div{white-space:pre-wrap;margin:.2em 0}"
    ".tilewright table{border-collapse:collapse;margin:.2em 0 .8em}"
    ".tilewright th,.tilewright td{padding:.15em .6em;text-align:left;vertical-align:top;white-space:pre-line}"
    ".tilewright .r{text-align:right;white-space:pre}"
    ".tilewright caption{text-align:left;font-weight:600;white-space:nowrap}"
)
_CONSOLE = Console(file=io.StringIO(), force_jupyter=False, force_terminal=False, color_system="truecolor", width=160)
"""Reads the markup and the styles of cells; nothing is printed on it."""


def as_html(view: Any, page: Path | None = None) -> str:
    """`view`, whatever rich can print, as one element; below it a link to its `page`."""
    link = "" if page is None else f'<div>page <a href="{page.absolute().as_uri()}">{_escaped(str(page))}</a></div>'
    return f'<div class="tilewright"><style>{_CSS}</style>{_block(view)}{link}</div>'


def framed(page: Path) -> str:
    """The page in a frame, which cannot reach the notebook; the notebook then holds a copy of the page."""
    content = html.escape(page.read_text(encoding="utf-8"))
    return f'<iframe sandbox="allow-scripts" style="width:100%;height:40em;border:0" srcdoc="{content}"></iframe>'


def _block(view: Any) -> str:
    view = rich_cast(view)
    match view:
        case Group():
            return "".join(map(_block, view.renderables))
        case FittedTable():
            return _table(view.whole())
        case TableOrList():
            return _table(view.table)
        case Table():
            return _table(view)
        case str() | Text():
            text = _inline(view).strip("\n")
            return f"<div>{text}</div>" if text else ""
    with _CONSOLE.capture() as captured:
        _CONSOLE.print(view, no_wrap=True)
    return f"<pre>{_escaped(Text.from_ansi(captured.get()).plain)}</pre>"


def _table(table: Table) -> str:
    sides = [' class="r"' if column.justify == "right" else "" for column in table.columns]
    head = "".join(f"<th{side}>{_inline(it.header)}</th>" for it, side in zip(table.columns, sides, strict=True))
    columns = [list(column.cells) for column in table.columns]
    rows = []
    for row, cells in zip(table.rows, zip(*columns, strict=True), strict=False):
        style = _css(_CONSOLE.get_style(row.style or ""))
        made = "".join(f"<td{side}>{_inline(cell)}</td>" for side, cell in zip(sides, cells, strict=True))
        rows.append(f"<tr{style}>{made}</tr>")
    title = f"<caption>{_inline(table.title)}</caption>" if table.title else ""
    header = f"<thead><tr>{head}</tr></thead>" if table.show_header else ""
    return f"<table>{title}{header}<tbody>{''.join(rows)}</tbody></table>"


def _inline(cell: Any) -> str:
    """Text with its styles; a table or another block within a cell as such."""
    if isinstance(cell, str):
        cell = _CONSOLE.render_str(cell, highlight=False)
    if not isinstance(cell, Text):
        return _block(cell)
    if not cell.spans:
        css, text = _css(_CONSOLE.get_style(cell.style)), _escaped(cell.plain)
        return f"<span{css}>{text}</span>" if css else text
    made = []
    for segment in cell.render(_CONSOLE):
        css, text = _css(segment.style), _escaped(segment.text)
        made.append(f"<span{css}>{text}</span>" if css else text)
    return "".join(made)


def _css(style: Style | None) -> str:
    """A `style` attribute, or nothing. A notebook's ground may be dark, so what is dim is translucent, not grey."""
    if style is None:
        return ""
    rules = ["font-weight:600"] * bool(style.bold) + ["font-style:italic"] * bool(style.italic)
    rules += ["opacity:.65"] * bool(style.dim)
    if style.color is not None and not style.color.is_default:
        rules.append(f"color:{style.color.get_truecolor().hex}")
    return f' style="{";".join(rules)}"' if rules else ""


def _escaped(text: str) -> str:
    return html.escape("\n".join(map(plain, text.split("\n"))))
