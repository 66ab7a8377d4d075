-- Light steps have kernels and CUDA calls but no operators, whose recording can double a step's time. Another file has a
-- step in full detail, the description. Times come from the light steps; operators, stacks and operands from the
-- description. Needs attribution.sql, graphs.sql, steps.sql and waits.sql.

CREATE OR REPLACE TABLE description AS      -- a file of light steps, and the file that describes them
SELECT light.file_id, min(told.file_id) AS described_by
FROM metadata AS light JOIN metadata AS told ON told.str_value = light.str_value
WHERE light.name = 'tilewright described by' AND told.name = 'tilewright description'
  AND light.key_type = 'single' AND told.key_type = 'single' AND light.file_id <> told.file_id
GROUP BY light.file_id;

-- The steps whose operators are shown: those that are timed where nothing is light. The profiler's own first uses of
-- the device are in the first steps of a description, so the last one is shown.
CREATE OR REPLACE TABLE operator_step AS
FROM step WHERE file_id NOT IN (SELECT file_id FROM description)
QUALIFY file_id NOT IN (SELECT described_by FROM description)
     OR row_number() OVER (PARTITION BY file_id ORDER BY ts DESC) = 1;

-- The n-th launch of a kernel on a grid within a light step is the n-th of the last step described.
CREATE OR REPLACE TEMP TABLE placed AS
SELECT work.slice_id, work.file_id, work.name, work.grid, work.block, work.correlation, work.attributed_by,
       step.ts AS step_ts,
       row_number() OVER (
           PARTITION BY work.file_id, step.ts, work.name, work.grid, work.block ORDER BY work.launch_ts, work.ts, slice_id
       ) AS position
FROM device_slice AS work
JOIN step ON step.file_id = work.file_id AND work.launch_ts >= step.ts AND work.launch_ts < step.ts + step.dur
WHERE work.file_id IN (SELECT file_id FROM description UNION ALL SELECT described_by FROM description);

CREATE OR REPLACE TABLE scratch.twin AS
SELECT light.slice_id, told.slice_id AS twin_id,
       -- One call of an operator: its kernels in one step, or in one replay of a graph.
       CASE WHEN told.attributed_by = 'capture' THEN light.correlation ELSE light.step_ts END AS one_call
FROM placed AS light
JOIN description USING (file_id)
JOIN operator_step ON operator_step.file_id = described_by
JOIN placed AS told ON told.file_id = described_by AND told.step_ts = operator_step.ts
 AND told.position = light.position AND told.name = light.name
 AND told.grid IS NOT DISTINCT FROM light.grid AND told.block IS NOT DISTINCT FROM light.block;

-- Work without a counterpart, if steps differ: the operator of the same kernel, if that is always the same.
CREATE OR REPLACE TEMP TABLE alike AS
WITH known AS (
    SELECT file_id, name, grid, block, any_value(slice_id) AS twin_id
    FROM device_slice WHERE operator_id IS NOT NULL
    GROUP BY file_id, name, grid, block HAVING count(DISTINCT operator) = 1
)
SELECT light.slice_id, known.twin_id
FROM device_slice AS light
JOIN description USING (file_id)
JOIN known ON known.file_id = described_by AND known.name = light.name
 AND known.grid IS NOT DISTINCT FROM light.grid AND known.block IS NOT DISTINCT FROM light.block
WHERE light.slice_id NOT IN (SELECT slice_id FROM scratch.twin);

CREATE OR REPLACE TEMP TABLE told AS
SELECT found.slice_id, work.operator_id, work.operator, work.source, work.source_function, work.ranges,
       work.forward_ranges,
       CASE WHEN work.attributed_by IN ('launch', 'capture') THEN found.how ELSE work.attributed_by END AS attributed_by
FROM (
    SELECT slice_id, twin_id, 'description' AS how FROM scratch.twin
    UNION ALL
    SELECT slice_id, twin_id, 'same kernel' FROM alike
) AS found
JOIN device_slice AS work ON work.slice_id = found.twin_id;

UPDATE device_slice SET operator_id = told.operator_id, operator = told.operator, source = told.source,
       source_function = told.source_function, ranges = told.ranges, forward_ranges = told.forward_ranges,
       attributed_by = told.attributed_by
FROM told WHERE told.slice_id = device_slice.slice_id;

UPDATE device_slice SET operator = named_operator(name), attributed_by = 'name'
WHERE file_id IN (SELECT file_id FROM description) AND operator IS NULL AND named_operator(name) IS NOT NULL;

-- Waits by their order too. A light step marks its own lines, and its marks are exact.
CREATE OR REPLACE TEMP TABLE waited AS
WITH placed_wait AS (
    SELECT wait.*, step.ts AS step_ts,
           row_number() OVER (PARTITION BY wait.file_id, step.ts, wait.name ORDER BY wait.ts, wait.slice_id) AS position
    FROM wait JOIN step ON step.file_id = wait.file_id AND wait.ts >= step.ts AND wait.ts < step.ts + step.host_dur
)
SELECT light.slice_id, told.operator, told.caller, told.source, told.source_function, told.copy, told.exact
FROM placed_wait AS light
JOIN description USING (file_id)
JOIN operator_step ON operator_step.file_id = described_by
JOIN placed_wait AS told ON told.file_id = described_by AND told.step_ts = operator_step.ts
 AND told.position = light.position AND told.name = light.name;

UPDATE wait SET operator = waited.operator, caller = waited.caller, source = coalesce(wait.source, waited.source),
       source_function = waited.source_function, copy = coalesce(wait.copy, waited.copy),
       exact = wait.exact OR (wait.source IS NULL AND waited.exact)
FROM waited WHERE waited.slice_id = wait.slice_id;

-- The described step is not timed, nor the work before the first light step, in which the profiler started.
CREATE OR REPLACE TEMP TABLE timed_from AS
SELECT description.file_id, coalesce(min(step.ts), 0) AS first_ts
FROM description LEFT JOIN step USING (file_id) GROUP BY description.file_id
UNION ALL
SELECT described_by, (1::BIGINT << 62) FROM description;

CREATE OR REPLACE TABLE untimed_slice AS
SELECT work.* FROM device_slice AS work JOIN timed_from USING (file_id) WHERE coalesce(launch_ts, ts) < first_ts;
DELETE FROM device_slice WHERE slice_id IN (SELECT slice_id FROM untimed_slice);
DELETE FROM wait USING timed_from WHERE timed_from.file_id = wait.file_id AND wait.ts < first_ts;
DELETE FROM step WHERE file_id IN (SELECT described_by FROM description);

-- Work on the devices, of the steps whose operators are shown.
CREATE OR REPLACE VIEW operator_slice AS
FROM device_slice WHERE file_id NOT IN (SELECT file_id FROM description)
UNION ALL
SELECT untimed_slice.* FROM untimed_slice JOIN operator_step AS step
  ON step.file_id = untimed_slice.file_id AND launch_ts >= step.ts AND launch_ts < step.ts + step.dur;
