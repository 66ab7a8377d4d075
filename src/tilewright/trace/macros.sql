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

-- Flows that can be reached from a slice, forwards, backwards, or both without a change of direction.
CREATE OR REPLACE MACRO following_flow(of_slice) AS TABLE
WITH RECURSIVE onward AS (
    SELECT arrow.* FROM flow AS arrow WHERE arrow.slice_out = of_slice
    UNION
    SELECT arrow.* FROM flow AS arrow JOIN onward ON arrow.slice_out = onward.slice_in
)
SELECT * FROM onward ORDER BY id;

CREATE OR REPLACE MACRO preceding_flow(of_slice) AS TABLE
WITH RECURSIVE back AS (
    SELECT arrow.* FROM flow AS arrow WHERE arrow.slice_in = of_slice
    UNION
    SELECT arrow.* FROM flow AS arrow JOIN back ON arrow.slice_in = back.slice_out
)
SELECT * FROM back ORDER BY id;

CREATE OR REPLACE MACRO directly_connected_flow(of_slice) AS TABLE
SELECT * FROM (FROM following_flow(of_slice) UNION FROM preceding_flow(of_slice)) ORDER BY id;

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
