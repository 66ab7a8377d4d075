-- What could make the host slow: a row per cause, in milliseconds of the mean bare step. Needs host_account.sql and
-- price/distance.sql. `inner_…` is what most of its time is spent in, and how much.

-- Once, since the view is planned anew wherever it is asked.
CREATE OR REPLACE TEMP TABLE host_distance AS
SELECT file_id, operator, source, dtype, attributed_by, calls, ms_per_step * scale AS ms, win_ms_per_step AS win FROM distance;

-- The user's lines from which many short calls are made, as in a loop over elements.
CREATE OR REPLACE TEMP TABLE busy_line AS
WITH called AS (
    SELECT file_id, source, called, max(calls) AS calls, sum(ms_per_step) AS ms, bool_or(coalesce(is_torch, false)) AS is_torch
    FROM host_cause WHERE class IN ('operators', 'Python') AND source IS NOT NULL GROUP BY ALL
)
SELECT file_id, source, sum(calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch) AS calls,
       sum(ms) FILTER (WHERE NOT is_torch) AS ms, arg_max(called, calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch) AS what
FROM called GROUP BY file_id, source
HAVING sum(calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch) >= 50
   AND sum(ms) FILTER (WHERE NOT is_torch) < 0.02 * sum(calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch);

-- The optimizer's step, if it calls an operator for each parameter; `kinds` is how many.
CREATE OR REPLACE TEMP TABLE optimizer_time AS
WITH around AS (
    SELECT slice.id, slice.ts, slice.dur, regexp_extract(slice.name, '#(\w+)\.step$', 1) AS optimizer, process.file_id
    FROM slice JOIN thread_track ON thread_track.id = slice.track_id JOIN thread USING (utid) JOIN process USING (upid)
    WHERE slice.category = 'user_annotation' AND slice.name LIKE 'Optimizer.step#%'
),
scaled AS (
    SELECT file_id, sum(ms_per_step) / nullif(sum(unscaled_ns), 0) AS ms_per_ns FROM host_cause GROUP BY file_id
)
SELECT host_time.file_id, any_value(optimizer) AS optimizer, any_value(host_time.source) AS source,
       count(DISTINCT slice_id) FILTER (WHERE class = 'operators') / any_value(steps) AS calls,
       count(DISTINCT what) FILTER (WHERE class = 'operators') AS kinds,
       greatest(sum(host_time.dur - ns_per_event * host_time.events), 0) * any_value(ms_per_ns) AS ms
FROM host_time ASOF JOIN around ON host_time.file_id = around.file_id AND host_time.ts >= around.ts
JOIN host_step_time ON host_step_time.file_id = host_time.file_id
JOIN scaled ON scaled.file_id = host_time.file_id
WHERE host_time.ts < around.ts + around.dur AND class IN ('operators', 'Python') GROUP BY host_time.file_id
HAVING NOT bool_or(regexp_matches(what, '_foreach_|_fused_'));

CREATE OR REPLACE TEMP TABLE host_candidate AS
WITH waiting AS (
    SELECT file_id, class,
           -- Garbage is collected wherever objects are made, and a batch is asked for at one line.
           CASE WHEN class NOT IN ('data', 'garbage collection') OR what = 'collect' THEN source END AS place,
           what, source, ms_per_step, calls, coalesce(inner_what, '') AS inner_what, inner_source, inner_class
    FROM host_cause WHERE class NOT IN ('operators', 'Python', 'profiler', 'untraced')
),
inside AS (
    SELECT file_id, class, place, inner_class, inner_what, inner_source, sum(ms_per_step) AS ms FROM waiting
    WHERE inner_class NOT IN ('profiler', 'untraced')
    GROUP BY file_id, class, place, inner_class, inner_what, inner_source QUALIFY row_number() OVER (PARTITION BY file_id, class, place ORDER BY ms DESC, inner_source) = 1
),
waits AS (
    SELECT waiting.file_id, waiting.class AS kind, arg_max(waiting.source, ms_per_step) AS source,
           arg_max(what, ms_per_step) AS what, sum(ms_per_step) AS ms, max(calls) AS calls,
           any_value(inside.inner_what) AS inner_what, any_value(inside.inner_source) AS inner_source, any_value(inside.ms) AS inner_ms
    FROM waiting LEFT JOIN inside ON inside.file_id = waiting.file_id AND inside.class = waiting.class AND inside.place IS NOT DISTINCT FROM waiting.place
    GROUP BY waiting.file_id, waiting.class, waiting.place
),
python_line_time AS (
    SELECT file_id, source, sum(ms_per_step) AS ms, max(calls) AS calls, arg_max(coalesce(called, ''), ms_per_step) AS what,
           regexp_replace(source, ':\d+$', '') AS file, TRY_CAST(regexp_extract(source, ':(\d+)$', 1) AS BIGINT) AS line
    FROM host_cause ANTI JOIN busy_line USING (file_id, source)
    WHERE class = 'Python' AND NOT coalesce(is_torch OR is_operator, false) AND source IS NOT NULL GROUP BY file_id, source
),
-- Lines one after the other are a loop or a block, and one cause.
blocks AS (
    SELECT *, line - row_number() OVER (PARTITION BY file_id, file ORDER BY line) AS block FROM python_line_time
    WHERE ms > 0
),
python AS (
    SELECT file_id, arg_max(source, ms) AS source, sum(ms) AS ms, max(calls) AS calls, arg_max(what, ms) AS what
    FROM blocks GROUP BY file_id, file, block
),
copies AS (
    SELECT file_id, source, sum(ms_per_step) AS ms, max(calls) AS calls, arg_max(called, ms_per_step) AS what
    FROM host_cause ANTI JOIN busy_line USING (file_id, source)
    WHERE class = 'operators' AND what IN ('aten::copy_', 'aten::clone', 'aten::_to_copy')
      AND called IN ('contiguous', 'clone', 'to', 'copy_', 'deepcopy', 'float', 'double', 'half', 'bfloat16', 'repeat', 'cpu', 'numpy')
    GROUP BY file_id, source
),
doubles AS (
    SELECT file_id, sum(host_distance.ms) AS ms, sum(calls) AS calls, arg_max(source, host_distance.ms) AS source,
           arg_max(operator, host_distance.ms) AS what
    FROM host_distance WHERE dtype IN ('fp64', 'double', 'float64') GROUP BY file_id
),
-- Matrix products in fp32 on a GPU, by the names of the libraries' kernels; of light steps at the file with the host's.
singles AS (
    SELECT coalesce(description.described_by, work.file_id) AS file_id, arg_max(work.source, work.dur) AS source,
           coalesce(arg_max(work.operator, work.dur), 'a kernel') AS what,
           sum(work.dur) / 1e6 / any_value(steps) AS ms, count(*) / any_value(steps) AS calls
    FROM device_slice AS work JOIN (SELECT file_id, count(*) AS steps FROM step GROUP BY file_id) USING (file_id)
    LEFT JOIN description ON description.file_id = work.file_id
    WHERE work.kind = 'kernel' AND regexp_matches(work.name, '(?i)sgemm|simt|gemm_f32f32|f32f32_f32f32')
      AND NOT regexp_matches(work.name, '(?i)tf32|bf16|s1688')
    GROUP BY ALL
),
-- With what their operators would win at their floors.
computing AS (
    SELECT file_id, arg_max(source, host_distance.ms) AS source, 'operators' AS what,
           sum(host_distance.ms) AS ms, sum(calls) AS calls, sum(host_distance.win) AS win
    FROM host_distance WHERE attributed_by = 'host' GROUP BY file_id
),
logits AS (
    SELECT file_id, arg_max(source, host_distance.ms) AS source, 'log_softmax' AS what,
           sum(host_distance.ms) AS ms, sum(calls) AS calls, sum(host_distance.win) AS win
    FROM host_distance WHERE regexp_matches(operator, '^aten::(_log_softmax|nll_loss)') GROUP BY file_id
)
SELECT file_id, kind, source, what, ms, calls, inner_what, inner_source, inner_ms FROM waits
UNION ALL SELECT file_id, 'loop', source, what, ms, calls, NULL, NULL, NULL FROM busy_line
UNION ALL SELECT file_id, 'Python', source, what, ms, calls, NULL, NULL, NULL FROM python
UNION ALL SELECT file_id, 'copy', source, what, ms, calls, NULL, NULL, NULL FROM copies
UNION ALL SELECT file_id, 'double', source, what, ms, calls, NULL, NULL, NULL FROM doubles
UNION ALL SELECT file_id, 'single', source, what, ms, calls, NULL, NULL, NULL FROM singles
UNION ALL SELECT file_id, 'optimizer', source, optimizer, ms, calls, NULL, NULL, kinds FROM optimizer_time
UNION ALL SELECT file_id, 'threads', source, what, ms, calls, NULL, NULL, win FROM computing
UNION ALL SELECT file_id, 'logits', source, what, ms, calls, NULL, NULL, win FROM logits;
