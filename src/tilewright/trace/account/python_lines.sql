-- The traced lines of the user's functions, from the entry that measure/recording/line_tracer.py writes into the headers
-- of traces. An entry that misses anything, or has it of another type, is ignored.

CREATE OR REPLACE TABLE python_line AS  -- when a thread came to a line of the user's own functions, or back to it
WITH entry AS (
    SELECT trace_file.id AS file_id, trace_file.base_ns - trace_file.shift_ns AS base_ns,
           TRY(from_json_strict(
               str_value, '{"thread": "BIGINT", "places": [["VARCHAR"]], "since": ["BIGINT"], "which": ["BIGINT"]}'
           )) AS traced
    FROM metadata JOIN trace_file ON trace_file.id = metadata.file_id
    WHERE metadata.name = 'tilewright lines' AND metadata.key_type = 'single'
),
reached AS (
    SELECT file_id, base_ns, traced.thread AS tid, traced.places AS places,
           generate_subscripts(traced.since, 1) AS number, unnest(traced.since) AS since, unnest(traced.which) AS which
    FROM entry WHERE len(traced.since) = len(traced.which)
),
timed AS (
    SELECT file_id, tid, sum(since) OVER (PARTITION BY file_id ORDER BY number) - base_ns AS ts,
           -- -1 where no line of the user's ran, and while nothing is known.
           CASE WHEN which >= 0 THEN places[which + 1] ELSE ['?', '?', '0'] END AS place
    FROM reached
),
traced_thread AS (
    SELECT process.file_id, thread.tid, min(thread.utid) AS utid
    FROM thread JOIN process USING (upid) WHERE process.device IS NULL GROUP BY process.file_id, thread.tid
)
SELECT file_id, utid, ts::BIGINT AS ts,
       parse_filename(place[1]) AS file,    -- without folders
       place[2] AS function, TRY_CAST(place[3] AS INTEGER)::BIGINT AS line,
       coalesce(place[4] = 'with', false) AS enters     -- a block, in a call that no event shows
FROM timed JOIN traced_thread USING (file_id, tid)
WHERE abs(ts) < 1::HUGEINT << 61 AND file IS NOT NULL AND function IS NOT NULL AND line >= 0;
