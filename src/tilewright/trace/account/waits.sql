-- Calls in which the host waited for the device, with the operator and the line that made it wait.

-- A profile of tilewright's marks each synchronisation with its line, right after the operator that waited. Where
-- stacks are recorded, the Python that marks is around the mark: what it was called from is where the wait was.
CREATE OR REPLACE TEMP TABLE mark AS
WITH RECURSIVE begun AS (
    SELECT id, parent_id, track_id FROM slice WHERE category IN ('user_annotation', 'cpu_op') AND name LIKE 'synchronisation at %'
),
around AS MATERIALIZED (SELECT id, parent_id, track_id, ts, name FROM slice WHERE track_id IN (SELECT track_id FROM begun)),
up AS (
    SELECT id AS mark_id, parent_id AS outer_id, 1 AS hops FROM begun
    UNION ALL
    SELECT up.mark_id, slice.parent_id, up.hops + 1
    FROM up JOIN around AS slice ON slice.id = up.outer_id
    WHERE up.hops < 100
),
marking AS (
    -- In a WHERE, this would be evaluated for every slice before the join.
    SELECT up.mark_id, max(up.hops) FILTER (WHERE regexp_matches(
               slice.name, '(^|/)(synchronisations\.py\(\d+\): (show|_mark)|warnings\.py\(\d+\): _showwarnmsg)$'
           )) AS hops
    FROM up JOIN around AS slice ON slice.id = up.outer_id
    GROUP BY up.mark_id
)
SELECT up.outer_id AS parent_id, slice.track_id, slice.ts,
       regexp_extract(slice.name, '^synchronisation at (.*:\d+)', 1) AS place
FROM up
LEFT JOIN marking USING (mark_id)
JOIN around AS slice ON slice.id = up.mark_id
WHERE up.hops = coalesce(marking.hops, 0) + 1;

CREATE OR REPLACE TABLE wait AS
WITH copied AS (
    SELECT launch_id, min(ts) AS ts, max(ts + dur) AS last_end, min(upid) AS upid,
           bool_or(name LIKE '%Pageable%') AS pageable
    FROM device_slice WHERE kind = 'copy' GROUP BY launch_id
),
waiting AS (
    SELECT launch.*, slice.track_id, copied.upid, context.operator_id, context.caller,
           coalesce(context.caller_id, launch.slice_id) AS caller_id, context.function, context.place,
           context.exact_place, context.ranges,
           CASE WHEN regexp_matches(launch.name, 'Memcpy') THEN
                CASE WHEN pageable THEN 'a copy to or from pageable memory' ELSE 'a copy' END END AS copy
    FROM device_call AS launch JOIN slice ON slice.id = launch.slice_id
    LEFT JOIN copied ON copied.launch_id = launch.slice_id
    LEFT JOIN launch_context AS context ON context.launch_id = launch.slice_id
    WHERE regexp_matches(launch.name, '^(cuda|cu)(Stream|Device|Event|Ctx|Thread)Synchronize')
       OR launch.name IN ('cudaFree', 'cudaFreeHost', 'cuMemFree_v2', 'cuMemFreeHost')
       -- A copy call that returned before the device had started the copy did not wait.
       OR (regexp_matches(launch.name, 'Memcpy') AND launch.ts + launch.dur >= copied.ts
           AND (pageable OR launch.ts + launch.dur >= copied.last_end))
),
-- A mark is for the last wait before it on its thread, in something they both lie in, and for the other waits of
-- that one's operator: a copy and the synchronisation after it.
owned AS (
    SELECT mark.place, mark.ts, last.slice_id, last.operator_id
    FROM mark ASOF JOIN (SELECT *, ts + dur AS ended FROM waiting) AS last
      ON last.track_id = mark.track_id AND mark.ts >= last.ended
    WHERE mark.parent_id IS NULL
       OR (last.slice_id, mark.parent_id) IN (SELECT (inner_id, outer_id) FROM enclosing)
),
marked AS (
    SELECT waiting.slice_id, arg_min(owned.place, owned.ts) AS place
    FROM waiting JOIN owned ON owned.slice_id = waiting.slice_id OR owned.operator_id = waiting.operator_id
    GROUP BY waiting.slice_id
)
SELECT waiting.slice_id, waiting.file_id, waiting.ts, waiting.dur, waiting.name, waiting.utid,
       -- The trace does not have the device of a stream or event; with one device it is known.
       waiting.upid, operator.name AS operator, waiting.caller, waiting.caller_id, waiting.copy,
       coalesce(marked.place, waiting.place) AS source, waiting.function AS source_function,
       coalesce(marked.place, waiting.exact_place) IS NOT NULL AS exact, coalesce(waiting.ranges, []) AS ranges
FROM waiting
LEFT JOIN slice AS operator ON operator.id = waiting.operator_id
LEFT JOIN marked ON marked.slice_id = waiting.slice_id
ORDER BY waiting.ts;
