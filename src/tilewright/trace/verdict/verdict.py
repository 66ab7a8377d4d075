"""Tables `cause` and `verdict`: what could make the steps slow, and the sentences on what does."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from typing import TYPE_CHECKING, TypeAlias

from tilewright.records.counted import counted
from tilewright.trace.events.rows import append
from tilewright.trace.price.distance import host_cores
from tilewright.trace.price.precision import tensor_core_times
from tilewright.trace.price.recorded_rows import rows_of
from tilewright.trace.verdict.candidate import Advice, Candidate, Step, at, share, spent
from tilewright.trace.verdict.growth import growth_sentences
from tilewright.trace.verdict.sentences import advice_on
from tilewright.trace.verdict.snapshot import snapshot_sentences

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_Found: TypeAlias = tuple[Candidate, Step, Advice]
STANDS_OUT = 0.1
"""Of the step: a smaller gain is no verdict."""
_LISTED = 0.01
_STOPPED = 0.3
_COMPUTING = 80.0

_TABLES = """
CREATE OR REPLACE TABLE cause (         -- what could make a step slow, the largest gain first
    file_id         BIGINT NOT NULL,
    kind            VARCHAR NOT NULL,
    what            VARCHAR NOT NULL,
    source          VARCHAR,
    calls           BIGINT NOT NULL,
    ms_per_step     DOUBLE NOT NULL,    -- of the bare step, as the next two
    percent         DOUBLE NOT NULL,
    win_ms_per_step DOUBLE NOT NULL,    -- what the action saves
    why             VARCHAR NOT NULL,
    action          VARCHAR NOT NULL
);
CREATE OR REPLACE TABLE verdict (       -- at most three sentences
    place           BIGINT NOT NULL,
    sentence        VARCHAR NOT NULL
)"""
_STEPS = r"""
WITH busy AS (
    SELECT file_id, max(ms) AS ms FROM (
        SELECT file_id, upid, sum(ms_per_step) AS ms FROM step_account
        WHERE class IN ('kernel', 'wave tail', 'communication', 'copy') GROUP BY file_id, upid
    ) GROUP BY file_id
)
SELECT host_step_time.file_id, bare_ms, coalesce(busy.ms, 0),
       EXISTS (FROM slice WHERE name LIKE 'enumerate(DataLoader)#\_MultiProcessing%' ESCAPE '\'),
       coalesce((SELECT any_value(name) FROM slice WHERE name LIKE 'compiled again: %'), ''),
       (SELECT max(TRY_CAST(str_value AS BIGINT)) FROM metadata
        WHERE name = 'tilewright threads' AND metadata.file_id = host_step_time.file_id),
       coalesce(recording.workers, 0), coalesce(recording.workers_us, 0) / 1e3,
       coalesce(recording.workers_queued_us, 0) / 1e3, coalesce(recording.beside, ''),
       coalesce((SELECT sum(dur) FILTER (WHERE EXISTS (
            FROM host_event JOIN plain ON number = named WHERE host_event.file_id = waited.file_id
             AND host_event.ts >= step_ts AND host_event.ts < step_ts + step_ns
             AND regexp_matches(name, 'torch/utils/data/dataloader\.py\(\d+\): _get_iterator$')
        )) >= sum(dur) / 2 FROM (
            SELECT host_time.file_id, step_ts, host_step.dur AS step_ns, host_time.dur FROM host_time
            JOIN host_step ON host_step.file_id = host_time.file_id AND host_step.ts = step_ts WHERE class = 'data'
        ) AS waited WHERE waited.file_id = host_step_time.file_id), false)
FROM host_step_time
LEFT JOIN description ON described_by = host_step_time.file_id
LEFT JOIN busy ON busy.file_id = coalesce(description.file_id, host_step_time.file_id)
LEFT JOIN recording ON recording.file_id = coalesce(description.file_id, host_step_time.file_id)
WHERE bare_ms > 0 ORDER BY host_step_time.file_id"""


def add_verdict(connection: DuckDBPyConnection) -> None:
    """Fill tables `cause` and `verdict`; host_account.sql and price/distance.sql come first."""
    connection.execute(_TABLES)
    connection.execute(files("tilewright.trace").joinpath("verdict/causes.sql").read_text("utf-8"))
    cores = host_cores(connection) or Step.cores
    rates = tensor_core_times(connection, "tf32"), tensor_core_times(connection, "bfloat16")
    found: list[_Found] = []
    for file_id, *row in connection.execute(_STEPS).fetchall():
        bare_ms, busy_ms, has_workers, reason, threads, workers, workers_ms, queued_ms, beside, restarts = row
        reason = reason.partition(": ")[2]
        of_workers = workers, workers_ms, queued_ms
        step = Step(bare_ms, busy_ms, has_workers, cores, reason, threads or 0, *of_workers, *rates, beside, restarts)
        rows = connection.execute("FROM host_candidate WHERE file_id = ? AND ms > 0", [file_id]).fetchall()
        # Medians of parts may add up to more than the mean step.
        candidates = [replace(cause, ms=min(cause.ms, bare_ms)) for cause in (Candidate(*row) for row in rows)]
        found += [(cause, step, advice_on(cause, step)) for cause in candidates]
    found.sort(key=_largest_gain)
    found = _late_ranks_first(found)
    rows = [
        (
            *(cause.file_id, cause.kind, advice.slow, cause.source, round(cause.calls), cause.ms),
            *(100 * cause.ms / step.bare_ms, advice.win_ms, advice.why, advice.action),
        )
        for cause, step, advice in found
        if advice.win_ms >= _LISTED * step.bare_ms
    ]
    append(connection, "cause", rows)
    append(connection, "verdict", list(enumerate(_sentences(connection, found))))


def _largest_gain(found: _Found) -> tuple[float, int, str, str]:
    cause, step, advice = found
    return -advice.win_ms / step.bare_ms, cause.file_id, cause.kind, cause.source or ""


def _late_ranks_first(found: list[_Found]) -> list[_Found]:
    """Those of ranks that wait for another one last, if that one has a cause that stands out."""
    late = {
        cause.file_id
        for cause, step, advice in found
        if advice.win_ms >= STANDS_OUT * step.bare_ms and cause.kind not in ("communication", "exchange")
    }
    waits = [each for each in found if each[0].kind == "communication" and late - {each[0].file_id}]
    first = [each for each in found if each not in waits]
    if not waits or not first:
        return found
    (cause, step, advice), *others = first
    longest = max((it.ms for it, _, _ in waits if it.file_id != cause.file_id), default=0.0)
    if longest > 0:
        advice = replace(advice, why=f"{advice.why.rstrip('.')}; others wait for this rank, {spent(longest)} a step.")
    return [(cause, step, advice), *others, *waits]


def _sentences(connection: DuckDBPyConnection, found: list[_Found]) -> list[str]:
    if allocator := snapshot_sentences(connection):
        return allocator
    if steps := _no_whole_step(connection):
        return steps
    if found and found[0][2].win_ms >= STANDS_OUT * found[0][1].bare_ms:
        cause, step, advice = found[0]
        whole = "the recorded part of a step" if _is_part(connection) else "the step"
        took = f"{share(cause.ms, step.bare_ms)} of {whole}, {spent(cause.ms)} of {spent(step.bare_ms)}"
        ranks = dict(connection.execute("SELECT file_id, rank FROM file_rank WHERE rank IS NOT NULL").fetchall())
        whose = f"Rank {ranks[cause.file_id]}: " if cause.file_id in ranks else ""
        gain = f"{spent(advice.win_ms)} less per step at most ({share(advice.win_ms, step.bare_ms)})"
        return [
            f"{whose}{advice.slow} takes {took},{at(cause.source)}.".replace(",.", ".").replace(", at", " at"),
            advice.why,
            f"{advice.action}: {gain}.",
        ]
    if _is_part(connection):
        return _cut(connection)
    if growth := growth_sentences(connection):
        return growth
    if operator := _operator_sentences(connection):
        return operator
    return _nothing_stands_out(connection)


def _no_whole_step(connection: DuckDBPyConnection) -> list[str]:
    """Where the program ended before a step was recorded from its begin to its end: a part of one tells nothing."""
    found = connection.execute("SELECT max(steps_seen) FROM recording HAVING count(*) > 0").fetchone()
    if found is None or not _has_no_whole_step(connection) or _is_part(connection):
        return []
    return [
        f"No step was recorded whole: the program ended after {counted(found[0], 'step')}.",
        "Steps are timed without the profiler and warmed up before any is kept.",
        "Let it make more steps, or record earlier ones: tilewright profile --wait 2 --warmup 1.",
    ]


def _has_no_whole_step(connection: DuckDBPyConnection) -> bool:
    """Whether a program that makes steps has none that was recorded from its begin to its end."""
    found = connection.execute("SELECT max(steps_kept), max(bare_us) FROM recording").fetchone()
    return found is not None and found[0] == 0 and found[1] is not None


def _is_part(connection: DuckDBPyConnection) -> bool:
    """Whether that is so since a step makes more events than are recorded."""
    return _has_no_whole_step(connection) and bool(connection.execute("FROM recording WHERE cut").fetchall())


def _cut(connection: DuckDBPyConnection) -> list[str]:
    """Where nothing stands out in the recorded part of a step."""
    ((events, most),) = connection.execute("SELECT max(step_events), max(most_events) FROM recording").fetchall()
    # Without a warm-up a step's events are not counted.
    made, wanted = (
        (counted(events, "event"), 2 * events) if events > most else (f"more than {counted(most, 'event')}", 4 * most)
    )
    return [
        "Nothing stands out in the part of a step that was recorded.",
        f"A step makes {made}, and {most:,} are recorded.",
        f"Record more, or less of each: tilewright profile --events {wanted}, or --no-stacks.",
    ]


def _nothing_stands_out(connection: DuckDBPyConnection) -> list[str]:
    """How much the operators take and could win, and how long the thread of the steps had no processor."""
    ((on_host, win, bare, stopped),) = connection.execute(
        """SELECT (SELECT sum(percent) / count(DISTINCT file_id) FROM host_account WHERE class = 'operators'),
                  (SELECT sum(win) FROM host_distance), (SELECT sum(bare_ms) FROM host_step_time),
                  (SELECT sum(stopped_ms) / sum(bare_ms) FROM stopped)"""
    ).fetchall()
    if not bare:
        return []
    of_host = "" if on_host is None else f": operators take {on_host:.0f} % of the host's step"
    if of_host:
        of_host += _longest(connection, bare)
    most = "" if not win else f" At their floors, all together would save {share(min(win, bare), bare)} of the step"
    if win and win >= STANDS_OUT * bare:
        operator, source, part = connection.execute(
            "SELECT operator, source, sum(win) AS won FROM host_distance GROUP BY ALL ORDER BY won DESC LIMIT 1"
        ).fetchall()[0]
        most += f", {operator}{at(source)} alone {share(min(part, bare), bare)}"
    said = [f"Nothing stands out{of_host}." + (f"{most}." if most else "")]
    if stopped and stopped >= _STOPPED:
        said += [
            f"For {share(stopped, 1)} of the step its thread did not run, though nothing in the program made it wait.",
            "Other programs probably used the processors: measure again when the machine is idle.",
        ]
        return said
    return [*said, *_idle_cores(connection, on_host or 0.0)]


def _idle_cores(connection: DuckDBPyConnection, percent: float) -> list[str]:
    """Where operators take so much of the step of the only process, and run on fewer threads than there are cores."""
    ((threads, processes, workers),) = connection.execute(
        """SELECT max(TRY_CAST(str_value AS BIGINT)), count(*), (SELECT coalesce(max(workers), 0) FROM recording)
           FROM metadata WHERE name = 'tilewright threads'"""
    ).fetchall()
    cores = host_cores(connection)
    if not cores or processes != 1 or workers or percent < _COMPUTING or not 0 < threads < cores:
        return []
    if connection.execute("FROM device_slice LIMIT 1").fetchall():
        return []
    return [f"Operators run on {threads} of {cores} cores: torch.set_num_threads({cores}) lets them use all."]


def _longest(connection: DuckDBPyConnection, bare: float) -> str:
    """The operator of a line that takes most of the bare step, and whether its floor is known; none below a tenth."""
    found = connection.execute(
        """SELECT operator, source, sum(ms) AS ms, count(win) FROM host_distance
           GROUP BY operator, source ORDER BY ms DESC"""
    ).fetchone()
    if found is None or found[2] < STANDS_OUT * bare:
        return ""
    operator, source, ms, priced = found
    return f", {operator}{at(source)} alone {share(min(ms, bare), bare)}{'' if priced else ' (its floor is unknown)'}"


def _operator_sentences(connection: DuckDBPyConnection) -> list[str]:
    """About the operator that would win most at its floor, if that stands out and it takes twice as long as there."""
    found = connection.execute(
        """SELECT operator, source, sum(ms_per_step * scale) AS ms, sum(win_ms_per_step) AS win,
                  arg_max(verdict, ms_per_step), (SELECT sum(bare_ms) FROM host_step_time) AS bare,
                  EXISTS (FROM slice WHERE name LIKE 'Torch-Compiled Region%' OR name LIKE 'CompiledFunction%'),
                  -- What it takes since others use the processors, the operator cannot win.
                  coalesce(sum(ms_per_step * scale * (1 - 1 / times)) FILTER (WHERE attributed_by = 'host'), 0)
                      AS others
           FROM distance LEFT JOIN stretch USING (file_id) WHERE win_ms_per_step IS NOT NULL GROUP BY operator, source
           HAVING win - others >= $least * bare AND win - others >= (ms - others) / 2 AND win < ms AND ms <= bare
           ORDER BY win DESC, operator, source""",
        {"least": STANDS_OUT},
    ).fetchall()
    named = next((row for row in found if not _draws(row[0])), None)
    if named is None:
        return []
    operator, source, ms, win, bound, bare, compiled, _ = named
    advice = (
        "The program is compiled already; larger sizes or a lower precision may bring it nearer to that"
        if compiled
        else 'torch.compile(model, backend="tilewright") fuses it with its neighbours or takes another kernel'
    )
    return [
        f"{operator} takes {share(ms, bare)} of the step, {spent(ms)} of {spent(bare)}{at(source)}.",
        f"It is {bound} and takes {ms / (ms - win):.1f} × its floor.",
        f"{advice}: {spent(win)} less per step at most ({share(win, bare)}).",
    ]


def _draws(operator: str) -> bool:
    """Whether it draws random numbers: its floor counts the writes, and a CPU's generator makes one after the other."""
    name = operator.removeprefix("aten::")
    return any(row.operator_class == "random" for row in [*rows_of(name), *rows_of(name.removesuffix("_"))])


def read_verdict(connection: DuckDBPyConnection) -> list[str]:
    """The sentences of a run; none where it has no steps, or is of another version."""
    if not connection.execute("FROM duckdb_tables() WHERE table_name = 'verdict'").fetchall():
        return []
    return [
        str(sentence) for (sentence,) in connection.execute("SELECT sentence FROM verdict ORDER BY place").fetchall()
    ]
