-- Perfetto's functions, and its views that are only joins.

CREATE OR REPLACE VIEW args AS
SELECT arg_set_id AS id, arg_set_id,
       'args' || regexp_replace(replace(substr(item.fullkey, 2), '"', ''), '\[\d+\]', '', 'g') AS flat_key,
       'args' || replace(substr(item.fullkey, 2), '"', '') AS key,
       CASE WHEN item.type IN ('UBIGINT', 'BIGINT') THEN TRY_CAST(item.atom AS BIGINT)
            WHEN item.type = 'BOOLEAN' THEN (item.atom = 'true')::BIGINT END AS int_value,
       CASE WHEN item.type = 'VARCHAR' THEN json_extract_string(item.atom, '$') END AS string_value,
       CASE WHEN item.type = 'DOUBLE' THEN TRY_CAST(item.atom AS DOUBLE) END AS real_value,
       CASE item.type WHEN 'VARCHAR' THEN 'string' WHEN 'DOUBLE' THEN 'real' WHEN 'BOOLEAN' THEN 'bool' ELSE 'int' END AS value_type,
       json_extract_string(item.atom, '$') AS display_value
FROM arg_set, json_tree(arg_set.args) AS item
WHERE item.type NOT IN ('OBJECT', 'ARRAY', 'NULL');

-- The value under a key as `args` spells it, as text; a key may have dots of its own. Inner columns are
-- renamed, or the name that a caller gives, which stands in place of `wanted_set`, would mean them.
CREATE OR REPLACE MACRO EXTRACT_ARG(wanted_set, wanted_key) AS (
    SELECT coalesce(
        held.held_args -> ('$."' || substr(wanted_key, 6) || '"'),
        held.held_args -> ('$.' || regexp_replace(substr(wanted_key, 6), '([^.\[\]]+)(\.|\[|$)', '"\1"\2', 'g'))
    ) ->> '$'
    FROM (SELECT arg_set_id AS held_id, args AS held_args FROM arg_set) AS held
    WHERE held.held_id = wanted_set AND starts_with(wanted_key, 'args.')
);

CREATE OR REPLACE MACRO IIF(condition, yes, no) AS CASE WHEN condition THEN yes ELSE no END;
CREATE OR REPLACE MACRO trace_start() AS (
    SELECT coalesce(min(ts), 0) FROM (SELECT min(ts) AS ts FROM slice UNION ALL SELECT min(ts) FROM counter)
);
CREATE OR REPLACE MACRO trace_end() AS (
    SELECT coalesce(max(ts), 0)
    FROM (SELECT max(ts + greatest(dur, 0)) AS ts FROM slice UNION ALL SELECT max(ts) FROM counter)
);
CREATE OR REPLACE MACRO trace_dur() AS (trace_end() - trace_start());

CREATE OR REPLACE MACRO ancestor_slice(of_slice) AS TABLE
WITH RECURSIVE up AS (
    SELECT held.* FROM slice AS held WHERE held.id = (SELECT parent_id FROM slice WHERE id = of_slice)
    UNION ALL
    SELECT held.* FROM slice AS held JOIN up ON held.id = up.parent_id
)
SELECT * FROM up ORDER BY depth;

CREATE OR REPLACE MACRO descendant_slice(of_slice) AS TABLE
WITH RECURSIVE down AS (
    SELECT held.* FROM slice AS held WHERE held.parent_id = of_slice
    UNION ALL
    SELECT held.* FROM slice AS held JOIN down ON held.parent_id = down.id
)
SELECT * FROM down ORDER BY id;

-- Flows that can be reached from a slice: forwards, also from what is in a reached slice; or backwards, also from what
-- a reached slice is in; or either without those around or in it, and without a change of direction.
CREATE OR REPLACE MACRO following_flow(of_slice) AS TABLE
WITH RECURSIVE reached AS (
    SELECT of_slice::BIGINT AS reached_id
    UNION
    SELECT edge.to_id FROM reached JOIN (
        SELECT slice_out AS from_id, slice_in AS to_id FROM flow UNION ALL SELECT parent_id, id FROM slice
    ) AS edge ON edge.from_id = reached_id
)
SELECT arrow.* FROM flow AS arrow JOIN reached ON arrow.slice_out = reached_id ORDER BY arrow.id;

CREATE OR REPLACE MACRO preceding_flow(of_slice) AS TABLE
WITH RECURSIVE reached AS (
    SELECT of_slice::BIGINT AS reached_id
    UNION
    SELECT edge.to_id FROM reached JOIN (
        SELECT slice_in AS from_id, slice_out AS to_id FROM flow
        UNION ALL SELECT id, parent_id FROM slice WHERE parent_id IS NOT NULL
    ) AS edge ON edge.from_id = reached_id
)
SELECT arrow.* FROM flow AS arrow JOIN reached ON arrow.slice_in = reached_id ORDER BY arrow.id;

CREATE OR REPLACE MACRO directly_connected_flow(of_slice) AS TABLE
WITH RECURSIVE onward AS (
    SELECT arrow.* FROM flow AS arrow WHERE arrow.slice_out = of_slice
    UNION
    SELECT arrow.* FROM flow AS arrow JOIN onward ON arrow.slice_out = onward.slice_in
),
back AS (
    SELECT arrow.* FROM flow AS arrow WHERE arrow.slice_in = of_slice
    UNION
    SELECT arrow.* FROM flow AS arrow JOIN back ON arrow.slice_in = back.slice_out
)
SELECT * FROM (FROM onward UNION FROM back) ORDER BY id;

CREATE OR REPLACE VIEW thread_slice AS
SELECT s.id, s.ts, s.dur, s.category, s.name, s.track_id, tt.name AS track_name, thread.name AS thread_name,
       thread.utid, thread.tid, thread.is_main_thread, process.name AS process_name, process.upid, process.pid,
       s.depth, s.parent_id, s.arg_set_id
FROM slice s
JOIN thread_track tt ON tt.id = s.track_id
JOIN thread ON thread.utid = tt.utid
LEFT JOIN process ON process.upid = thread.upid;

CREATE OR REPLACE VIEW process_slice AS
SELECT s.id, s.ts, s.dur, s.category, s.name, s.track_id, pt.name AS track_name, process.name AS process_name,
       process.upid, process.pid, s.depth, s.parent_id, s.arg_set_id
FROM slice s
JOIN process_track pt ON pt.id = s.track_id
LEFT JOIN process ON process.upid = pt.upid;

CREATE OR REPLACE VIEW process_counter_track AS SELECT id, name, unit, upid FROM counter_track WHERE upid IS NOT NULL;

-- Of Perfetto's prelude and modules (slices.with_context, time.conversion) what a timeline has.
CREATE OR REPLACE VIEW slices AS FROM slice;
CREATE OR REPLACE VIEW instant AS SELECT id, ts, track_id, name, arg_set_id, category FROM slice WHERE dur = 0;
CREATE OR REPLACE VIEW trace_bounds AS SELECT trace_start() AS start_ts, trace_end() AS end_ts;
CREATE OR REPLACE VIEW thread_or_process_slice AS
FROM thread_slice
UNION ALL BY NAME
FROM process_slice;

-- What was not read, as Perfetto counts it: a row for each reason and file.
CREATE OR REPLACE VIEW stats AS
SELECT reason AS name, file_id AS idx, 'indexed' AS key, 'data_loss' AS severity, 'analysis' AS source,
       count(*) AS value, any_value(file) AS description
FROM reject GROUP BY reason, file_id;

CREATE OR REPLACE MACRO total(of_value) AS coalesce(sum(of_value), 0)::DOUBLE;
CREATE OR REPLACE MACRO percentile(of_value, percent) AS quantile_cont(of_value, percent / 1e2);
CREATE OR REPLACE MACRO abs_time_str(at_ts) AS (
    SELECT strftime(make_timestamp_ns(at_ts + base_ns - shift_ns), '%Y-%m-%dT%H:%M:%S.%n')
    FROM trace_file WHERE base_ns <> 0 ORDER BY id LIMIT 1
);
CREATE OR REPLACE MACRO time_from_ns(ns) AS ns;
CREATE OR REPLACE MACRO time_from_us(us) AS us * 1_000;
CREATE OR REPLACE MACRO time_from_ms(ms) AS ms * 1_000_000;
CREATE OR REPLACE MACRO time_from_s(s) AS s * 1_000_000_000;
CREATE OR REPLACE MACRO time_to_us(ns) AS ns // 1_000;
CREATE OR REPLACE MACRO time_to_ms(ns) AS ns // 1_000_000;
CREATE OR REPLACE MACRO time_to_s(ns) AS ns // 1_000_000_000;
CREATE OR REPLACE MACRO slice_is_ancestor(outer_id, inner_id) AS (
    SELECT outside.track_id = inside.track_id AND outside.ts <= inside.ts AND outside.depth < inside.depth
           AND outside.ts + outside.dur >= inside.ts + inside.dur
    FROM slice AS outside, slice AS inside WHERE outside.id = outer_id AND inside.id = inner_id
);
