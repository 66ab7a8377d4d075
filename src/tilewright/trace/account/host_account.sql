-- The time of the host by class: the spans that host_time.py has found, with names; then the mean step.

CREATE OR REPLACE TEMP MACRO plain_name(name) AS
regexp_replace(regexp_replace(regexp_replace(regexp_replace(regexp_replace(name,
    -- Of modules whose functions have names that others' have too.
    '^(asyncio|subprocess|multiprocessing|random|urllib|http|requests|urllib3|httpx)(?:/\w+)?\.py\(\d+\): ', '\1.'),
    '^<built-in (?:function|method) (\S+?)(?: of type object.*| of module.*| of .* object.*)?>$', '\1'),
    '^(?:.*(?:\.py|>)|In \[\d+\])\((?:\d+|\?)\): |^(nn\.Module: .*)_\d+$', '\1'), '^autograd::engine::evaluate_function: ', ''), '^enumerate\((DataLoader)\)#.*$', '\1');

-- Once for each name, of which there are few.
CREATE OR REPLACE TABLE plain AS
SELECT number, name, plain_name(name) AS plain,
       -- PyTorch's own Python, or one operator.
       regexp_matches(name, '(^|/)(torch|tilewright/measure/recording)/|^nn\.Module: ') AS is_torch,
       category = 'cpu_op' OR regexp_matches(name, ' of (torch|Tensor|Parameter|pybind11|type object)|^aten::') AS is_operator,
       regexp_matches(name, '(\.py|>|^In \[\d+\])\(\d+\): ') AS is_frame
FROM class_of;

-- How long the thread had no processor in each span, where the recorder knows how much that was of each step: it is
-- taken from what lasts longest beyond the same span of the step in which that is shortest, since another program comes at no
-- line in particular. The same is the n-th of its kind, or the n-th longest where steps have not as many.
UPDATE host_span SET stopped = taken.stopped FROM (
WITH numbered AS (
    SELECT file_id, ts AS step_ts, dur, row_number() OVER (PARTITION BY file_id ORDER BY ts) AS number FROM host_step
),
spent AS (
    SELECT file_id, step_ts, bool_or(class = 'compilation') AS compiles,
           sum(dur) FILTER (WHERE class IN ('device', 'I/O', 'sleep and locks', 'allocator', 'communication')) AS waited_ns
    FROM (SELECT *, $classes[CASE WHEN code // 100 = 4 AND code <> 410 THEN inner_code ELSE code END % 100 + 1] AS class FROM host_span)
    GROUP BY file_id, step_ts
),
missing AS (
    -- Where the system does not tell, all that the thread neither ran nor waited for.
    SELECT file_id, step_ts, recorded_queued_us[number] IS NOT NULL AS is_told,
           coalesce(1e3 * recorded_queued_us[number], dur - 1e3 * recorded_thread_us[number] - coalesce(waited_ns, 0)) AS ns
    FROM numbered JOIN recording USING (file_id) JOIN spent USING (file_id, step_ts)
    WHERE len(recorded_thread_us) >= number AND NOT compiles
),
kind_of AS (
    SELECT host_span.*, row_number() OVER (one_step ORDER BY ts) AS place, row_number() OVER (one_step ORDER BY dur DESC, ts) AS rank, count(*) OVER one_step AS many
    -- A wait is over when the thread gets a processor.
    FROM host_span JOIN (SELECT file_id, bool_and(is_told) AS is_told FROM missing WHERE ns > 0 GROUP BY file_id) USING (file_id)
    WHERE is_told OR code // 100 < 3
    WINDOW one_step AS (PARTITION BY file_id, step_ts, code, what, source, called)
),
nth AS (
    SELECT *, CASE WHEN min(many) OVER every_step = max(many) OVER every_step THEN place ELSE rank END AS n FROM kind_of
    WINDOW every_step AS (PARTITION BY file_id, code, what, source, called)
),
beyond AS (
    SELECT *, dur - min(dur) OVER (PARTITION BY file_id, code, what, source, called, n) AS excess FROM nth
),
most AS (
    SELECT beyond.file_id, ts, least(excess, missing.ns - sum(excess) OVER longest + excess)::BIGINT AS stopped
    FROM beyond JOIN missing USING (file_id, step_ts) WHERE missing.ns > 0
    WINDOW longest AS (PARTITION BY beyond.file_id, step_ts ORDER BY excess DESC, ts ROWS UNBOUNDED PRECEDING)
)
FROM most WHERE stopped > 0
) AS taken WHERE taken.file_id = host_span.file_id AND taken.ts = host_span.ts;

-- What the thread of the steps did, from each step's begin to its end without holes. `what` is the operator or function;
-- of Python, what the user's line called, or '' for the line's own. The columns `inner_…` say what was done within data,
-- compilation and garbage collection. `called_id` is the outermost function that the user's line called, and `stopped` how long
-- the thread had no processor.
CREATE OR REPLACE VIEW host_time AS
SELECT span.file_id, span.utid, span.step_ts, span.ts, span.dur, $classes[span.code % 100 + 1] AS class,
       coalesce(named.plain, CASE WHEN span.code = 306 THEN 'with' END, '') AS what, place.place AS source,
       CASE WHEN span.code // 100 = 4 THEN $classes[span.inner_code % 100 + 1] END AS inner_class,
       inner_named.plain AS inner_what, inner_place.place AS inner_source,
       nullif(span.slice_id, -1) AS slice_id, nullif(span.called_id, -1) AS called_id, span.events,
       span.stopped
FROM host_span AS span
LEFT JOIN plain AS named ON named.number = span.what
LEFT JOIN named_place AS place ON place.number = span.source
LEFT JOIN plain AS inner_named ON inner_named.number = span.inner_what
LEFT JOIN named_place AS inner_place ON inner_place.number = span.inner_source;

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
       -- What recording adds to each event, beside the recorder's own functions: by the thread's processor time, which no other
       -- program lengthens, where the same process measured both. More than that is noise of the steps.
       least(greatest(coalesce(CASE WHEN description.file_id IS NULL AND thread_us <= bare_us THEN (list_avg(recorded_thread_us) - thread_us) / 1e3 - compilation_ms END,
                               recorded_ms - bare_ms) - profiler_ms, 0) * 1e6 * steps / nullif(recorded.events, 0), 2_500)
           AS ns_per_event
FROM recorded
LEFT JOIN description ON description.described_by = recorded.file_id
LEFT JOIN recording ON recording.file_id = coalesce(description.file_id, recorded.file_id);

-- The same, added up, in milliseconds of the mean bare step, to which the rows of a file add up. `typical_ms` is the median
-- over the steps, as a share of all medians and at least of the shortest step: a thread that loses its processor to another
-- program has that in one step, at a line of chance, and so has the collector, which runs where its counters happen to end.
-- What waits, and what compiles, has its mean.
CREATE OR REPLACE TABLE host_cause AS
WITH span AS (
    SELECT file_id, step_ts, code % 100 + 1 AS class_number, what, source,
           CASE WHEN code // 100 = 4 THEN inner_code % 100 + 1 END AS inner_number, inner_what, inner_source, called, list_unique(list(nullif(called_id, -1))) AS calls, sum(dur)::BIGINT AS dur,
           sum(dur - stopped) AS running, list_unique(list(slice_id)) AS slices, sum(events) AS events, code = 306 AND what < 0 AS enters
    FROM host_span GROUP BY ALL
),
one_step AS (
    SELECT span.file_id, step_ts, class, coalesce(named.plain, CASE WHEN enters THEN 'with' END, '') AS what,
           place.place AS source, $classes[inner_number] AS inner_class, inner_named.plain AS inner_what,
           inner_place.place AS inner_source, by_line.plain AS called, by_line.is_torch, by_line.is_operator, by_line.is_frame,
           sum(calls) AS calls, sum(dur)::BIGINT AS recorded_ns,
           coalesce(sum(slices) FILTER (WHERE class = 'operators'), 0) AS operators,
           CASE WHEN any_value(class) = 'profiler' THEN 0
                ELSE greatest(sum(running) - any_value(ns_per_event) * sum(span.events), 0) END AS ns
    FROM (SELECT *, $classes[class_number] AS class FROM span) AS span JOIN host_step_time USING (file_id)
    LEFT JOIN plain AS named ON named.number = span.what
    LEFT JOIN named_place AS place ON place.number = span.source
    LEFT JOIN plain AS inner_named ON inner_named.number = span.inner_what
    LEFT JOIN named_place AS inner_place ON inner_place.number = span.inner_source
    LEFT JOIN plain AS by_line ON by_line.number = span.called
    GROUP BY ALL
),
part AS (
    SELECT one_step.* EXCLUDE (step_ts, calls, recorded_ns, operators, ns),
           sum(one_step.calls) / any_value(steps) AS calls, sum(recorded_ns)::BIGINT AS recorded_ns,
           sum(operators) / any_value(steps) AS operators, sum(ns) AS unscaled_ns,
           CASE WHEN any_value(class) IN ('operators', 'Python', 'profiler', 'untraced')
                  OR any_value(class) = 'garbage collection' AND any_value(what) <> 'collect'
                THEN list_median(list_resize(list(ns), any_value(steps), 0)) ELSE sum(ns) / any_value(steps) END AS typical_ns,
           any_value(bare_ms) AS bare_ms
    FROM one_step JOIN host_step_time USING (file_id) GROUP BY ALL
),
shortest AS (
    SELECT file_id, min(ns) AS shortest_ns FROM (SELECT file_id, sum(ns) AS ns FROM one_step GROUP BY file_id, step_ts) GROUP BY file_id
)
SELECT part.* EXCLUDE (bare_ms),
       unscaled_ns / nullif(sum(unscaled_ns) OVER one_file, 0) AS share, bare_ms * share AS ms_per_step,
       bare_ms * typical_ns / nullif(greatest(sum(typical_ns) OVER one_file, shortest_ns), 0) AS typical_ms
FROM part JOIN shortest USING (file_id) WINDOW one_file AS (PARTITION BY file_id);

-- The mean bare step by class.
CREATE OR REPLACE VIEW host_account AS
SELECT file_id, class, sum(ms_per_step) AS ms_per_step, 1e2 * sum(share) AS percent, any_value(steps) AS steps,
       arg_max(source, ms_per_step) AS source
FROM host_cause JOIN host_step_time USING (file_id)
WHERE class <> 'profiler' GROUP BY file_id, class ORDER BY file_id, ms_per_step DESC;
