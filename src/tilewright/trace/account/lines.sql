-- The user's line behind every operator of a file that saw no device. Needs attribution.sql.

CREATE OR REPLACE TEMP TABLE host_line AS
WITH RECURSIVE node AS (
    SELECT slice.id, slice.parent_id, slice.category,
           CASE WHEN own_frame(slice.category, slice.name) THEN slice.name END AS frame
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    WHERE slice.depth < 1000 AND process.file_id NOT IN (SELECT file_id FROM device_file)
),
down AS (
    SELECT id, category, frame FROM node WHERE parent_id IS NULL
    UNION ALL
    SELECT node.id, node.category, coalesce(node.frame, down.frame)
    FROM node JOIN down ON node.parent_id = down.id
),
-- What the backward of an operator calls has the line of its forward; the innermost such operator decides.
link AS (
    SELECT slice_in AS id, min(slice_out) AS forward_id FROM flow WHERE category = 'fwdbwd' GROUP BY slice_in
),
backward AS (
    SELECT id, forward_id FROM link
    UNION ALL
    SELECT node.id, backward.forward_id
    FROM node JOIN backward ON node.parent_id = backward.id
    WHERE node.id NOT IN (SELECT id FROM link)
)
SELECT down.id, place_of(coalesce(forward.frame, down.frame)) AS source
FROM down
LEFT JOIN backward USING (id)
LEFT JOIN down AS forward ON forward.id = backward.forward_id
WHERE down.category IN ('cpu_op', 'user_annotation') AND coalesce(forward.frame, down.frame) IS NOT NULL;
