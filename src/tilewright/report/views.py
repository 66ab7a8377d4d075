"""The tables of a run, each a query: the page shows all of them, the terminal those of a timeline and of lost time."""

from __future__ import annotations

from typing import NamedTuple


class View(NamedTuple):
    """One table. The end of a column's name is its unit; `marked` is no column, but tells the rows that stand out.

    A narrow terminal leaves out the columns of `left_out`, the first of them first.
    """

    id: str
    short: str
    title: str
    lead: str
    sql: str
    in_terminal: bool = False
    left_out: tuple[str, ...] = ()


LOST = View(
    "lost",
    "Lost time",
    "Time lost to the floors",
    "The floor is the least time that this machine needs for a kernel or library call; lost is what it took beyond "
    "that. Marked are rows that lose more than 1 % of all time for an unknown reason, and predictions that are wrong "
    "by more than a factor of two.",
    """\
SELECT CASE WHEN launches > 1 THEN launches || ' × ' ELSE '' END || name AS launch, shape::VARCHAR AS shape,
       measured_us, floor_us, lost_us, 100 * share AS of_all_percent, predicted_us,
       CASE WHEN off > 2 THEN off END AS times_off, bound, coalesce(
           why,
           'takes ' || round(measured_us / predicted_us, 1) || ' × what kernels of its kind take here: its sizes suit '
           || 'it less, or the machine was busy',
           'its time was not predicted') AS why, graph, source,
       coalesce(off > 2, false) OR (share > 0.01 AND why IS NULL) AS marked
FROM lost_time WHERE lost_us > 0""",
    left_out=("graph", "source", "predicted_us", "floor_us", "shape"),
)
VERIFIED = View(
    "verified",
    "Verification",
    "Verification",
    "Every result and gradient, compared with float64 from the same inputs. Allowed is twice eager's error plus 4 ulp, "
    "for the relative norm of the error and for its largest element.",
    """\
SELECT direction, tensor, dtype, error, eager_error, bound, max_error, eager_max_error, max_bound, ok, NOT ok AS marked
FROM verified
ORDER BY ok, error / nullif(bound, 0) DESC""",
    left_out=("dtype", "eager_max_error", "eager_error"),
)
MEASUREMENTS = View(
    "measurements",
    "Measurements",
    "Measurements",
    "Medians of interleaved repeats in one run, from the 20th to the 80th percentile.",
    """\
SELECT suite, "case", direction, impl, median_us, p20_us, p80_us, times_eager, times_inductor, peak_bytes,
   100 * of_ceiling AS of_ceiling_percent, repeats
FROM speedup""",
    left_out=("suite", "repeats", "p20_us", "p80_us", "of_ceiling_percent"),
)
PROGRAM = (
    LOST,
    View(
        "decisions",
        "Decisions",
        "Decisions",
        "What became of every pair of neighbours in the graph, and why.",
        """\
SELECT verdict, concat_ws(' → ', producer, nullif(consumer, producer)) AS pair, reason,
       nullif(bytes_saved, 0) AS saved_bytes, predicted_us, measured_us, passed_by AS pass, graph, source
FROM decision""",
    ),
    View(
        "predicted",
        "Prediction",
        "Predicted against measured",
        "What is off by more than two times is marked: predictions of such kernels are not fitted to this device yet, "
        "which `tilewright doctor --kernels` does.",
        """\
WITH timed AS (
    SELECT 'region' AS what, graph || ' ' || name AS name, predicted_us, measured_us FROM region
    UNION ALL
    SELECT 'call', graph || ' ' || name, predicted_us, measured_us FROM operator
    WHERE stage = 'after' AND region IS NULL
    UNION ALL
    SELECT 'decision', graph || ' ' || producer || ' → ' || consumer, predicted_us, measured_us FROM decision
    UNION ALL
    SELECT 'whole', suite || ' ' || "case" || ' ' || direction, predicted_us, median_us
    FROM measurement WHERE impl = 'tilewright'
)
SELECT *, measured_us / predicted_us AS times_predicted, greatest(times_predicted, 1 / times_predicted) > 2 AS marked
FROM timed WHERE predicted_us > 0 AND measured_us > 0""",
    ),
    VERIFIED,
    MEASUREMENTS,
    View(
        "ceilings",
        "Ceilings",
        "Ceilings of the machine",
        "What floors are computed from: measured on this machine, or of a datasheet.",
        "SELECT device, kind, dtype, value, unit, origin FROM ceiling",
    ),
)
LOADED = View(
    "files",
    "Files",
    "Files",
    "The loaded files: every event is a slice, the end of one, of a flow or a counter, metadata, or rejected.",
    """\
SELECT parse_filename(path) AS file, format, rank, events, slices, paired AS pairs, flow_points AS flow_events,
       counters, metadata, rejects AS rejected, note
FROM trace_file""",
    left_out=("pairs", "flow_events", "counters", "metadata"),
)
SHARES = View(
    "shares",
    "Operator times",
    "Operators, self and total",
    "Self is what an operator did or launched itself, total includes what it called. Shares are of all host time "
    "within operators, calls and ranges, and of all device time.",
    """\
SELECT name, kind, calls, cpu_self AS host_self_ns, 100 * of_cpu AS of_host_percent, cpu_total AS host_total_ns,
       cpu_average AS host_average_ns, nullif(device_self, 0) AS device_self_ns,
       CASE WHEN device_self > 0 THEN 100 * of_device END AS of_device_percent,
       nullif(device_total, 0) AS device_total_ns, nullif(device_average, 0) AS device_average_ns,
       CASE WHEN one_off THEN 'once' ELSE 'every step' END AS happens, source
FROM operator_share""",
    left_out=(
        "kind",
        "device_average_ns",
        "host_average_ns",
        "of_host_percent",
        "device_total_ns",
        "of_device_percent",
    ),
)
TRACE = (
    View(
        "host",
        "Host",
        "Where the host's step went",
        "What the thread that runs your steps did in a mean step; the rows add up to the step. If steps were also "
        "timed without the profiler, times are scaled to those. Source is the line with the largest part of a row.",
        """\
SELECT rank, class, ms_per_step AS time_ms, percent, source, steps
FROM host_account LEFT JOIN file_rank USING (file_id) ORDER BY file_id, ms_per_step DESC""",
        in_terminal=True,
    ),
    View(
        "accounting",
        "Accounting",
        "Where a step's time went",
        "Each device's mean step, divided into classes. A gap counts as synchronisation if the host had waited, and as "
        "launch-bound if it launched late.",
        """\
SELECT rank, process.name AS device, class, ms_per_step AS time_ms, percent, steps
FROM step_account JOIN process USING (upid) LEFT JOIN file_rank ON file_rank.file_id = step_account.file_id
ORDER BY upid, ms_per_step DESC""",
        in_terminal=True,
    ),
    View(
        "synchronisation",
        "Waits",
        "What made the host wait",
        "Calls that waited until the device had finished its work, by the line that made them. Lost: how long the "
        "device then had nothing to do. Spent: how long the host was in calls of that line.",
        """\
SELECT rank, lost_ms_per_step AS lost_ms, waited_ms_per_step AS waited_ms, spent_ms_per_step AS spent_ms, calls, what,
       -- The profiler names a function by the line of its `def`.
       source || CASE WHEN exact THEN '' ELSE coalesce(' in ' || source_function, '') END AS source
FROM synchronisation LEFT JOIN file_rank USING (file_id) ORDER BY lost_ms DESC, waited_ms DESC""",
        in_terminal=True,
    ),
    View(
        "win",
        "What to win",
        "What you would win",
        "The most that each change can save in a step, largest first: work of the host that can be left out, operators "
        "as fast as their floor, gaps that the host causes. Gains overlap: do not add them up.",
        """\
SELECT rank, ms_per_step AS time_ms, how, operator, calls, why, source
FROM what_you_would_win LEFT JOIN file_rank USING (file_id) WHERE ms_per_step >= 1e-3
ORDER BY time_ms DESC, how, operator, source""",
        in_terminal=True,
        left_out=("calls",),
    ),
    View(
        "whatif",
        "What if",
        "What a change would bring",
        "For each change, the time of a step that a simulation of host and devices predicts, beside the measured one. "
        "`tilewright whatif` predicts other changes.",
        """\
SELECT change, predicted_us, measured_us, 1e2 * (1 - predicted_us / nullif(measured_us, 0)) AS gain_percent, what
FROM prediction WHERE abs(1 - predicted_us / nullif(measured_us, 0)) >= 1e-3 ORDER BY gain_percent DESC, change""",
    ),
    View(
        "path",
        "Critical path",
        "The critical path",
        "The chain of work that decides how long a step takes: only work on it makes the step longer. The timeline "
        "shows it as a track.",
        """\
SELECT kind, CASE WHEN kind <> 'host' THEN name END AS name, count(*) AS parts,
       sum(dur) / 1e6 / (SELECT max(steps) FROM (SELECT count(*) AS steps FROM step GROUP BY file_id)) AS time_ms,
       1e2 * sum(dur) / sum(sum(dur)) OVER () AS percent
FROM critical_path GROUP BY ALL HAVING sum(dur) > 0 ORDER BY time_ms DESC, kind, name""",
    ),
    View(
        "distance",
        "Floors",
        "Operators beside their floors",
        "Each operator's time in a mean step, beside its floor: the least time that its bytes and FLOPs need.",
        """\
SELECT rank, operator, source, calls, ms_per_step AS time_ms, percent, floor_us, times_floor, verdict, GBps, TFLOPs,
       dtype, shapes
FROM distance LEFT JOIN file_rank USING (file_id) ORDER BY ms_per_step DESC""",
    ),
    SHARES,
    View(
        "ranks",
        "Communication",
        "Communication",
        "The time that each rank's device spent in collectives, and the part that no kernel overlapped.",
        """\
SELECT rank, device, collectives, communication_ms, exposed_ms, hidden_percent, computing_ms
FROM communication""",
        in_terminal=True,
    ),
    View(
        "stragglers",
        "Stragglers",
        "Who kept the others waiting",
        "A collective starts when the last rank arrives. Caused: how much less the other ranks would have waited "
        "without this one. At work: the part of that in which its device was computing; in the rest, its host "
        "launched late. Clocks are aligned by the ends of the collectives.",
        """\
SELECT rank, collectives, came_last, waited_ms, caused_ms, at_work_percent, clock_ahead_us
FROM straggler""",
        in_terminal=True,
    ),
    View(
        "blocks",
        "Blocks",
        "Who holds the allocator's memory",
        "Memory of a snapshot by the line that allocated it. Free memory that PyTorch keeps has no line; an allocation "
        "larger than its largest piece needs a new segment.",
        """\
SELECT device, CASE WHEN state = 'inactive' THEN 'in no use' ELSE source END AS source, function, layer, state,
       count(*) AS blocks, sum(memory_block.bytes)::BIGINT AS bytes, max(memory_block.bytes) AS largest_bytes,
       sum(memory_block.bytes - requested_bytes)::BIGINT AS rounding_bytes
FROM memory_block JOIN memory_segment ON memory_segment.id = segment_id GROUP BY ALL ORDER BY bytes DESC""",
        in_terminal=True,
    ),
    View(
        "losses",
        "Losses",
        "Missing from the trace",
        "Events that the profiler dropped, or that could not be read.",
        "FROM loss",
    ),
)
