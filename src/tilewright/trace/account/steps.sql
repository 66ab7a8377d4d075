-- The steps of each file: what PyTorch's profiler marks, or the whole trace as one step.

CREATE OR REPLACE TABLE step AS
WITH marked AS (
    SELECT slice.id, slice.name, process.file_id, slice.ts AS host_ts, slice.dur AS host_dur,
           lead(slice.ts) OVER (PARTITION BY process.file_id ORDER BY slice.ts) AS following
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    WHERE slice.category = 'user_annotation' AND slice.name LIKE 'ProfilerStep#%' AND slice.dur >= 0
      AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61
),
-- What the last step queued belongs to it, and so does waiting for that.
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
