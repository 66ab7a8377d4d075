"""Predicted steps beside the measured one, and the critical path, for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration
from tilewright.report.tables import open_table
from tilewright.trace.whatif.answer import Answer

_ROWS = 12


def show_whatif(answer: Answer, *, path: bool = True) -> RenderableType:
    """The predictions, the largest gain first, then what the critical path consists of."""
    table = open_table("if", "step>", "predicted>", "gain>", "which means")
    for each in answer.predictions:
        table.add_row(
            Text(plain(each.change)),
            duration(each.measured_us),
            duration(each.predicted_us),
            f"{each.gain:+.1%}",
            each.what,
        )
    if not path:
        return table
    parts = open_table("critical path", "what", "in a step>", "share>")
    for part in answer.path[:_ROWS]:
        parts.add_row(part.kind, Text(plain(part.name)), duration(part.us_per_step), f"{part.share:.1%}")
    return Group(table, Text(), parts)
