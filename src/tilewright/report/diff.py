"""The terminal view of two compared runs: verdicts, then the operators that changed."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration
from tilewright.report.tables import open_table
from tilewright.trace.compare.change import Change
from tilewright.trace.compare.diff import Difference, OperatorChange

_STYLE = {"slower": "bold red", "faster": "bold green", "the same": "bold", "cannot tell": "yellow"}
_OPERATORS_SHOWN = 12
_LEAST_SHOWN = 0.001
"""As a share of the step; operators that changed by less are omitted."""


def show_diff(found: Difference) -> RenderableType:
    """Step and device time with their verdicts, then the operators that changed most."""
    parts: list[RenderableType] = [_line("a step", found.before_us, found.after_us, found.step)]
    if found.device is not None:
        parts.append(_line("on the device", found.before_device_us, found.after_device_us, found.device))
    if found.decide:
        parts.append(Text(f"  {plain(found.decide)}", "dim"))
    called = [op for op in found.operators if op.called_differently]
    if called:
        are = "operators are" if len(called) > 1 else "operator is"
        parts.append(Text(f"  the sides do not run the same program: {len(called)} {are} called more or less often"))
    least = _LEAST_SHOWN * found.before_us
    changed = [op for op in found.operators if abs(op.difference_us) >= least or op.called_differently]
    if changed:
        parts += [Text("\nwhat changed, a step", "bold"), _operators(changed[:_OPERATORS_SHOWN], found)]
        if len(changed) > _OPERATORS_SHOWN:
            parts.append(Text(f"and {len(changed) - _OPERATORS_SHOWN} more", "dim"))
    elif found.operators:
        parts.append(Text("\nno operator changed by a thousandth of a step", "dim"))
    return Group(*parts)


def _line(what: str, before_us: float, after_us: float, change: Change) -> Text:
    text = Text(f"{what}: {duration(before_us)} → {duration(after_us)}")
    if math.isfinite(change.high):
        text.append(f", {_percent(change.ratio)} ({_percent(change.low)} to {_percent(change.high)})")
    text.append(": ").append(change.verdict, _STYLE[change.verdict])
    text.append(f"\n  {change.method}", "dim")
    if change.verdict == "cannot tell" and math.isfinite(change.high):
        text.append(f"; a change below {change.resolution:.1%} cannot be told from their noise", "dim")
    return text


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _operators(changed: list[OperatorChange], found: Difference) -> Table:
    shares = ["of device's>"] if found.device else []
    table = open_table("where", "operator", "before>", "after>", "difference>", *shares, "calls>", "verdict")
    table.columns[1].overflow = "fold"
    for op in changed:
        share = found.of_device(op)
        calls = f"{op.before_calls:.3g}"
        if op.before_calls != op.after_calls:
            calls += f" → {op.after_calls:.3g}"
        table.add_row(
            op.where,
            Text(plain(op.operator)),
            duration(op.before_us) if op.before_calls else "-",
            duration(op.after_us) if op.after_calls else "-",
            Text(f"{'+' if op.difference_us > 0 else '−'}{duration(abs(op.difference_us))}"),
            *(["-" if share is None else f"{share:.0%}"] if shares else []),
            calls,
            _verdict(op),
        )
    return table


def _verdict(op: OperatorChange) -> str:
    """Of an operator: slower, faster, the same, or nothing where its steps are too few to tell."""
    if op.called_differently:
        return "new" if not op.before_calls else "gone" if not op.after_calls else "other calls"
    return "" if op.change is None or op.change.verdict == "cannot tell" else op.change.verdict
