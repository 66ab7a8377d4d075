"""A profile in the terminal: the recordings, the operator table, and findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.measure.recording.line_tracer import MOST_LINES
from tilewright.measure.recording.plan import Recording
from tilewright.records.counted import counted
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration
from tilewright.report.queries import ask_view
from tilewright.report.rows import show_view
from tilewright.report.views import SHARES
from tilewright.store.query import reading
from tilewright.trace.operators.operator_findings import findings
from tilewright.trace.operators.operator_table import OperatorTable
from tilewright.trace.verdict.verdict import read_verdict

_ROWS, _MOST = 25, 100_000
_STEPS_NAMED = 5
_REGULAR, _RANGES, _ONCE = "kind <> 'range' AND happens <> 'once'", "kind = 'range'", "happens = 'once'"


def show_profile(run: Path, table: OperatorTable, recordings: Sequence[Recording]) -> RenderableType:
    """The recordings, tables of operators, ranges and one-off entries of the run, and findings in sentences.

    Raises:
        StoreError: the run is missing or damaged.
    """
    parts: list[RenderableType] = [Text(line) for line in recorded_words(recordings)]
    parts += [Text(line, "yellow") for line in loss_words(table)]
    where = ", in one step that was recorded in every detail" if table.described else ""
    parts += show_operators(run, _ROWS, where)
    return Group(*parts, Text(), *(Text(f"- {plain(sentence)}") for sentence in findings(table)))


def show_operators(run: Path, most: int, where: str = "") -> list[RenderableType]:
    """Tables of operators, ranges and one-off entries, those that exist, each of at most `most` rows.

    Raises:
        StoreError: the run is missing or damaged.
    """
    parts = []
    for title, chosen in ((f"Operators{where}", _REGULAR), ("Ranges", _RANGES), ("Once, not in every step", _ONCE)):
        view = SHARES._replace(title=title, sql=f"SELECT * EXCLUDE (happens) FROM ({SHARES.sql}) WHERE {chosen}")
        answer = ask_view(run, view, _MOST)
        if answer.rows:
            parts.append(show_view(view, answer, most))
    return parts


def profile_json(table: OperatorTable, recordings: Sequence[Recording], run: Path) -> str:
    """The same as JSON; times are nanoseconds unless the name has another unit."""
    with reading(run) as connection:
        verdict = read_verdict(connection)
        host, causes = (
            [
                dict(zip([str(column[0]) for column in found.description or ()], row, strict=True))
                for row in found.fetchall()
            ]
            for found in (connection.execute(f"FROM {name}") for name in ("host_account", "cause"))
        )
    document = {
        "verdict": verdict,
        "host": host,
        "causes": causes,
        "run": str(run),
        # The single steps are in the table `recording`: there may be thousands.
        "recordings": [
            {name: value for name, value in asdict(it).items() if not name.startswith("timed_")} for it in recordings
        ],
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
    return json.dumps(document, indent=1, default=str)


def recorded_words(recordings: Sequence[Recording]) -> list[str]:
    """What was recorded, what was omitted and why, and the overhead of recording; one line per process."""
    lines = []
    for number, recording in enumerate(recordings):
        process = f"process {number}: " if len(recordings) > 1 else ""
        lines.append(process + _sample(recording) + _overhead(recording))
        lines += [process + line for line in _notes(recording)]
    return lines


def loss_words(table: OperatorTable) -> list[str]:
    """A line for each kind of event that is missing from the trace."""
    return [f"lost: {found:,} {what}, of {of:,}" for what, found, of in table.losses]


def _sample(recording: Recording) -> str:
    asked, kept, limit = recording.plan.active, recording.steps_kept, recording.plan.events
    held = counted(recording.events, "event")
    if recording.gave_way:
        return f"recorded {counted(kept, 'whole step')}, {held}, until the program started a profiler of its own"
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
        steps = f"{counted(kept, 'step')} in " if kept else ""
        return f"recorded all of it: {steps}{recording.seconds_kept:.3g} s, {held}"
    if kept < asked and recording.step_events * (kept + 1) > limit:
        return (
            f"recorded {kept:,} of {counted(asked, 'step')}: {held}; a step makes about {recording.step_events:,}, "
            f"and the limit is {limit:,} (--events raises it)"
        )
    ended = "" if kept >= asked else f" of {asked:,}, then the program ended"
    light = ", without operators: those are of one more step, recorded in every detail" if recording.description else ""
    return f"recorded {counted(kept, 'step')}{ended}: {held}{light}"


def _notes(recording: Recording) -> Iterator[str]:
    """What its figures lack, one sentence each."""
    if recording.compiled_in:
        steps = ", ".join(map(str, recording.compiled_in[:_STEPS_NAMED]))
        more = ", ..." if len(recording.compiled_in) > _STEPS_NAMED else ""
        yield (
            f"PyTorch compiled for {recording.compiling_seconds:.3g} s in step{'s' * (len(recording.compiled_in) > 1)} "
            f"{steps}{more}: the range `compilation`, in which calls and operators are not recorded"
        )
    if recording.lines_ended_early:
        yield (
            f"source lines were traced up to the limit of {MOST_LINES:,} reached lines; what ran later has the line of "
            "its function's beginning"
        )
    if recording.failed:
        yield f"the recorder failed and kept what it had: {recording.failed}"


_NOISE = -10
"""Percent by which recorded steps may be faster than bare ones: recording makes no step faster."""


def _overhead(recording: Recording) -> str:
    if recording.bare_us is None or recording.recorded_us is None:
        return ""
    more = 100 * (recording.recorded_us / recording.bare_us - 1)
    return (
        f"; a step takes {duration(recording.bare_us)} without the profiler and {duration(recording.recorded_us)} "
        f"while recorded ({more:+.0f} %{': other programs slowed the bare steps' if more < _NOISE else ''})"
    )
