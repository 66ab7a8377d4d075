"""The terminal view of a timeline: a step's time by class, waits of the host, and possible gains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.report.launch_rows import place, plain
from tilewright.report.quantity import duration
from tilewright.report.tables import open_table
from tilewright.store.query import reading

_STYLE = {
    "kernel": "green",
    "wave tail": "yellow",
    "communication": "cyan",
    "copy": "blue",
    "synchronisation": "red",
    "launch-bound": "magenta",
    "idle": "bright_black",
}
_BAR = 40
_ROWS = 10
_LEAST_MS = 0.001

QUERIES: Mapping[str, str] = {
    "step": """\
SELECT process.name AS device, coalesce(trace_file.rank, step_account.file_id) AS rank, class, ms_per_step,
       percent, steps
FROM step_account JOIN process USING (upid) JOIN trace_file ON trace_file.id = step_account.file_id
ORDER BY rank, device, ms_per_step DESC""",
    "queue": """\
WITH held AS (
    SELECT upid, depth, lead(ts) OVER (PARTITION BY upid ORDER BY ts) - ts AS dur FROM queue_depth
),
ahead AS (SELECT upid, median(lag_ns) / 1e3 AS lag_us FROM launch_lag GROUP BY upid)
SELECT process.name AS device, coalesce(trace_file.rank, process.file_id) AS rank, any_value(lag_us) AS lag_us,
       sum(depth * dur)::DOUBLE / nullif(sum(dur), 0) AS mean_depth, max(depth) AS most
FROM held JOIN ahead USING (upid) JOIN process USING (upid) JOIN trace_file ON trace_file.id = process.file_id
GROUP BY process.name, trace_file.rank, process.file_id""",
    "start": """\
SELECT process.name AS device, coalesce(trace_file.rank, process.file_id) AS rank, call.name AS call,
       device_time.dur / 1e6 AS ms
FROM device_time JOIN device_call AS call ON call.slice_id = device_time.cause
JOIN process USING (upid) JOIN trace_file ON trace_file.id = process.file_id
WHERE class = 'idle' AND device_time.dur > 1_000_000""",
    "synchronisation": """\
SELECT rank, source, source_function, exact, what, calls, waited_ms_per_step, lost_ms_per_step, spent_ms_per_step
FROM synchronisation LEFT JOIN file_rank USING (file_id) ORDER BY lost_ms_per_step DESC, waited_ms_per_step DESC""",
    "win": """\
SELECT rank, how, operator, source, calls, ms_per_step, why FROM what_you_would_win LEFT JOIN file_rank USING (file_id)
ORDER BY ms_per_step DESC, how, operator, source""",
    "bare": """\
SELECT rank, recorded_ms, bare_ms FROM bare_step LEFT JOIN file_rank USING (file_id)
WHERE bare_ms < recorded_ms ORDER BY rank""",
    "attribution": """\
SELECT what, avg(percent) AS percent, (SELECT count(shapes) FROM operator_distance) AS with_shapes
FROM attribution GROUP BY what ORDER BY percent DESC, what""",
    "communication": "FROM communication",
    "straggler": "FROM straggler",
}
"""The queries of the view; `--json` prints their rows."""


def accounting_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each of `QUERIES`; none if the run has no analysed timeline.

    Raises:
        StoreError: the run is missing or damaged.
    """
    with reading(run) as connection:
        views = {name for (name,) in connection.execute("SELECT view_name FROM duckdb_views()").fetchall()}
        found: dict[str, list[dict[str, Any]]] = {}
        for name, sql in QUERIES.items():
            if not {"step_account", "file_rank"} <= views:
                found[name] = []
                continue
            cursor = connection.execute(sql)
            columns = [str(column[0]) for column in cursor.description or ()]
            found[name] = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
    return found


def show_accounting(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> RenderableType:
    """The rows of `accounting_of` as tables; without a device only the possible gains."""
    if not any(found.values()):
        return Text("nothing in this trace to account for", "dim")
    parts: list[RenderableType] = []
    for rank, device in dict.fromkeys((row["rank"], row["device"]) for row in found["step"]):
        parts.append(_step([row for row in found["step"] if (row["rank"], row["device"]) == (rank, device)], found))
    if found["synchronisation"]:
        parts += [Text("\nwhat made the host wait, a step", "bold"), _waits(found["synchronisation"])]
    wins = [row for row in found["win"] if row["ms_per_step"] >= _LEAST_MS]
    if wins:
        parts += [Text(f"\nwhat you would win, a step{_of_step(found['bare'])}", "bold"), _wins(wins)]
    if found["communication"]:
        parts += [Text("\ncommunication", "bold"), _communication(found)]
    shares = ", ".join(f"{row['what']} {row['percent']:.1f} %" for row in found["attribution"])
    whose = "the device's time" if found["step"] else "the operators' own time"
    parts.append(Text(f"\nof {whose} is known: {shares}", "dim"))
    if found["attribution"] and not any(row["with_shapes"] for row in found["attribution"]):
        parts.append(
            Text("no operator has shapes, and so no cost: record_shapes=True of PyTorch's profiler adds them", "dim")
        )
    return Group(*parts)


def _step(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Sequence[Mapping[str, Any]]]) -> RenderableType:
    several = len({row["rank"] for row in found["step"]}) > 1
    total = sum(row["ms_per_step"] for row in rows)
    name = f"rank {rows[0]['rank']}, {rows[0]['device']}" if several else str(rows[0]["device"])
    table = open_table("", "class", "a step>", "share>")
    for row in rows:
        bar = _bar(row["percent"] / 100)
        style = _STYLE.get(row["class"], "")
        table.add_row(Text(f"{bar:{_BAR}}", style), row["class"], _ms(row["ms_per_step"]), f"{row['percent']:.1f} %")
    steps = f"{rows[0]['steps']} step{'s' if rows[0]['steps'] != 1 else ''}"
    parts: list[RenderableType] = [Text(f"\n{plain(name)}: {_ms(total)} a step, over {steps}", "bold"), table]
    for start in _of_device(found["start"], rows[0]):
        parts.append(
            Text(f"before its first work it waited {_ms(start['ms'])} for {plain(start['call'])} on the host", "dim")
        )
    queue = next(iter(_of_device(found["queue"], rows[0])), None)
    if queue is not None:
        held = "" if queue["mean_depth"] is None else f"; {queue['mean_depth']:.1f} launches queued on average"
        ahead = f"the host was {duration(queue['lag_us'])} ahead of a launch (median){held}, {queue['most']} at most"
        parts.append(Text(ahead, "dim"))
    return Group(*parts)


def _of_device(rows: Sequence[Mapping[str, Any]], device: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == device[key] for key in ("rank", "device"))]


def _bar(share: float) -> str:
    """A bar with a resolution of an eighth of a character, which is its minimum.

    >>> _bar(0.5) == 20 * "█", _bar(0.0001)
    (True, '▏')
    """
    eighths = max(math.floor(share * _BAR * 8 + 0.5), 1)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _waits(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    ranks = _ranks(rows)
    table = open_table(*ranks, "lost>", "waited>", "host in it>", "waits>", "call", "where")
    table.columns[-1].no_wrap = True
    for row in rows[:_ROWS]:
        where = str(row["source"] or "-")
        if row["source_function"] and not row["exact"]:
            # The profiler names a function by the line of its `def`.
            where += f" in {row['source_function']}"
        table.add_row(
            *(str(row["rank"]) for _ in ranks),
            _ms(row["lost_ms_per_step"]),
            _ms(row["waited_ms_per_step"]),
            _ms(row["spent_ms_per_step"]),
            str(row["calls"]),
            _text(row["what"]),
            _text(where),
        )
    return Group(table, _more(rows))


def _of_step(rows: Sequence[Mapping[str, Any]]) -> str:
    """The step without the profiler, of which the wins are shares, and what recording added to it."""
    if not rows:
        return ""
    longest = max(rows, key=lambda row: row["bare_ms"])
    bare, recorded = longest["bare_ms"], longest["recorded_ms"]
    return (
        f" of {_ms(bare)} without the profiler ({_ms(recorded)} while recorded, +{100 * (recorded / bare - 1):.0f} %)"
    )


def _wins(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    ranks = _ranks(rows)
    table = open_table(*ranks, "up to>", "how", "operator", "calls>", "why", "where")
    table.columns[-1].no_wrap = True
    for row in rows[:_ROWS]:
        table.add_row(
            *(str(row["rank"]) for _ in ranks),
            _ms(row["ms_per_step"]),
            row["how"],
            _text(str(row["operator"])[:60]),
            str(row["calls"]),
            _text(row["why"]),
            _text(place(str(row["source"] or "-"))),
        )
    return Group(table, _more(rows))


def _ranks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The column of ranks, if there are several."""
    return ["rank>"] if any(row["rank"] is not None for row in rows) else []


def _communication(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> RenderableType:
    table = open_table(
        *("rank", "device", "collectives>", "time>", "exposed>", "hidden>", "waited for others>", "others waited>"),
        "at work meanwhile>",
    )
    late = {row["rank"]: row for row in found["straggler"]}
    for row in found["communication"]:
        other = late.get(row["rank"])
        table.add_row(
            str(row["rank"]),
            _text(str(row["device"])),
            str(row["collectives"]),
            _ms(row["communication_ms"]),
            _ms(row["exposed_ms"]),
            f"{row['hidden_percent']:.0f} %",
            _ms(other["waited_ms"]) if other else "-",
            _ms(other["caused_ms"]) if other else "-",
            "-" if other is None or other["at_work_percent"] is None else f"{other['at_work_percent']:.0f} %",
        )
    return table


def _text(text: str) -> Text:
    """Untrusted text of a trace, without markup and control characters."""
    return Text(plain(text))


def _more(rows: Sequence[object]) -> Text:
    return Text(f"and {len(rows) - _ROWS} more" if len(rows) > _ROWS else "", "dim")


def _ms(value: float) -> str:
    return duration(value * 1e3)
