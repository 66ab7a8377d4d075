-- The work of the devices with its launch, operator and line of the user's program.

-- Calls into CUDA by the host. A correlation is unique within a process.
CREATE OR REPLACE TABLE device_call AS
SELECT slice.id AS slice_id, slice.ts, greatest(slice.dur, 0) AS dur, slice.name, thread.utid, process.file_id,
       TRY_CAST(arg_set.args->>'$.correlation' AS BIGINT) AS correlation
FROM slice
JOIN thread_track ON thread_track.id = slice.track_id
JOIN thread USING (utid)
JOIN process USING (upid)
LEFT JOIN arg_set USING (arg_set_id)
WHERE slice.category IN ('cuda_runtime', 'cuda_driver')
  AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61;

-- Bytes of a collective, from PyTorch's description; NULL if the dtype is unknown or the size absurd.
CREATE OR REPLACE TEMP MACRO message_bytes(args, direction) AS (
    TRY_CAST(
        TRY_CAST(args->>('$."' || direction || ' msg nelems"') AS HUGEINT)
        * MAP {'Double': 8, 'Long': 8, 'Float': 4, 'Int': 4, 'Half': 2, 'BFloat16': 2, 'Short': 2, 'Byte': 1,
               'Char': 1, 'Bool': 1, 'Float8_e4m3fn': 1, 'Float8_e5m2': 1}[args->>'$.dtype']
        AS BIGINT)
);

-- Kernels, copies and fills, each with the call that launched it. Sizes of a launch are threads and bytes.
CREATE OR REPLACE TEMP TABLE device_work AS
WITH work AS (
    SELECT slice.id AS slice_id, slice.ts, greatest(slice.dur, 0) AS dur, slice.name, process.upid, process.file_id,
           coalesce(process.device, process.pid) AS device, thread.tid AS stream, arg_set.args,
           -- All keys at once: each extraction parses the text of the arguments again.
           arg_set.args->>['$.correlation', '$.grid', '$.block', '$."registers per thread"', '$."shared memory"',
                           '$.bytes', '$.stream', '$."graph node id"'] AS told,
           CASE slice.category WHEN 'gpu_memcpy' THEN 'copy' WHEN 'gpu_memset' THEN 'fill'
                ELSE CASE WHEN regexp_matches(slice.name, '^(nccl|ncclDevKernel|ncclKernel)') THEN 'communication'
                          ELSE 'kernel' END END AS kind
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    LEFT JOIN arg_set USING (arg_set_id)
    WHERE slice.category IN ('kernel', 'gpu_memcpy', 'gpu_memset')
      -- Exclude absurd times, whose sums would overflow.
      AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61
),
by_flow AS (
    SELECT slice_in AS slice_id, min(slice_out) AS launch_id FROM flow WHERE category = 'ac2g' GROUP BY slice_in
)
SELECT work.* EXCLUDE (args, told) REPLACE (coalesce(stream, TRY_CAST(told[7] AS BIGINT)) AS stream),
       TRY_CAST(told[1] AS BIGINT) AS correlation,
       coalesce(launch.slice_id, by_flow.launch_id) AS launch_id,
       TRY_CAST(told[2] AS BIGINT[]) AS grid, TRY_CAST(told[3] AS BIGINT[]) AS block,
       TRY_CAST(told[8] AS BIGINT) AS graph_node,
       TRY_CAST(told[4] AS BIGINT) AS registers, TRY_CAST(told[5] AS BIGINT) AS shared_bytes,
       -- Bytes of a copy or fill; of a collective its input, and in `bytes_out` its output.
       CASE WHEN kind = 'communication' THEN coalesce(TRY_CAST(told[6] AS BIGINT), message_bytes(args, 'In'))
            ELSE TRY_CAST(told[6] AS BIGINT) END AS bytes,
       CASE WHEN kind = 'communication' THEN message_bytes(args, 'Out') END AS bytes_out
FROM work
-- Several processes in one file (Nsight Systems) may use the same correlation; then the flow decides.
LEFT JOIN (
    SELECT file_id, correlation, any_value(slice_id) AS slice_id FROM device_call
    WHERE correlation IS NOT NULL GROUP BY file_id, correlation HAVING count(*) = 1
) AS launch ON launch.file_id = work.file_id AND launch.correlation = TRY_CAST(told[1] AS BIGINT)
LEFT JOIN by_flow ON by_flow.slice_id = work.slice_id;

-- A frame of the user's code: `train.py(12): step`, the file and the first line of its function; of a notebook
-- `In [3](12): step`.
CREATE OR REPLACE TEMP MACRO own_frame(name) AS (
    regexp_matches(name, '(\.py|^In \[\d+\])\(\d+\): ')
    AND NOT regexp_matches(name, '(^|/)(torch|triton|tilewright)/|^(typer|click)/|/(site|dist)-packages/|/lib/python\d|torchinductor_')
    AND NOT regexp_matches(name, '^(threading|contextlib|functools|runpy)\.py\(|^c[a-z0-9]{40,}\.py\(')
);

-- Frames that ran when the profiler started are the first that it writes of a thread, each in the one before it: down to
-- what started it, or all where a thread began. Their line is where the program was then, and is no operator's:
-- `train.py(?): <module>`.
CREATE OR REPLACE TEMP TABLE frame AS
WITH thread_start AS (
    SELECT track_id, min(ts) AS ts FROM slice WHERE category = 'python_function' GROUP BY track_id
),
written_first AS (
    SELECT slice.id, slice.track_id, slice.name, row_number() OVER begun AS position,
           coalesce(slice.parent_id = lag(slice.id) OVER begun, true) AS nested
    FROM slice JOIN thread_start USING (track_id)
    WHERE slice.category = 'python_function' AND slice.ts::HUGEINT - thread_start.ts < 1_000_000
    WINDOW begun AS (PARTITION BY slice.track_id ORDER BY slice.ts, slice.depth)
),
chain AS (
    SELECT *, regexp_matches(name, '(^|/)torch/(profiler|autograd)/profiler\.py\(') AS starts_profiler
    FROM written_first
    QUALIFY bool_and(nested) OVER (PARTITION BY track_id ORDER BY position)
),
running AS (
    SELECT id FROM chain
    WINDOW thread AS (PARTITION BY track_id)
    QUALIFY position < max(position) FILTER (WHERE starts_profiler) OVER thread
         OR bool_or(position = 1 AND name LIKE 'threading.py(%): \_bootstrap' ESCAPE '\') OVER thread
)
SELECT slice.id, CASE WHEN running.id IS NULL THEN slice.name
                      ELSE regexp_replace(slice.name, '\(\d+\): ', '(?): ') END AS name
FROM slice LEFT JOIN running USING (id)
WHERE slice.category = 'python_function' AND slice.name IN (
    SELECT name FROM (SELECT DISTINCT name FROM slice WHERE category = 'python_function')
    -- A user's file may be called as one of the standard library; of one whose lines were traced this is known.
    WHERE own_frame(name) AND (regexp_extract(name, '^[^/(]+[/(]') NOT IN (FROM standard)
                               OR regexp_extract(name, '([^/]*)\(', 1) IN (SELECT file FROM python_line))
);

-- What a frame's name says, once for each name: the path and its last part, the function, and where that begins.
CREATE OR REPLACE TABLE scratch.frame_place AS
SELECT name, regexp_replace(name, '\((?:\d+|\?)\): .*$', '') AS path, regexp_extract(name, '([^/]*)\((?:\d+|\?)\): ', 1) AS file,
       regexp_extract(name, '\): (.*)$', 1) AS function,
       regexp_replace(regexp_replace(name, '\((\d+)\): .*$', ':\1'), '\(\?\): .*$', '') AS place
FROM (SELECT DISTINCT name FROM frame);

-- The folder of each file with lines, from its frames.
CREATE OR REPLACE TEMP TABLE spelled AS
SELECT file, function, any_value(path) AS path FROM scratch.frame_place GROUP BY ALL HAVING count(DISTINCT path) = 1;

-- The slices that contain a launch: operators, ranges and Python frames, the innermost first. Calls deeper than
-- Python's stack limit are excluded, which bounds this table for malicious files.
CREATE OR REPLACE TEMP TABLE enclosing AS
WITH RECURSIVE host AS (
    SELECT id, parent_id, depth FROM slice
    WHERE category NOT IN ('kernel', 'gpu_memcpy', 'gpu_memset', 'gpu_user_annotation') OR category IS NULL
),
up AS (
    SELECT launch.slice_id AS inner_id, host.parent_id AS outer_id, 1 AS hops
    FROM device_call AS launch JOIN host ON host.id = launch.slice_id
    WHERE host.parent_id IS NOT NULL AND host.depth < 1000
    UNION ALL
    SELECT up.inner_id, host.parent_id, up.hops + 1
    FROM up JOIN host ON host.id = up.outer_id
    WHERE host.parent_id IS NOT NULL
)
SELECT up.inner_id, up.outer_id, up.hops, slice.category, slice.name, up.outer_id IN (SELECT id FROM frame) AS own_frame
FROM up JOIN slice ON slice.id = up.outer_id;

-- The backward of an operator runs on an autograd thread and gets the lines and ranges of its forward. The
-- engine's range around a node also contains the work after the node, such as the sum of a bias gradient.
CREATE OR REPLACE TEMP TABLE forward_of AS
WITH link AS (
    SELECT slice_in AS backward_id, slice_out AS forward_id FROM flow WHERE category = 'fwdbwd'
    UNION
    SELECT parent.id, flow.slice_out
    FROM flow
    JOIN slice ON slice.id = flow.slice_in
    JOIN slice AS parent ON parent.id = slice.parent_id
    WHERE flow.category = 'fwdbwd' AND parent.name LIKE 'autograd::engine::evaluate_function:%'
)
SELECT enclosing.inner_id, arg_min(link.forward_id, (enclosing.hops, link.forward_id)) AS forward_id
FROM enclosing JOIN link ON link.backward_id = enclosing.outer_id
GROUP BY enclosing.inner_id;

CREATE OR REPLACE TEMP TABLE around_forward AS
WITH RECURSIVE up AS (
    SELECT DISTINCT forward_id AS inner_id, forward_id AS outer_id, 0 AS hops FROM forward_of
    UNION ALL
    SELECT up.inner_id, slice.parent_id, up.hops + 1
    FROM up JOIN slice ON slice.id = up.outer_id
    WHERE slice.parent_id IS NOT NULL AND up.hops < 1000
)
SELECT up.inner_id, up.outer_id, up.hops, slice.category, slice.name, up.outer_id IN (SELECT id FROM frame) AS own_frame
FROM up JOIN slice ON slice.id = up.outer_id;

CREATE OR REPLACE TEMP TABLE launch_frame AS
WITH own AS (
    SELECT inner_id,
           arg_min(outer_id, hops) FILTER (WHERE category = 'cpu_op') AS operator_id,
           arg_min(name, hops) FILTER (WHERE category = 'cpu_op') AS operator,
           arg_min(outer_id, hops) FILTER (WHERE own_frame) AS frame_id,
           min(hops) FILTER (WHERE own_frame) AS frame_hops,
           bool_or(name LIKE 'autograd::engine::evaluate\_function: %' ESCAPE '\') AS in_backward,
           list(name ORDER BY hops DESC) FILTER (WHERE category = 'user_annotation') AS ranges
    FROM enclosing GROUP BY inner_id
),
-- The function that the user's line called: `print`, `item`, `aten::index`.
called AS (
    SELECT own.inner_id, arg_max(enclosing.name, enclosing.hops) AS caller,
           arg_max(enclosing.outer_id, enclosing.hops) AS caller_id
    FROM own JOIN enclosing ON enclosing.inner_id = own.inner_id
    WHERE enclosing.category IN ('cpu_op', 'python_function')
      AND (enclosing.hops < own.frame_hops OR (own.frame_hops IS NULL AND enclosing.category = 'cpu_op'))
    GROUP BY own.inner_id
),
forward AS (
    SELECT inner_id AS forward_id,
           arg_min(outer_id, hops) FILTER (WHERE own_frame) AS frame_id,
           list(name ORDER BY hops DESC) FILTER (WHERE category = 'user_annotation') AS ranges
    FROM around_forward GROUP BY inner_id
)
SELECT own.inner_id AS launch_id, own.operator_id, own.operator, forward_of.forward_id, called.caller_id,
       regexp_replace(regexp_replace(called.caller, '^<built-in (?:function|method) (\S+?)(?: .*)?>$', '\1'),
                      '^(.*\.py|In \[\d+\])\(\d+\): ', '') AS caller,
       -- A frame on the thread that runs backward called the engine, not the operator.
       coalesce(forward.frame_id, own.frame_id) AS frame_id,
       CASE WHEN forward.frame_id IS NULL THEN coalesce(own.operator_id, own.inner_id) ELSE forward_of.forward_id END
           AS under_frame,
       own.in_backward, own.ranges, forward.ranges AS forward_ranges
FROM own
LEFT JOIN called USING (inner_id)
LEFT JOIN forward_of USING (inner_id)
LEFT JOIN forward USING (forward_id);

-- The line that was reached last before a slice, if it is of the function that the slice's frame is of. A range that
-- outlasts the frames around it, as that of the optimizer whose step ends a recording, has none.
CREATE OR REPLACE TEMP MACRO came_to(came_path, came_file, came_function, came_line, path, file, function) AS
CASE WHEN path IS NULL AND came_line > 0 THEN coalesce(came_path, came_file) || ':' || came_line
     WHEN file = came_file AND function = came_function THEN path || ':' || came_line END;

-- Work of an autograd thread without a forward, such as accumulating gradients, gets the line that waits for it.
CREATE OR REPLACE TEMP TABLE launch_context AS
WITH followed AS (SELECT file_id, any_value(utid) AS utid FROM python_line GROUP BY file_id),
begun AS (
    SELECT launch_frame.*, frame.name AS frame, slice.ts + least(slice.dur, 1000) // 2 AS ts,
           CASE WHEN frame_id IS NULL AND in_backward THEN coalesce(followed.utid, thread_track.utid)
                ELSE thread_track.utid END AS utid
    FROM launch_frame
    LEFT JOIN frame ON frame.id = frame_id
    LEFT JOIN slice ON slice.id = under_frame
    LEFT JOIN thread_track ON thread_track.id = slice.track_id
    LEFT JOIN device_call ON device_call.slice_id = launch_id
    LEFT JOIN followed USING (file_id)
)
SELECT begun.* EXCLUDE (frame_id, under_frame, in_backward, utid, ts),
       came_to(spelled.path, line.file, line.function, line.line, frame.path, frame.file, frame.function) AS exact_place,
       coalesce(exact_place, frame.place) AS place, frame.function
FROM begun ASOF LEFT JOIN python_line AS line ON line.utid = begun.utid AND begun.ts >= line.ts
LEFT JOIN scratch.frame_place AS frame ON frame.name = begun.frame
LEFT JOIN spelled ON spelled.file = line.file AND spelled.function = line.function;

-- `attributed_by`: launch, an operator around the call; range, only a range around it; graph, a replay, whose
-- kernels were launched together: graphs.sql looks further. NULL: launched before the trace began.
CREATE OR REPLACE TABLE device_slice AS
SELECT device_work.*, launch.name AS launch, launch.ts AS launch_ts, launch.dur AS launch_dur,
       context.operator_id, context.operator, context.place AS source,
       context.function AS source_function,
       coalesce(context.ranges, []) AS ranges, coalesce(context.forward_ranges, []) AS forward_ranges,
       CASE WHEN launch.name LIKE '%GraphLaunch%' THEN 'graph'
            WHEN context.operator_id IS NOT NULL THEN 'launch'
            WHEN context.ranges IS NOT NULL THEN 'range' END AS attributed_by
FROM device_work
LEFT JOIN device_call AS launch ON launch.slice_id = device_work.launch_id
LEFT JOIN launch_context AS context ON context.launch_id = device_work.launch_id
ORDER BY device_work.ts, device_work.slice_id;

CREATE OR REPLACE TABLE scratch.device_file AS SELECT DISTINCT file_id FROM device_slice;
