-- Events missing from the trace: a row per kind of loss. Needs attribution.sql.
CREATE OR REPLACE TABLE loss AS
WITH work AS (SELECT launch_id FROM device_slice UNION ALL SELECT launch_id FROM untimed_slice),
capture AS (
    -- A launch during a graph capture runs no kernel until the graph is replayed.
    SELECT utid, ts AS began, coalesce(lead(ts) OVER (PARTITION BY utid ORDER BY ts), ts) AS ended, name
    FROM device_call WHERE name LIKE '%StreamBeginCapture%' OR name LIKE '%StreamEndCapture%'
),
unanswered AS (
    SELECT call.* FROM device_call AS call
    WHERE regexp_matches(call.name, '^(cudaLaunchKernel|cuLaunchKernel|cudaGraphLaunch|cudaMemcpyAsync|cudaMemsetAsync)')
      AND NOT EXISTS (FROM work WHERE work.launch_id = call.slice_id)
      AND NOT EXISTS (FROM capture WHERE capture.utid = call.utid AND capture.name LIKE '%BeginCapture%'
                      AND call.ts BETWEEN capture.began AND capture.ended)
)
SELECT what, found, of FROM (
    SELECT 'launches whose work on the device is missing' AS what, (SELECT count(*) FROM unanswered) AS found,
           (SELECT count(*) FROM device_call WHERE regexp_matches(name, 'Launch|Memcpy|Memset')) AS of
    UNION ALL
    SELECT 'pieces of device work whose launch is missing', (SELECT count(*) FROM work WHERE launch_id IS NULL),
           (SELECT count(*) FROM work)
    UNION ALL
    SELECT 'events that never ended', (SELECT count(*) FROM slice WHERE dur = -1), (SELECT count(*) FROM slice)
    UNION ALL
    -- The profiler starts a flow at every CUDA call, also at those without device work.
    SELECT 'events that could not be read',
           (SELECT count(*) FROM reject WHERE reason <> 'a flow event whose other end is missing'), (SELECT sum(events)::BIGINT FROM trace_file)
) WHERE found > 0;
