-- The steps of each file: those marked by PyTorch's profiler; or the user's ranges named `step 3`,
-- `train_step`, `iteration: 3` or `batch`; or the whole trace as one step.

CREATE OR REPLACE TABLE step AS
WITH called AS (
    SELECT slice.id, slice.name, process.file_id, slice.ts, slice.dur, slice.depth,
           slice.name LIKE 'ProfilerStep#%' AS by_profiler, CASE WHEN NOT by_profiler THEN thread.utid END AS of_thread,
           regexp_replace(slice.name, '\d+$', '') AS family
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    WHERE slice.category IN ('user_annotation', 'nvtx') AND slice.dur >= 0
      AND (by_profiler OR regexp_full_match(slice.name, '(?i)([a-z]+[_ -])*(step|iter|iteration|batch)[ _#:-]*\d*'))
      AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61
),
-- One family of ranges per file: of several the one that covers the most time, then the outermost.
chosen AS (
    SELECT file_id, of_thread, family FROM called
    GROUP BY file_id, by_profiler, of_thread, family HAVING by_profiler OR count(*) > 1
    QUALIFY row_number() OVER (
        PARTITION BY file_id ORDER BY by_profiler DESC, sum(dur) DESC, min(depth), family, of_thread
    ) = 1
),
marked AS (
    SELECT called.id, called.name, file_id, called.ts AS host_ts, called.dur AS host_dur,
           lead(called.ts) OVER (PARTITION BY file_id ORDER BY called.ts) AS following
    FROM called JOIN chosen USING (file_id, family)
    WHERE called.of_thread IS NOT DISTINCT FROM chosen.of_thread
),
-- Work queued by the last step belongs to it, and so do the waits for that work.
drained AS (
    SELECT marked.id, max(device_slice.ts + device_slice.dur) AS last_end
    FROM marked JOIN device_slice ON device_slice.file_id = marked.file_id
     AND device_slice.launch_ts BETWEEN marked.host_ts AND marked.host_ts + marked.host_dur
    WHERE marked.following IS NULL
    GROUP BY marked.id
),
whole AS (
    SELECT process.file_id, min(slice.ts) AS ts, max(slice.ts + greatest(slice.dur, 0)) AS last_end
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    WHERE slice.category IN ('cpu_op', 'cuda_runtime', 'cuda_driver', 'kernel', 'gpu_memcpy', 'gpu_memset')
      AND process.file_id NOT IN (SELECT file_id FROM marked)
      AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61
    GROUP BY process.file_id
)
SELECT id, name, file_id, host_ts AS ts,
       coalesce(following, greatest(host_ts + host_dur, coalesce(last_end, 0))) - host_ts AS dur, host_dur
FROM marked LEFT JOIN drained USING (id)
UNION ALL
SELECT NULL, 'the whole trace', file_id, ts, last_end - ts, last_end - ts FROM whole
ORDER BY file_id, ts;
