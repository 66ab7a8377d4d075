-- Host time: operators (`operator`), CUDA calls (`call`) and ranges (`range`), each with the innermost one that contains
-- it. The time of Python frames in between counts for the outer one. Needs the scripts of `account`.

CREATE OR REPLACE TEMP TABLE host_slice AS
WITH last_step AS (
    SELECT file_id, min(ts) AS first_ts, max(ts) AS ts, max(ts + host_dur) AS ended,
           -- Around these are steps that the recorder left out: they came too fast, or not to their end.
           file_id IN (SELECT file_id FROM recording WHERE steps_kept > 0) AS kept
    FROM operator_step WHERE id IS NOT NULL GROUP BY file_id
)
-- Where an optimizer's step ends the recording, PyTorch's range around it lasts until the profiler has stopped. One
-- that begins with the step is around the step. Operators last as long as they ran.
SELECT slice.id, thread.utid, slice.ts, process.file_id,
       CASE WHEN slice.category = 'user_annotation' AND slice.ts > last_step.ts AND slice.ts <= last_step.ended
            THEN least(slice.dur, last_step.ended - slice.ts) ELSE slice.dur END AS dur,
       CASE WHEN starts_with(slice.name, 'ProfilerStep#') THEN regexp_replace(slice.name, '#\d+$', '*')
            ELSE coalesce(slice.name, '(no name)') END AS name,
       CASE WHEN slice.category IN ('cuda_runtime', 'cuda_driver') THEN 'call'
            -- A range around what tilewright or Inductor runs on a CPU without PyTorch stands for an operator.
            WHEN slice.category IN ('user_annotation', 'nvtx') AND slice.name NOT LIKE '## Call CompiledFxGraph %'
             AND slice.name NOT IN (SELECT name FROM operator WHERE stage = 'after')
            THEN 'range' ELSE 'operator' END AS kind
FROM slice
JOIN thread_track ON thread_track.id = slice.track_id
JOIN thread USING (utid)
JOIN process USING (upid)
LEFT JOIN last_step USING (file_id)
WHERE slice.category IN ('cpu_op', 'cuda_runtime', 'cuda_driver', 'user_annotation', 'nvtx')
  AND process.file_id NOT IN (SELECT file_id FROM description)
  AND (process.file_id NOT IN (SELECT described_by FROM description)
       OR slice.ts BETWEEN last_step.ts AND last_step.ended)
  AND (NOT coalesce(kept, false) OR slice.ts BETWEEN last_step.first_ts AND last_step.ended)
  -- Exclude marks of tilewright's profile, and absurd times, whose sums would overflow.
  AND coalesce(slice.name, '') NOT LIKE 'synchronisation at %'
  AND slice.dur BETWEEN 0 AND 1::BIGINT << 61 AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61
ORDER BY slice.id;
