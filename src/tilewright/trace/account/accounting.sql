-- Tables and views of the classes of time. Python fills the tables.

CREATE OR REPLACE TABLE device_time (   -- each device's time from the first step to the end of the last, without holes
    upid    BIGINT NOT NULL,            -- the process that stands for the device
    ts      BIGINT NOT NULL,
    dur     BIGINT NOT NULL,
    class   VARCHAR NOT NULL,           -- kernel, wave tail, communication, copy, synchronisation, launch-bound, idle
    cause   BIGINT                      -- slice: of the work, of the wait, of the work that came late, or of
                                        -- the call in which the host was before the first work
);
CREATE OR REPLACE TABLE lost (          -- what each wait of the host cost a device
    upid        BIGINT NOT NULL,
    slice_id    BIGINT NOT NULL,
    lost_ns     BIGINT NOT NULL
);

-- When the host was active: in an operator, a CUDA call, or PyTorch's own Python around several of them.
-- Other ranges are the user's and may contain a sleep.
CREATE OR REPLACE TEMP TABLE host_activity AS
SELECT process.file_id, slice.ts, greatest(slice.dur, 0) AS dur
FROM slice
JOIN thread_track ON thread_track.id = slice.track_id
JOIN thread USING (utid)
JOIN process USING (upid)
WHERE (slice.category IN ('cpu_op', 'cuda_runtime', 'cuda_driver')
       OR (slice.category = 'user_annotation' AND regexp_matches(slice.name, '^(Optimizer\.|## Call CompiledFxGraph)'))
       -- Light steps have no operators, only phases.
       OR (slice.category = 'user_annotation' AND slice.name LIKE 'phase %'
           AND process.file_id IN (SELECT file_id FROM description)))
  AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61;

-- Each device's share of each step; the classes of one step and device add up to the step.
CREATE OR REPLACE VIEW accounting AS
WITH cut AS (
    SELECT step.file_id, step.ts AS step_ts, step.name AS step, step.dur AS step_dur, device_time.upid, class,
           least(device_time.ts + device_time.dur, step.ts + step.dur) - greatest(device_time.ts, step.ts) AS dur
    FROM device_time
    JOIN process USING (upid)
    JOIN step ON step.file_id = process.file_id
     AND device_time.ts < step.ts + step.dur AND step.ts < device_time.ts + device_time.dur
)
SELECT file_id, upid, step_ts, step, step_dur, class, sum(dur)::BIGINT AS dur, 1e2 * sum(dur) / step_dur AS percent
FROM cut
GROUP BY file_id, upid, step_ts, step, step_dur, class;

-- The mean step of each device: milliseconds and share by class.
CREATE OR REPLACE VIEW step_account AS
WITH total AS (SELECT file_id, count(*) AS steps, sum(dur) AS dur FROM step GROUP BY file_id)
SELECT accounting.file_id, accounting.upid, class, sum(accounting.dur) / 1e6 / any_value(total.steps) AS ms_per_step,
       1e2 * sum(accounting.dur) / any_value(total.dur) AS percent, any_value(total.steps) AS steps
FROM accounting JOIN total USING (file_id)
GROUP BY accounting.file_id, accounting.upid, class
ORDER BY file_id, upid, ms_per_step DESC;

-- Calls that made the host wait, by place: how long it waited, how much of the device's time that cost, and how long
-- the host was in what the line called, waiting or not: `print` also formats.
CREATE OR REPLACE VIEW synchronisation AS
WITH steps AS (SELECT file_id, count(*) AS steps FROM step GROUP BY file_id),
cost AS (SELECT slice_id, max(lost_ns) AS lost_ns FROM lost GROUP BY slice_id),
each AS (
    SELECT wait.file_id, wait.source, wait.source_function, wait.exact, wait.caller_id,
           coalesce(wait.caller, wait.operator, wait.name) AS call, max(wait.copy) AS copy, count(*) AS calls,
           sum(wait.dur) AS waited, coalesce(sum(cost.lost_ns), 0) AS lost
    FROM wait
    JOIN step ON step.file_id = wait.file_id AND wait.ts >= step.ts AND wait.ts < step.ts + step.host_dur
    LEFT JOIN cost USING (slice_id)
    GROUP BY ALL
)
SELECT each.file_id, source, source_function, exact, call,
       any_value(call) || coalesce(', ' || max(copy), '') AS what, sum(calls)::BIGINT AS calls,
       sum(waited) / 1e6 / any_value(steps) AS waited_ms_per_step,
       sum(lost) / 1e6 / any_value(steps) AS lost_ms_per_step,
       sum(slice.dur) / 1e6 / any_value(steps) AS spent_ms_per_step
FROM each
JOIN steps USING (file_id)
JOIN slice ON slice.id = each.caller_id
GROUP BY each.file_id, source, source_function, exact, call
ORDER BY lost_ms_per_step DESC, waited_ms_per_step DESC;

-- The time from a launch to the start on the device, and the number of launches not yet started then.
CREATE OR REPLACE VIEW launch_lag AS
SELECT slice_id, upid, stream, kind, name, operator, launch_ts, launch_dur, ts, dur, ts - launch_ts AS lag_ns
FROM device_slice
WHERE launch_ts IS NOT NULL;

CREATE OR REPLACE VIEW queue_depth AS
WITH change AS (
    SELECT upid, launch_ts AS ts, count(*) AS change FROM launch_lag GROUP BY ALL
    UNION ALL
    SELECT upid, greatest(ts, launch_ts), -count(*) FROM launch_lag GROUP BY ALL
)
SELECT upid, ts, sum(sum(change)) OVER (PARTITION BY upid ORDER BY ts)::BIGINT AS depth
FROM change GROUP BY upid, ts ORDER BY upid, ts;
