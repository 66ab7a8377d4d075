-- Several ranks of one job: overlap of communication, and the rank that made others wait.

-- The rank of each file; NULL if there is only one.
CREATE OR REPLACE VIEW file_rank AS
SELECT DISTINCT step.file_id, CASE WHEN (SELECT count(DISTINCT file_id) FROM step) > 1
                                   THEN coalesce(trace_file.rank, trace_file.id) END AS rank
FROM step JOIN trace_file ON trace_file.id = step.file_id;

-- `communication_ms`: at least one collective ran. `exposed_ms`: and no kernel did. The rest is hidden behind kernels.
CREATE OR REPLACE VIEW communication AS
WITH steps AS (SELECT upid, min(ts) AS ts, max(ts + dur) AS ended FROM device_time GROUP BY upid),
running AS (
    SELECT upid, greatest(work.ts, steps.ts) AS ts, least(work.ts + work.dur, steps.ended) AS ended
    FROM device_slice AS work JOIN steps USING (upid)
    WHERE kind = 'communication' AND work.ts < steps.ended AND work.ts + work.dur > steps.ts
),
uncovered AS (
    SELECT upid, ended - greatest(ts, coalesce(max(ended) OVER before, ts)) AS dur
    FROM running
    WINDOW before AS (PARTITION BY upid ORDER BY ts ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)
),
total AS (
    SELECT upid, sum(greatest(dur, 0))::BIGINT AS ns, count(*) AS collectives FROM uncovered GROUP BY upid HAVING ns > 0
),
spent AS (
    SELECT upid, sum(dur) FILTER (WHERE class = 'communication') AS exposed,
           sum(dur) FILTER (WHERE class IN ('kernel', 'wave tail')) AS computing
    FROM device_time GROUP BY upid
)
SELECT coalesce(trace_file.rank, process.file_id) AS rank, process.name AS device, total.collectives,
       total.ns / 1e6 AS communication_ms, coalesce(spent.exposed, 0) / 1e6 AS exposed_ms,
       1e2 * (1 - coalesce(spent.exposed, 0) / total.ns::DOUBLE) AS hidden_percent,
       coalesce(spent.computing, 0) / 1e6 AS computing_ms
FROM total
JOIN process USING (upid)
JOIN trace_file ON trace_file.id = process.file_id
LEFT JOIN spent USING (upid)
ORDER BY rank, device;

-- Collectives of processes without a device, which a thread of their own runs.
CREATE OR REPLACE TABLE host_collective AS
SELECT slice.id AS slice_id, process.file_id, slice.track_id, slice.ts, slice.dur, slice.name, slice.arg_set_id
FROM slice JOIN thread_track ON thread_track.id = slice.track_id JOIN thread USING (utid) JOIN process USING (upid)
WHERE slice.category IN ('user_annotation', 'cpu_op') AND (slice.name LIKE 'gloo:%' OR slice.name LIKE 'mpi:%')
  AND slice.dur >= 0 AND process.file_id NOT IN (SELECT file_id FROM device_slice);

-- A collective ends on all ranks at once, so its ends tell how far the clocks of the ranks are apart. The n-th
-- collective of a name and a process group on one rank is the n-th on every other.
CREATE OR REPLACE VIEW collective AS
WITH named AS (
    SELECT d.slice_id, d.file_id, d.ts, d.ts + d.dur AS last_ts,
           regexp_extract(d.name, '^[^(]*') AS name, coalesce(arg_set.args->>'$."Process Group Name"', '') AS in_group
    FROM device_slice d JOIN slice ON slice.id = d.slice_id LEFT JOIN arg_set USING (arg_set_id)
    WHERE d.kind = 'communication'
    UNION ALL
    SELECT slice_id, file_id, ts, ts + dur, name, '' FROM host_collective
),
numbered AS (
    SELECT *, row_number() OVER (PARTITION BY file_id, name, in_group ORDER BY ts) AS position FROM named
),
shared AS (
    SELECT *, median(last_ts) OVER same AS end_of_all FROM numbered
    WINDOW same AS (PARTITION BY name, in_group, position)
    QUALIFY count(*) OVER same > 1
),
skew AS (SELECT file_id, median(last_ts - end_of_all) AS skew_ns FROM shared GROUP BY file_id)
SELECT slice_id, file_id, coalesce(trace_file.rank, file_id) AS rank, name, in_group, position,
       ts - skew_ns AS aligned_ts, skew_ns,
       max(ts - skew_ns) OVER same - (ts - skew_ns) AS waited_ns,
       row_number() OVER (PARTITION BY name, in_group, position ORDER BY ts - skew_ns DESC, file_id) = 1 AS came_last,
       coalesce((ts - skew_ns) - lag(ts - skew_ns) OVER (PARTITION BY name, in_group, position ORDER BY ts - skew_ns),
                0) AS behind_ns
FROM shared JOIN skew USING (file_id) JOIN trace_file ON trace_file.id = file_id
WINDOW same AS (PARTITION BY name, in_group, position)
ORDER BY position, rank;

-- `caused`: how much less the other ranks would have waited without the last rank.
-- `at_work`: the share of that time in which the last rank's device was busy; in the rest its host launched late.
CREATE OR REPLACE VIEW straggler AS
WITH late AS (
    SELECT file_id, any_value(rank) AS rank, count(*) AS collectives, count(*) FILTER (WHERE came_last) AS came_last,
           sum(waited_ns) / 1e6 AS waited_ms, coalesce(sum(behind_ns) FILTER (WHERE came_last), 0) / 1e6 AS caused_ms,
           any_value(skew_ns) / 1e3 AS clock_ahead_us
    FROM collective GROUP BY file_id
),
kept_waiting AS (
    SELECT d.file_id, d.upid, d.ts - behind_ns AS ts, d.ts AS ended
    FROM collective JOIN device_slice AS d USING (slice_id) WHERE came_last AND behind_ns > 0
),
meanwhile AS (
    SELECT time.class IN ('kernel', 'wave tail', 'copy') AS busy, kept_waiting.file_id,
           least(time.ts + time.dur, ended) - greatest(time.ts, kept_waiting.ts) AS dur
    FROM kept_waiting
    JOIN device_time AS time ON time.upid = kept_waiting.upid AND time.ts < ended AND time.ts + time.dur > kept_waiting.ts
    WHERE time.class <> 'communication'
),
spent AS (
    SELECT file_id, coalesce(sum(dur) FILTER (WHERE busy), 0) AS busy, sum(dur) AS ns FROM meanwhile GROUP BY file_id
)
SELECT rank, collectives, came_last, waited_ms, caused_ms, clock_ahead_us,
       1e2 * busy / nullif(ns, 0) AS at_work_percent
FROM late LEFT JOIN spent USING (file_id)
ORDER BY caused_ms DESC, rank;
