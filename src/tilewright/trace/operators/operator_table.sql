-- The time of each operator, on the host and on the devices. Needs `host_call`.

-- Each call that launched work, with every call that contains it, itself included.
CREATE OR REPLACE TEMP TABLE host_within AS
WITH RECURSIVE up AS (
    SELECT id AS inner_id, id AS outer_id, outer_id AS next_id FROM host_call
    WHERE id IN (SELECT operator_id FROM operator_slice UNION ALL SELECT launch_id FROM operator_slice)
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

-- The time of each operator itself on the host, and its calls, by step.
CREATE OR REPLACE TABLE operator_step_time AS
SELECT name, kind, file_id, step, sum(self_ns)::BIGINT AS self_ns, count(*) AS calls FROM host_call WHERE step IS NOT NULL
GROUP BY name, kind, file_id, step;

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
           mode(host_line.source ORDER BY host_line.source) AS source,
           sum(dur) FILTER (WHERE NOT is_recursive)::BIGINT AS cpu_total
    FROM host_call LEFT JOIN scratch.host_line USING (id) GROUP BY name, kind
),
device_self AS (
    SELECT host_call.name, host_call.kind, sum(launched.dur)::BIGINT AS device_self, count(*) AS launches,
           -- The line that launched most of its device time.
           (SELECT mode(source ORDER BY source) FROM launched AS own
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
           count(*) AS launches, sum(dur)::BIGINT AS device_self, mode(source ORDER BY source) AS source
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

