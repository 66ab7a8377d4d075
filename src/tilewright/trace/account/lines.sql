-- The user's line of every operator in a file without a device. Needs attribution.sql.

CREATE OR REPLACE TABLE scratch.host_line AS
WITH RECURSIVE node AS (
    SELECT slice.id, slice.parent_id, slice.category, thread.utid, slice.ts + least(slice.dur, 1000) // 2 AS ts,
           frame.name AS frame
    FROM slice
    LEFT JOIN frame USING (id)
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    WHERE slice.depth < 1000 AND process.file_id NOT IN (SELECT file_id FROM scratch.device_file)
),
down AS (
    SELECT id, category, utid, ts, frame FROM node WHERE parent_id IS NULL
    UNION ALL
    SELECT node.id, node.category, node.utid, node.ts, coalesce(node.frame, down.frame)
    FROM node JOIN down ON node.parent_id = down.id
),
-- Calls of an operator's backward get the line of its forward, by the innermost such operator.
link AS (
    SELECT slice_in AS id, min(slice_out) AS forward_id FROM flow WHERE category = 'fwdbwd' GROUP BY slice_in
),
backward AS (
    SELECT id, forward_id FROM link
    UNION ALL
    SELECT node.id, backward.forward_id
    FROM node JOIN backward ON node.parent_id = backward.id
    WHERE node.id NOT IN (SELECT id FROM link)
),
begun AS (
    SELECT down.id, coalesce(forward.frame, down.frame) AS frame,
           CASE WHEN forward.frame IS NULL THEN down.utid ELSE forward.utid END AS utid,
           CASE WHEN forward.frame IS NULL THEN down.ts ELSE forward.ts END AS ts
    FROM down
    LEFT JOIN backward USING (id)
    LEFT JOIN down AS forward ON forward.id = backward.forward_id
    WHERE down.category IN ('cpu_op', 'user_annotation')
)
SELECT begun.id,
       coalesce(came_to(spelled.path, line.file, line.function, line.line, frame.path, frame.file, frame.function), frame.place) AS source
FROM begun ASOF LEFT JOIN python_line AS line ON line.utid = begun.utid AND begun.ts >= line.ts
LEFT JOIN scratch.frame_place AS frame ON frame.name = begun.frame
LEFT JOIN spelled ON spelled.file = line.file AND spelled.function = line.function
WHERE source IS NOT NULL;
