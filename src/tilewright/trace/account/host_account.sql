-- The time of the host by class: the spans that host_time.py has found, with names; then the mean step.

CREATE OR REPLACE TEMP MACRO plain_name(name) AS
regexp_replace(regexp_replace(regexp_replace(regexp_replace(name,
    '^<built-in (?:function|method) (\S+?)(?: of type object.*| of module.*| of .* object.*)?>$', '\1'),
    '^.*\.py\((?:\d+|\?)\): ', ''), '^autograd::engine::evaluate_function: ', ''), '^enumerate\((DataLoader)\)#.*$', '\1');

-- Once for each name, of which there are few.
CREATE OR REPLACE TEMP TABLE plain AS SELECT name, plain_name(name) AS plain FROM (SELECT DISTINCT name FROM class_of);

-- What the thread of the steps did, from each step's begin to its end without holes. `what` is the operator or function;
-- of Python, what the user's line called, or '' for the line's own. The columns `inner_…` say what was done within data,
-- compilation and garbage collection. `called_id` is the outermost function that the user's line called.
CREATE OR REPLACE TABLE host_time AS
SELECT span.file_id, host_thread.utid, span.step_ts, span.ts, span.dur, $classes[span.code % 100 + 1] AS class,
       coalesce(named.plain, CASE WHEN span.code = 306 THEN 'with' END, '') AS what,
       coalesce(CASE WHEN span.code // 100 = 2 THEN host_line.source END, line.place, place_of(frame.name)) AS source,
       CASE WHEN span.code // 100 = 4 THEN $classes[span.inner_code % 100 + 1] END AS inner_class,
       inner_named.plain AS inner_what, coalesce(inner_line.place, place_of(inner_frame.name)) AS inner_source,
       span.given AS slice_id, span.called AS called_id, span.events
FROM host_span AS span
JOIN host_thread USING (file_id)
LEFT JOIN slice AS given ON given.id = span.given
LEFT JOIN slice AS called ON called.id = span.called
LEFT JOIN scratch.host_line ON host_line.id = span.given
LEFT JOIN plain AS named
  ON named.name = CASE WHEN span.code IN (101, 102) THEN called.name ELSE given.name END
LEFT JOIN line_place AS line ON line.number = span.line
LEFT JOIN frame ON frame.id = span.frame
LEFT JOIN slice AS inside ON inside.id = span.inner_given
LEFT JOIN plain AS inner_named ON inner_named.name = inside.name
LEFT JOIN line_place AS inner_line ON inner_line.number = span.inner_line
LEFT JOIN frame AS inner_frame ON inner_frame.id = span.inner_frame
ORDER BY span.file_id, span.ts;

-- The mean step of the host, bare where a profile of tilewright timed steps without the profiler. Those are without
-- compilations, which belong to a step all the same.
CREATE OR REPLACE TABLE host_step_time AS
WITH recorded AS (
    SELECT file_id, count(DISTINCT step_ts) AS steps, sum(dur) / 1e6 / steps AS recorded_ms, sum(events) AS events,
           coalesce(sum(dur) FILTER (WHERE class = 'profiler'), 0) / 1e6 / steps AS profiler_ms,
           coalesce(sum(dur) FILTER (WHERE class = 'compilation'), 0) / 1e6 / steps AS compilation_ms
    FROM host_time GROUP BY file_id
)
SELECT recorded.*,
       least(recorded_ms, coalesce(bare_us / 1e3 + compilation_ms, recorded_ms - profiler_ms)) AS bare_ms,
       -- What recording adds to each event, beside the recorder's own functions. More than that is noise of the steps.
       least(greatest(recorded_ms - profiler_ms - bare_ms, 0) * 1e6 * steps / nullif(recorded.events, 0), 2_500)
           AS ns_per_event
FROM recorded
LEFT JOIN description ON description.described_by = recorded.file_id
LEFT JOIN recording ON recording.file_id = coalesce(description.file_id, recorded.file_id);

-- The same, added up, in milliseconds of the mean bare step, to which the rows of a file add up.
CREATE OR REPLACE TABLE host_cause AS
WITH part AS (
    SELECT file_id, class, what, source, inner_class, inner_what, inner_source, called.name AS called,
           count(DISTINCT called_id) / any_value(steps) AS calls, sum(host_time.dur)::BIGINT AS recorded_ns,
           CASE WHEN any_value(class) = 'profiler' THEN 0
                ELSE greatest(sum(host_time.dur) - any_value(ns_per_event) * sum(host_time.events), 0) END AS ns,
           any_value(bare_ms) AS bare_ms
    FROM host_time JOIN host_step_time USING (file_id) LEFT JOIN slice AS called ON called.id = called_id
    GROUP BY ALL
)
SELECT * EXCLUDE (called, ns, bare_ms), ns AS unscaled_ns, plain_name(called) AS called,
       -- PyTorch's own Python, or one operator.
       regexp_matches(called, '(^|/)torch/|^nn\.Module: ') AS is_torch,
       regexp_matches(called, ' of (torch|Tensor|Parameter|pybind11|type object)|^aten::') AS is_operator,
       ns / nullif(sum(ns) OVER (PARTITION BY file_id), 0) AS share, bare_ms * share AS ms_per_step
FROM part;

-- The mean bare step by class.
CREATE OR REPLACE VIEW host_account AS
SELECT file_id, class, sum(ms_per_step) AS ms_per_step, 1e2 * sum(share) AS percent, any_value(steps) AS steps,
       arg_max(source, ms_per_step) AS source
FROM host_cause JOIN host_step_time USING (file_id)
WHERE class <> 'profiler' GROUP BY file_id, class ORDER BY file_id, ms_per_step DESC;
