-- Of a module made of PyTorch's own alone a graph knows the layer, `layer 2: GELU`, and the host the line that called it.
CREATE OR REPLACE TEMP MACRO placed(own, host) AS
    CASE WHEN own LIKE 'layer %' AND host IS NOT NULL THEN host || ', ' || own ELSE coalesce(own, host) END;

-- What each operator did to the devices, or, in a file without a device, to the host by itself: one row for each
-- kind of call, that is its name, operands, line and phase.

CREATE OR REPLACE TEMP VIEW operator_call AS
-- The device waited for the host where it ran dry before the launch; otherwise it took its own time between two.
WITH late AS (
    SELECT time.cause AS slice_id, sum(time.dur)::BIGINT AS waited
    FROM device_time AS time JOIN device_slice AS d ON d.slice_id = time.cause
    WHERE time.class = 'launch-bound' AND d.launch_ts > time.ts
    GROUP BY time.cause
),
work AS (
    SELECT d.*, coalesce(late.waited, 0) AS waited,
           CASE WHEN d.kind IN ('copy', 'fill') AND d.operator_id IS NULL THEN d.name END AS plain,
           regexp_replace(d.name, '_after$', '') AS kernel
    FROM device_slice d LEFT JOIN late USING (slice_id)
),
-- What tilewright compiled: kernels of regions, and what else it runs by itself on a CPU.
compiled AS (
    SELECT coalesce(region, name) AS name, bool_or(region IS NOT NULL) AS generated, any_value(source) AS source
    FROM operator WHERE stage = 'after' GROUP BY coalesce(region, name)
    UNION ALL
    SELECT DISTINCT name, true, NULL FROM region
    WHERE name NOT IN (SELECT region FROM operator WHERE stage = 'after' AND region IS NOT NULL)
),
-- A region's kernel bears its name; what sums up its columns afterwards is a second kernel of the same call.
named AS (
    SELECT work.*, twin.one_call, coalesce(region.name, regexp_extract(work.kernel, '^(?:forward|backward)\d+_.*$')) AS found,
           found <> '' AS is_region, CASE WHEN is_region THEN found END AS region,
           NOT (is_region AND work.name <> work.kernel) AS begins, region.source AS own_source
    FROM work
    LEFT JOIN compiled AS region ON region.name = work.kernel AND region.generated
    LEFT JOIN scratch.twin USING (slice_id)
),
keyed AS (
    SELECT *, region IS NULL AND attributed_by IN ('launch', 'capture', 'description', 'same kernel') AS called,
           coalesce(region, operator, plain, name, '(no name)') AS subject
    FROM named
),
instance AS (
    SELECT file_id, subject, called, any_value(device) AS device,
           CASE WHEN region IS NOT NULL THEN 'region' ELSE attributed_by END AS attributed_by,
           CASE WHEN called THEN operator_id END AS operator_id,
           placed(any_value(own_source), any_value(source)) AS source,
           any_value(forward_ranges) AS forward_ranges, any_value(ranges) AS ranges,
           sum(dur)::BIGINT AS device_ns, sum(waited)::BIGINT AS waited_ns, bool_or(begins) AS begins,
           max(least(list_product(grid), 1e15)::BIGINT) FILTER (WHERE len(grid) = 3) AS programs,
           any_value(region) AS region, bool_or(kind = 'communication') AS collective,
           TRY_CAST(CASE WHEN collective THEN sum(bytes) FILTER (WHERE kind = 'communication') ELSE sum(bytes) END
                    AS BIGINT) AS moved,
           TRY_CAST(sum(bytes_out) AS BIGINT) AS given,
           -- A kernel with a fill of its workspace is not what a fill moves.
           CASE WHEN collective THEN 'communication' WHEN min(kind) = max(kind) THEN min(kind)
                ELSE 'kernel' END AS kind, min(name) AS kernel
    FROM keyed
    -- One call of an operator may be several kernels; replays of one captured call, and light steps, are kept apart.
    GROUP BY file_id, subject, called, CASE WHEN region IS NOT NULL THEN 'region' ELSE attributed_by END,
             CASE WHEN called THEN operator_id END,
             CASE WHEN called AND attributed_by = 'launch' THEN NULL
                  WHEN called AND attributed_by = 'capture' THEN correlation
                  WHEN called AND attributed_by = 'description' THEN one_call ELSE slice_id END
),
on_device AS (
    SELECT instance.* EXCLUDE (called, collective, forward_ranges, ranges), slice.arg_set_id,
           CASE WHEN len(forward_ranges) > 0 THEN list_concat(forward_ranges, ['backward']) ELSE ranges END AS around
    FROM instance
    LEFT JOIN slice ON slice.id = instance.operator_id
),
-- Of ranges, only those around what runs on a CPU without operators: tilewright's kernels and draws, and Inductor's code.
on_host AS (
    SELECT call.file_id, call.name AS subject, NULL AS device,
           CASE WHEN region.name IS NULL THEN 'host' ELSE 'region' END AS attributed_by, call.id AS operator_id,
           placed(region.source, host_line.source) AS source, call.self_ns AS device_ns, 0 AS waited_ns, true AS begins,
           NULL AS programs, region.name AS region, NULL AS moved, NULL AS given, 'operator' AS kind, '' AS kernel,
           slice.arg_set_id, []::VARCHAR[] AS around
    FROM (FROM host_call ANTI JOIN scratch.device_file USING (file_id)) AS call
    JOIN slice USING (id)
    LEFT JOIN scratch.host_line USING (id)
    LEFT JOIN compiled AS region ON region.name = call.name AND slice.category = 'user_annotation'
    WHERE (call.kind = 'operator' OR region.name IS NOT NULL) AND call.self_ns > 0
),
described AS (
    SELECT work.*, arg_set.args->['$."Input Dims"', '$."Input type"', '$."Input Strides"', '$."Concrete Inputs"'] AS told,
           told[1] AS dims, told[2] AS types, told[3] AS strides, told[4] AS concrete
    FROM (FROM on_device UNION ALL BY NAME FROM on_host) AS work
    LEFT JOIN arg_set USING (arg_set_id)
)
SELECT file_id, device, subject, attributed_by, region, kind, source,
       array_to_string(list_filter(around, lambda one: one NOT LIKE 'ProfilerStep#%'), ' / ') AS phase,
       dims::VARCHAR AS dims, types::VARCHAR AS types, strides::VARCHAR AS strides,
       -- Values differ from call to call (a step's bias correction) and matter only where they set a shape.
       any_value(concrete)::VARCHAR AS concrete, coalesce(any_value(kernel), '') AS kernel,
       greatest(count(*) FILTER (WHERE begins), 1) AS calls,
       sum(device_ns)::BIGINT AS device_ns,
       -- A thread of the host that loses its processor loses it in one call; equal calls take as long as their median.
       CASE WHEN any_value(device) IS NULL THEN least(sum(device_ns), median(device_ns) * count(*))
            ELSE sum(device_ns) END::BIGINT AS typical_ns,
       sum(waited_ns)::BIGINT AS waited_ns,
       max(programs) AS programs, moved, given
FROM described
GROUP BY file_id, device, subject, attributed_by, region, kind, source, phase, dims::VARCHAR, types::VARCHAR,
         strides::VARCHAR, moved, given
ORDER BY device_ns DESC, subject, dims, moved;
