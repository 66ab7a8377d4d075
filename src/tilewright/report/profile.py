"""A profile in the terminal: the recordings, the operator table, and findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.measure.recording.recorder import Recording
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration
from tilewright.report.tables import open_table
from tilewright.trace.operators.operator_findings import findings, short_name
from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime

_ROWS = 25


def show_profile(table: OperatorTable, recordings: Sequence[Recording]) -> RenderableType:
    """The recordings, tables of operators, ranges and one-off entries, and findings in sentences."""
    regular = [row for row in table.rows if not row.one_off and row.kind != "range"]
    ranges = [row for row in table.rows if row.kind == "range"]
    once = [row for row in table.rows if row.one_off]
    parts: list[RenderableType] = [Text(line) for line in recorded_words(recordings)]
    parts += [Text(line, "yellow") for line in loss_words(table)]
    where = ", in one step that was recorded in every detail" if table.described else ""
    parts += [Text(f"\noperators{where}", style="bold"), _operators(table, regular)]
    if len(regular) > _ROWS:
        parts.append(Text(f"and {len(regular) - _ROWS} more in table operator_time", "dim"))
    if ranges:
        parts += [Text("\nranges", style="bold"), _operators(table, ranges)]
    if once:
        parts += [Text("\nonce, not in every step", style="bold"), _operators(table, once)]
    parts.append(Text())
    parts += [Text(f"- {plain(sentence)}") for sentence in findings(table)]
    return Group(*parts)


def profile_json(table: OperatorTable, recordings: Sequence[Recording], run: str) -> str:
    """The same as JSON; times are nanoseconds unless the name has another unit."""
    document = {
        "run": run,
        "recordings": [json.loads(recording.as_json()) for recording in recordings],
        "operators": [asdict(row) for row in table.rows],
        "cpu_ns": table.cpu_ns,
        "device_ns": table.device_ns,
        "steps": table.steps,
        "steps_ns": table.steps_ns,
        "timed_steps": table.timed_steps,
        "timed_ns": table.timed_ns,
        "timed_device_ns": table.timed_device_ns,
        "losses": [{"what": what, "found": found, "of": of} for what, found, of in table.losses],
        "words": findings(table),
    }
    return json.dumps(document, indent=1)


def recorded_words(recordings: Sequence[Recording]) -> list[str]:
    """What was recorded, what was omitted and why, and the overhead of recording; one line per process."""
    lines = []
    for number, recording in enumerate(recordings):
        process = f"process {number}: " if len(recordings) > 1 else ""
        lines.append(process + _sample(recording) + _overhead(recording))
    return lines


def loss_words(table: OperatorTable) -> list[str]:
    """A line for each kind of event that is missing from the trace."""
    return [f"lost: {found:,} {what}, of {of:,}" for what, found, of in table.losses]


def _sample(recording: Recording) -> str:
    asked, kept, limit = recording.plan.active, recording.steps_kept, recording.plan.events
    held = f"{recording.events:,} events"
    if recording.gave_way:
        return f"recorded {kept:,} whole steps, {held}, until the program started a profiler of its own"
    if recording.cut and not recording.step_events:
        return (
            f"recorded the first {recording.seconds_kept:.3g} of {recording.seconds:.3g} s: {held}, "
            f"where the limit of {limit:,} stopped it (--events raises it)"
        )
    if recording.cut:
        return (
            f"recorded the first {recording.seconds_kept:.3g} s of one step of {asked} asked for: {held}; "
            f"a step makes about {recording.step_events:,}, and the limit is {limit:,} (--events raises it)"
        )
    if recording.plan.whole:
        steps = f"{kept:,} steps in " if kept else ""
        return f"recorded all of it: {steps}{recording.seconds_kept:.3g} s, {held}"
    if kept < asked and recording.step_events * (kept + 1) > limit:
        return (
            f"recorded {kept:,} of {asked:,} steps: {held}; a step makes about {recording.step_events:,}, "
            f"and the limit is {limit:,} (--events raises it)"
        )
    ended = "" if kept >= asked else f" of {asked:,}, then the program ended"
    light = ", without operators: those are of one more step, recorded in every detail" if recording.description else ""
    return f"recorded {kept:,} step{'' if kept == 1 else 's'}{ended}: {held}{light}"


def _overhead(recording: Recording) -> str:
    if recording.bare_us is None or recording.recorded_us is None:
        return ""
    more = 100 * (recording.recorded_us / recording.bare_us - 1)
    return (
        f"; a step takes {duration(recording.bare_us)} bare and {duration(recording.recorded_us)} while recorded "
        f"({more:+.0f} %)"
    )


def _operators(table: OperatorTable, rows: Sequence[OperatorTime]) -> Table:
    sources = any(row.source for row in rows)
    columns = ["operator", "calls>", "host self>", f"of {table.cpu_ns / 1e6:,.1f} ms>", "host total>", "average>"]
    if table.on_device:
        columns += ["device self>", f"of {table.device_ns / 1e6:,.1f} ms>", "device total>", "average>"]
    shown = open_table(*columns, *([f"{'launched' if table.on_device else 'called'} at"] if sources else []))
    # Names are shortened before figures are.
    for column, least, most in ((shown.columns[0], 20, 48), (shown.columns[-1], 14, 40)):
        if column.justify != "right":
            column.no_wrap, column.min_width, column.max_width = True, least, most
    for row in rows[:_ROWS]:
        cells = [
            plain(short_name(row.name)),
            f"{row.calls:,}",
            *_times(row.cpu_self, row.cpu_total, row.calls, table.cpu_ns),
        ]
        if table.on_device:
            cells += _times(row.device_self, row.device_total, row.calls, table.device_ns)
        shown.add_row(*cells, *([plain(row.source or "")] if sources else []))
    return shown


def _times(own: int, total: int, calls: int, whole: int) -> list[str]:
    if not total:
        return ["-", "", "-", "-"]
    share = f"{100 * own / whole:.1f} %" if whole else "-"
    return [duration(own / 1e3), share, duration(total / 1e3), duration(total / calls / 1e3)]
