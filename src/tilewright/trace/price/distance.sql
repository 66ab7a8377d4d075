-- What each operator took, beside the least that it could take.

-- The mean step: as recorded, and bare, where a profile of tilewright timed steps without the profiler. On a host, where
-- the profiler's own work lies between the operators and within them, their times shrink with the step; those of a
-- device are what they are, and the host is late by less. Of streams or threads side by side each has its share.
CREATE OR REPLACE VIEW bare_step AS
WITH recorded AS (SELECT file_id, count(*) AS steps, avg(dur) / 1e6 AS ms FROM step GROUP BY file_id),
busy AS (
    SELECT file_id, sum(device_ns) / 1e6 AS ms, file_id NOT IN (SELECT file_id FROM device_slice) AS on_host
    FROM operator_distance GROUP BY file_id
),
timed AS (
    SELECT recorded.file_id, steps, recorded.ms AS recorded_ms, on_host, busy.ms / steps AS busy_ms,
           least(coalesce(recording.bare_us / 1e3, recorded.ms), recorded.ms) AS bare_ms
    FROM recorded JOIN busy USING (file_id) LEFT JOIN recording USING (file_id)
)
SELECT file_id, steps, recorded_ms, bare_ms,
       least(1, bare_ms / nullif(busy_ms, 0), CASE WHEN on_host THEN bare_ms / nullif(recorded_ms, 0) END) AS scale
FROM timed;

CREATE OR REPLACE VIEW distance AS
SELECT file_id, operator, shapes, dtype, source, phase, attributed_by, calls, device_ns / 1e6 / steps AS ms_per_step,
       1e2 * device_ns / nullif(sum(device_ns) OVER (PARTITION BY file_id), 0) AS percent,
       bytes, flops, transcendentals, provenance, floor_us, bound,
       -- A floor of one call beside the mean of all of them.
       device_ns / 1e3 / calls / nullif(floor_us, 0) AS times_floor,
       1e0 * bytes * calls / nullif(device_ns, 0) AS GBps,
       1e0 * flops * calls / nullif(device_ns, 0) / 1e3 AS TFLOPs,
       waited_ns / 1e6 / steps AS host_late_ms_per_step,
       CASE WHEN waited_ns > device_ns AND attributed_by <> 'host' THEN 'host-bound'
            -- Faster than DRAM: some of the data was in a cache.
            WHEN bound = 'DRAM-bound' AND device_ns < 950.0 * calls * floor_us THEN 'cache-bound'
            ELSE coalesce(bound, 'unknown') END AS verdict,
       CASE WHEN floor_us IS NOT NULL THEN greatest(typical_ns * scale / 1e3 - calls * floor_us, 0) / 1e3 / steps END
           AS win_ms_per_step, scale
FROM operator_distance JOIN bare_step USING (file_id);

-- How much of the device's time is known to that degree: the last column is the share.
CREATE OR REPLACE VIEW attribution AS
WITH total AS (SELECT file_id, sum(device_ns) AS ns FROM operator_distance GROUP BY file_id),
part AS (
    SELECT file_id, 'operator' AS what, device_ns FROM operator_distance
    WHERE attributed_by IS NOT NULL AND attributed_by NOT IN ('graph', 'range')
    UNION ALL
    SELECT file_id, 'source line', device_ns FROM operator_distance WHERE source IS NOT NULL
    UNION ALL
    SELECT file_id, 'bytes', device_ns FROM operator_distance WHERE provenance <> 'unknown'
    UNION ALL
    SELECT file_id, 'verdict', device_ns FROM operator_distance WHERE bound IS NOT NULL
)
SELECT file_id, what, 1e2 * sum(device_ns) / any_value(ns) AS percent
FROM part JOIN total USING (file_id)
GROUP BY file_id, what
ORDER BY file_id, percent DESC, what;
