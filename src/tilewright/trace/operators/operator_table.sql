-- The time of each operator, on the host and on the devices. Needs the scripts of `account`.

-- Host time: operators (`operator`), CUDA calls (`call`) and ranges (`range`), each with the innermost one that contains
-- it. The time of Python frames in between counts for the outer one.
CREATE OR REPLACE TEMP TABLE host_call AS
WITH RECURSIVE last_step AS (
    SELECT file_id, arg_max(id, ts) AS id, max(ts) AS ts, max(ts + host_dur) AS ended FROM operator_step WHERE id IS NOT NULL GROUP BY file_id
),
timed AS (
    -- Where an optimizer's step ends the recording, PyTorch's range around it lasts until the profiler has stopped. One
    -- that begins with the step is around the step: cut by it, each would lie in the other.
    SELECT slice.id, slice.ts, slice.parent_id,
           CASE WHEN slice.ts > last_step.ts AND slice.ts <= last_step.ended
                THEN least(slice.dur, last_step.ended - slice.ts) ELSE slice.dur END AS dur,
           CASE WHEN slice.ts > last_step.ts AND slice.ts <= last_step.ended AND slice.ts + slice.dur > last_step.ended
                THEN last_step.id END AS cut_by, process.file_id,
           CASE WHEN starts_with(slice.name, 'ProfilerStep#') THEN regexp_replace(slice.name, '#\d+$', '*')
                ELSE coalesce(slice.name, '(no name)') END AS name,
           CASE WHEN slice.category IN ('cuda_runtime', 'cuda_driver') THEN 'call'
                -- A range around what tilewright or Inductor runs on a CPU without PyTorch stands for an operator.
                WHEN slice.category IN ('user_annotation', 'nvtx') AND slice.name NOT LIKE '## Call CompiledFxGraph %'
                 AND slice.name NOT IN (SELECT name FROM operator WHERE stage = 'after')
                THEN 'range' ELSE 'operator' END AS kind
    FROM slice
    JOIN thread_track ON thread_track.id = slice.track_id
    JOIN thread USING (utid)
    JOIN process USING (upid)
    LEFT JOIN last_step USING (file_id)
    WHERE slice.category IN ('cpu_op', 'cuda_runtime', 'cuda_driver', 'user_annotation', 'nvtx')
      AND process.file_id NOT IN (SELECT file_id FROM description)
      AND (process.file_id NOT IN (SELECT described_by FROM description)
           OR slice.ts BETWEEN last_step.ts AND last_step.ended)
      -- Exclude marks of tilewright's profile, and absurd times, whose sums would overflow.
      AND coalesce(slice.name, '') NOT LIKE 'synchronisation at %'
      AND slice.dur BETWEEN 0 AND 1::BIGINT << 61 AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61
),
through AS (
    SELECT slice.id, slice.parent_id AS outer_id
    FROM slice JOIN timed ON timed.id = slice.parent_id
    WHERE slice.category = 'python_function'
    UNION ALL
    SELECT slice.id, through.outer_id
    FROM slice JOIN through ON through.id = slice.parent_id
    WHERE slice.category = 'python_function'
),
placed AS (
    SELECT timed.*, coalesce(direct.id, through.outer_id, timed.cut_by) AS outer_id
    FROM timed
    LEFT JOIN timed AS direct ON direct.id = timed.parent_id
    LEFT JOIN through ON through.id = timed.parent_id
),
inside AS (
    SELECT outer_id AS id, sum(dur)::BIGINT AS dur FROM placed WHERE outer_id IS NOT NULL GROUP BY outer_id
)
SELECT placed.* EXCLUDE (parent_id, cut_by), greatest(placed.dur - coalesce(inside.dur, 0), 0) AS self_ns, step.name AS step
FROM placed
LEFT JOIN inside USING (id)
ASOF LEFT JOIN (SELECT file_id, name, ts, ts + dur AS ended FROM operator_step) AS step
  ON step.file_id = placed.file_id AND placed.ts >= step.ts;

-- Each call with every call that contains it, itself included.
CREATE OR REPLACE TEMP TABLE host_within AS
WITH RECURSIVE up AS (
    SELECT id AS inner_id, id AS outer_id, outer_id AS next_id FROM host_call
    UNION ALL
    SELECT up.inner_id, host_call.id, host_call.outer_id FROM up JOIN host_call ON host_call.id = up.next_id
)
SELECT up.inner_id, up.outer_id, host_call.name, host_call.kind
FROM up JOIN host_call ON host_call.id = up.outer_id;

-- The time of an operator inside its direct parent operators and ranges.
CREATE OR REPLACE TABLE operator_in AS
WITH around AS (SELECT name, kind, count(*) AS calls, sum(dur)::BIGINT AS dur FROM host_call GROUP BY name, kind)
SELECT call.name, call.kind, outside.name AS outer_name, outside.kind AS outer_kind, count(*) AS calls,
       sum(call.dur)::BIGINT AS dur, any_value(around.dur) AS outer_dur
FROM host_call AS call
JOIN host_call AS outside ON outside.id = call.outer_id
JOIN around ON around.name = outside.name AND around.kind = outside.kind
GROUP BY call.name, call.kind, outside.name, outside.kind;

-- A row per name. `cpu_*` and `device_*` are nanoseconds: self is the work that the operator did or launched itself,
-- total includes its callees; of recursive calls total counts the outermost. `steps` is the number of steps that call
-- it. `one_off`: not called in every step, so negligible in a long run.
CREATE OR REPLACE TABLE operator_time AS
WITH launched AS (
    SELECT slice_id, dur, CASE WHEN attributed_by = 'launch' THEN operator_id
                               WHEN attributed_by = 'range' THEN launch_id END AS host_id,
           coalesce(operator, name, '(no name)') AS subject, launch, source
    FROM operator_slice
),
host AS (
    SELECT name, kind, count(*) AS calls, sum(self_ns)::BIGINT AS cpu_self, count(DISTINCT (file_id, step)) AS steps,
           -- Without a device, the line that calls it most often.
           mode(host_line.source) AS source,
           sum(dur) FILTER (WHERE NOT EXISTS (
               FROM host_within AS around
               WHERE around.inner_id = host_call.outer_id AND around.name = host_call.name
           ))::BIGINT AS cpu_total
    FROM host_call LEFT JOIN host_line USING (id) GROUP BY name, kind
),
device_self AS (
    SELECT host_call.name, host_call.kind, sum(launched.dur)::BIGINT AS device_self, count(*) AS launches,
           -- The line that launched most of its device time.
           (SELECT mode(source) FROM launched AS own
            JOIN host_call AS caller ON caller.id = own.host_id WHERE caller.name = host_call.name) AS source
    FROM launched JOIN host_call ON host_call.id = launched.host_id
    GROUP BY host_call.name, host_call.kind
),
device_total AS (
    SELECT name, kind, sum(dur)::BIGINT AS device_total
    FROM (SELECT DISTINCT launched.slice_id, launched.dur, around.name, around.kind
          FROM launched JOIN host_within AS around ON around.inner_id = launched.host_id)
    GROUP BY name, kind
),
-- Work without a launch in this trace: replays of a graph, and work queued before the trace began.
alone AS (
    SELECT subject AS name, CASE WHEN launch LIKE '%GraphLaunch%' THEN 'replayed' ELSE 'kernel' END AS kind,
           count(*) AS launches, sum(dur)::BIGINT AS device_self, mode(source) AS source
    FROM launched WHERE host_id IS NULL GROUP BY name, kind
),
whole AS (SELECT count(*) AS steps FROM operator_step)
SELECT name, kind, calls, cpu_self, coalesce(cpu_total, 0) AS cpu_total,
       coalesce(device_self, 0) AS device_self, coalesce(device_total, 0) AS device_total,
       coalesce(launches, 0) AS launches, host.steps, coalesce(device_self.source, host.source) AS source,
       CASE WHEN kind = 'range' THEN false
            WHEN whole.steps > 1 THEN host.steps <= 1
            ELSE calls = 1 AND regexp_matches(name, 'Synchronize|Properties|Attribute|GetDevice|ModuleLoad|LibraryLoad|'
                                                    || '^cuda(Malloc|Free|HostAlloc)|^cuInit') END AS one_off
FROM host CROSS JOIN whole
LEFT JOIN device_self USING (name, kind)
LEFT JOIN device_total USING (name, kind)
UNION ALL
SELECT name, kind, launches, 0, 0, device_self, device_self, launches, NULL, source, false FROM alone;

-- The table with its shares: of all host time inside operators, calls and ranges, and of all device time.
CREATE OR REPLACE VIEW operator_share AS
SELECT *, cpu_self::DOUBLE / nullif(sum(cpu_self) OVER (), 0)::DOUBLE AS of_cpu,
       device_self::DOUBLE / nullif(sum(device_self) OVER (), 0)::DOUBLE AS of_device,
       cpu_total::DOUBLE / nullif(calls, 0) AS cpu_average, device_total::DOUBLE / nullif(calls, 0) AS device_average
FROM operator_time
ORDER BY device_self DESC, cpu_self DESC, name;

