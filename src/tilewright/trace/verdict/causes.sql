-- What could make the host slow: a row per cause, in milliseconds of the mean bare step. Needs host_account.sql and
-- price/distance.sql. `inner_…` is what most of its time is spent in, and how much.

-- Once, since the view is planned anew wherever it is asked.
CREATE OR REPLACE TEMP TABLE host_distance AS
SELECT file_id, operator, shapes, source, dtype, attributed_by, calls, ms_per_step * scale AS ms, win_ms_per_step AS win FROM distance;

-- The time of a bare step in which its thread neither runs nor waits for anything that it asked for.
CREATE OR REPLACE TEMP TABLE stopped AS
SELECT file_id, any_value(thread_us) / 1e3 AS thread_ms, any_value(other_us) / 1e3 AS other_ms, any_value(other) AS other,
       any_value(bare_ms) AS bare_ms,
       greatest(any_value(bare_ms) - any_value(thread_us) / 1e3 - coalesce(sum(typical_ms) FILTER (
           WHERE coalesce(inner_class, class) IN ('device', 'I/O', 'sleep and locks', 'allocator', 'communication')), 0), 0) AS stopped_ms
FROM host_cause JOIN host_step_time USING (file_id) JOIN recording USING (file_id)
WHERE thread_us IS NOT NULL GROUP BY file_id;

-- How much longer everything takes that runs on a processor which other programs use too.
CREATE OR REPLACE TEMP TABLE stretch AS
SELECT file_id, coalesce(least(bare_ms / nullif(bare_ms - stopped_ms, 0), 5), 1) AS times
FROM host_step_time LEFT JOIN (SELECT file_id, stopped_ms FROM stopped) USING (file_id);

-- Lines that enter compiled code again and again.
CREATE OR REPLACE TEMP MACRO is_compiled(name) AS
regexp_matches(name, '^(CompiledFunction(Backward)?$|Torch-Compiled Region|TorchDynamo Cache Lookup$|Pregraph bytecode$)');
CREATE OR REPLACE TEMP TABLE entering_line AS
SELECT file_id, source, sum(typical_ms) FILTER (WHERE class = 'Python' OR is_compiled(what)) AS ms FROM host_cause
WHERE class IN ('operators', 'Python') AND source IS NOT NULL GROUP BY file_id, source
HAVING sum(operators) FILTER (WHERE is_compiled(what)) >= 8;

-- The user's lines by what they call: `direct` calls are no Python of PyTorch's, `runs` is how often the line runs a step.
CREATE OR REPLACE TEMP TABLE calling_line AS
WITH called AS (
    SELECT file_id, source, called, max(calls) AS calls, sum(typical_ms) AS ms,
           -- One function of PyTorch's in C may call many itself, as stack one for each tensor: those are not calls from Python.
           CASE WHEN coalesce(bool_or(is_operator AND NOT is_frame), false) THEN least(sum(operators), 16 * max(calls)) ELSE sum(operators) END AS operators,
           arg_max(what, typical_ms) FILTER (WHERE class = 'operators') AS what, string_agg(DISTINCT what, ' ' ORDER BY what) FILTER (WHERE class = 'operators') AS names,
           bool_or(coalesce(is_torch, false)) AS is_torch
    FROM host_cause ANTI JOIN entering_line USING (file_id, source)
    WHERE class IN ('operators', 'Python') AND source IS NOT NULL GROUP BY ALL
),
-- One call of the operator that takes most: it may compute, among views that do not.
longest AS (
    SELECT file_id, source, arg_max(ms / operators, ms) AS each_ms FROM (
        SELECT file_id, source, what, sum(typical_ms) AS ms, sum(operators) AS operators FROM host_cause WHERE class = 'operators' GROUP BY ALL HAVING sum(operators) > 0
    ) GROUP BY file_id, source
)
SELECT file_id, source, sum(calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch) AS direct,
       sum(ms) FILTER (WHERE NOT is_torch) AS direct_ms, arg_max(called, calls) FILTER (WHERE called IS NOT NULL AND NOT is_torch) AS direct_what,
       sum(ms) AS ms, sum(operators) AS operators, arg_max(what, ms) FILTER (WHERE what IS NOT NULL) AS what, string_agg(names, ' ') || CASE WHEN bool_or(called = 'grad') THEN ' grad' ELSE '' END AS names, max(calls) AS runs,
       string_agg(names, ' ') FILTER (WHERE NOT is_torch) AS direct_names, sum(ms) FILTER (WHERE is_torch AND called = 'backward') AS backward_ms,
       -- What they compute is less than what it takes to call them; in a loop they could be fewer.
       sum(operators) >= 20 AND greatest(sum(ms) / sum(operators), coalesce(any_value(each_ms), 0) / 2) < any_value(times) * CASE WHEN max(calls) >= 10 THEN 0.05 ELSE 0.0125 END
       -- A recurrent layer is one call from Python, and calls the others itself.
       AND NOT coalesce(bool_or(regexp_matches(names, 'aten::(lstm|gru|rnn_tanh|rnn_relu)( |$)')), false) AS is_small,
       max(calls) >= 10 AND sum(operators) >= 100 AND is_small AS is_looped,
       coalesce(direct >= 50 AND direct_ms < 0.02 * any_value(times) * direct, false) AS is_busy
FROM called JOIN stretch USING (file_id) LEFT JOIN longest USING (file_id, source) GROUP BY file_id, source;

-- Those in a loop over elements or over small batches: many short calls, by themselves or within PyTorch's functions.
CREATE OR REPLACE TEMP TABLE busy_line AS
-- With what backward calls for them, if that is small too.
SELECT file_id, source, direct AS calls, direct_ms + CASE WHEN is_small THEN coalesce(backward_ms, 0) ELSE 0 END AS ms, direct_what AS what,
       direct_names || CASE WHEN regexp_matches(names, 'Backward\d( |$)') THEN ' Backward' ELSE '' END AS names, runs, operators
FROM calling_line WHERE is_busy AND NOT (is_looped AND 2 * direct_ms < ms - coalesce(backward_ms, 0))
UNION ALL
SELECT file_id, source, operators, ms, what, names, runs, operators FROM calling_line
WHERE is_looped AND NOT (is_busy AND 2 * direct_ms >= ms - coalesce(backward_ms, 0));

-- What ran, without what recording added: for sums within calls, of which a span may be in part.
CREATE OR REPLACE TEMP TABLE running AS
SELECT file_id, step_ts, source, ts, dur, greatest(1 - (stopped + ns_per_event * host_time.events) / dur, 0) AS part
FROM host_time JOIN host_step_time USING (file_id) WHERE dur > 0 AND class <> 'profiler';

-- The whole of each step, and the milliseconds of the bare one: sums within calls are shares of their own step.
CREATE OR REPLACE TEMP TABLE step_running AS
SELECT file_id, step_ts, sum(part * dur) AS step_ns, any_value(bare_ms) AS bare_ms
FROM running JOIN host_step_time USING (file_id) GROUP BY file_id, step_ts HAVING step_ns > 0;
CREATE OR REPLACE TEMP MACRO shared(ts, dur, other_ts, other_dur) AS least(ts + dur, other_ts + other_dur) - greatest(ts, other_ts);

-- The optimizer's step, if it calls an operator for each parameter; `kinds` is how many.
CREATE OR REPLACE TEMP TABLE optimizer_time AS
WITH around AS (
    SELECT slice.id, slice.ts, slice.dur, regexp_extract(slice.name, '#(\w+)\.step$', 1) AS optimizer, process.file_id
    FROM slice JOIN thread_track ON thread_track.id = slice.track_id JOIN thread USING (utid) JOIN process USING (upid)
    WHERE slice.category = 'user_annotation' AND slice.name LIKE 'Optimizer.step#%'
)
SELECT host_time.file_id, any_value(optimizer) AS optimizer, any_value(host_time.source) AS source,
       count(DISTINCT slice_id) FILTER (WHERE class = 'operators') / any_value(steps) AS calls,
       count(DISTINCT what) FILTER (WHERE class = 'operators') AS kinds,
       greatest(sum(host_time.dur - stopped - ns_per_event * host_time.events), 0) / any_value(whole.ns) * any_value(bare_ms) AS ms
FROM host_time ASOF JOIN around ON host_time.file_id = around.file_id AND host_time.ts >= around.ts
JOIN host_step_time ON host_step_time.file_id = host_time.file_id
JOIN (SELECT file_id, sum(step_ns) AS ns FROM step_running GROUP BY file_id) AS whole ON whole.file_id = host_time.file_id
WHERE host_time.ts < around.ts + around.dur AND class IN ('operators', 'Python') GROUP BY host_time.file_id
HAVING NOT bool_or(regexp_matches(what, '_foreach_|_fused_'));

CREATE OR REPLACE TEMP MACRO is_sum(operator) AS regexp_matches(operator, '^aten::(sum|mean|amax|amin|max|min|prod|norm|linalg_vector_norm)$');
CREATE OR REPLACE TEMP MACRO file_of(source) AS regexp_replace(source, ':\d+$', '');
CREATE OR REPLACE TEMP MACRO line_of(source) AS TRY_CAST(regexp_extract(source, ':(\d+)$', 1) AS BIGINT);

-- Where all ranks are known: of a step's communication what the thread waited until the last of them came, and the rest,
-- in which data moves. `last_rank` comes last to most collectives.
CREATE OR REPLACE TEMP TABLE exchange AS
WITH late AS (
    SELECT collective.file_id, host_step.ts AS step_ts, sum(waited_ns) AS waited_ns, count(*) AS calls,
           sum(list_product(TRY_CAST(args->'$."Input Dims"[0]' AS BIGINT[])) * CASE args->>'$."Input type"[0]' WHEN 'double' THEN 8 WHEN 'long int' THEN 8
               WHEN 'c10::Half' THEN 2 WHEN 'c10::BFloat16' THEN 2 WHEN 'unsigned char' THEN 1 WHEN 'bool' THEN 1 ELSE 4 END) AS bytes
    FROM collective JOIN host_collective USING (slice_id) LEFT JOIN arg_set USING (arg_set_id)
    JOIN host_step ON host_step.file_id = collective.file_id
     AND host_collective.ts >= host_step.ts AND host_collective.ts < host_step.ts + host_step.dur
    GROUP BY collective.file_id, host_step.ts
),
spent AS (
    SELECT file_id, step_ts, sum(dur) AS ns FROM host_time WHERE class = 'communication' GROUP BY file_id, step_ts
),
typical AS (
    SELECT file_id, avg(calls) AS calls, avg(bytes) / 1e6 AS megabytes,
           list_median(list_resize(list(least(waited_ns, ns)), any_value(steps), 0)) / 1e6 * any_value(bare_ms / recorded_ms) AS waited_ms,
           list_median(list_resize(list(ns - least(waited_ns, ns)), any_value(steps), 0)) / 1e6 * any_value(bare_ms / recorded_ms) AS moved_ms
    FROM late JOIN spent USING (file_id, step_ts) JOIN host_step_time USING (file_id) GROUP BY file_id
)
SELECT typical.*, (SELECT arg_max(source, ms_per_step) FROM host_cause WHERE host_cause.file_id = typical.file_id AND class = 'communication') AS source,
       (SELECT arg_max(rank, came_last) FROM straggler) AS last_rank
FROM typical;

CREATE OR REPLACE TEMP TABLE host_candidate AS
WITH waiting AS (
    SELECT file_id, class,
           -- Garbage is collected wherever objects are made, and a batch is asked for at one line.
           CASE WHEN class NOT IN ('data', 'garbage collection') OR what = 'collect' THEN source END AS place,
           -- Of a wait that a function is made for its name.
           CASE WHEN class IN ('sleep and locks', 'device') AND NOT is_torch AND called NOT IN ('sleep', 'with') THEN called ELSE what END AS what,
           source, typical_ms AS ms_per_step,
           calls, coalesce(inner_what, '') AS inner_what, inner_source, inner_class
    FROM host_cause WHERE class NOT IN ('operators', 'Python', 'profiler', 'untraced')
      AND NOT (class = 'communication' AND file_id IN (SELECT file_id FROM exchange))
),
inside AS (
    SELECT file_id, class, place, inner_class, inner_what, inner_source, sum(ms_per_step) AS ms FROM waiting
    WHERE inner_class NOT IN ('profiler', 'untraced')
    GROUP BY file_id, class, place, inner_class, inner_what, inner_source QUALIFY row_number() OVER (PARTITION BY file_id, class, place ORDER BY ms DESC, inner_source) = 1
),
waits AS (
    SELECT waiting.file_id, waiting.class AS kind, arg_max(waiting.source, ms_per_step) AS source,
           arg_max(what, ms_per_step) AS what, sum(ms_per_step) AS ms, max(calls) AS calls,
           any_value(inside.inner_what) AS inner_what, any_value(inside.inner_source) AS inner_source, any_value(inside.ms) AS inner_ms
    FROM waiting LEFT JOIN inside ON inside.file_id = waiting.file_id AND inside.class = waiting.class AND inside.place IS NOT DISTINCT FROM waiting.place
    GROUP BY waiting.file_id, waiting.class, waiting.place
),
-- Lines one after the other are a loop or a block, and one cause.
loops AS (
    SELECT file_id, arg_max(source, ms) AS source, sum(ms) AS ms, sum(calls) AS calls, arg_max(what, ms) AS what, max(runs) AS runs,
           CASE WHEN sum(operators) < 0.5 * sum(calls) THEN 'Python' ELSE string_agg(names, ' ') END AS inner_what
    FROM (SELECT *, line_of(source) - row_number() OVER (PARTITION BY file_id, file_of(source) ORDER BY line_of(source)) AS block FROM busy_line)
    GROUP BY file_id, file_of(source), coalesce(block, 0)
),
small AS (
    -- Those of an optimizer's step have their own advice.
    SELECT file_id, coalesce(arg_max(source, rest_ms) FILTER (WHERE what NOT LIKE '%::AccumulateGrad'), arg_max(source, rest_ms)) AS source,
           sum(rest_ms) AS ms, sum(rest) AS calls, arg_max(what, rest_ms) AS what
    FROM (
        SELECT calling_line.*, greatest(calling_line.ms - coalesce(updates.ms, 0), 0) AS rest_ms, greatest(operators - coalesce(updates.calls, 0), 0) AS rest
        FROM calling_line LEFT JOIN (SELECT file_id, source, ms, calls FROM optimizer_time) AS updates USING (file_id, source)
    ) ANTI JOIN busy_line USING (file_id, source)
    WHERE is_small GROUP BY file_id HAVING sum(rest) >= 200
),
-- Functions of PyTorch's that work outside of every operator, as where a tensor is made of a list.
converting AS (
    SELECT file_id, source, called AS what, sum(typical_ms) AS ms, max(calls) AS calls
    FROM host_cause ANTI JOIN busy_line USING (file_id, source)
    WHERE class = 'Python' AND is_operator AND called <> 'stack' AND source IS NOT NULL GROUP BY file_id, source, called
),
python_line_time AS (
    SELECT file_id, source, sum(typical_ms) AS ms, max(calls) AS calls, arg_max(coalesce(called, ''), typical_ms) AS what,
           file_of(source) AS file, line_of(source) AS line
    FROM host_cause ANTI JOIN busy_line USING (file_id, source)
    -- With the operators that a function calls which is not PyTorch's, as deepcopy.
    -- A function written in C that calls operators is PyTorch's own, as linear of torch.nn.functional.
    WHERE (class = 'Python' OR class = 'operators' AND is_frame)
      AND NOT coalesce(is_torch OR is_operator, false) AND source IS NOT NULL GROUP BY file_id, source
),
blocks AS (
    SELECT *, line - row_number() OVER (PARTITION BY file_id, file ORDER BY line) AS block FROM python_line_time
    WHERE ms > 0
),
python AS (
    SELECT file_id, arg_max(source, ms) AS source, sum(ms) AS ms, max(calls) AS calls, arg_max(what, ms) AS what
    -- PyTorch's own calls take so long on a line that has no loop.
    FROM blocks GROUP BY file_id, file, block HAVING sum(ms) >= 0.2
),
copies AS (
    SELECT file_id, source, sum(typical_ms) AS ms, max(calls) AS calls, arg_max(called, typical_ms) AS what
    FROM host_cause ANTI JOIN busy_line USING (file_id, source)
    WHERE (class = 'operators' AND what IN ('aten::copy_', 'aten::clone', 'aten::_to_copy', 'aten::cat') OR class IN ('operators', 'Python') AND called = 'stack')
      AND called IN ('einsum', 'reshape', 'flatten', 'matmul', 'bmm', 'tensordot', 'contiguous', 'clone', 'to', 'copy_', 'float', 'double', 'half', 'bfloat16', 'repeat', 'cpu', 'numpy', 'tensor', 'as_tensor',
                     'cat', 'concat', 'concatenate', 'stack', 'hstack', 'vstack')
    GROUP BY file_id, source
),
first_step AS (SELECT file_id, min(ts) AS ts, arg_min(dur, ts) AS dur FROM host_step GROUP BY file_id),
-- At the line that comes first of those with a part in it: what it makes in float64, the others take.
doubles AS (
    WITH line AS (
        SELECT file_id, source, operator, sum(host_distance.ms) AS ms, sum(calls) AS calls
        FROM host_distance WHERE dtype IN ('fp64', 'double', 'float64') GROUP BY file_id, source, operator
    ),
    begun AS (
        SELECT step.file_id, place AS source, name AS operator, min(host_event.ts) AS ts
        FROM first_step AS step JOIN host_event ON host_event.file_id = step.file_id AND host_event.ts >= step.ts AND host_event.ts < step.ts + step.dur
        JOIN named_place ON named_place.number = sourced JOIN plain ON plain.number = named GROUP BY ALL
    ),
    part AS (
        SELECT line.*, ts, sum(ms) OVER (PARTITION BY file_id, source) >= 0.05 * sum(ms) OVER (PARTITION BY file_id) AS counts
        FROM line LEFT JOIN begun USING (file_id, source, operator)
    )
    SELECT file_id, sum(ms) AS ms, sum(calls) AS calls, arg_max(operator, ms) AS what,
           coalesce(arg_min(source, ts) FILTER (WHERE counts), arg_max(source, ms)) AS source
    FROM part GROUP BY file_id
),
-- What a CPU without arithmetic in float16 converts for each operation, as products: far from its floor.
halves AS (
    SELECT file_id, arg_max(source, ms) AS source, arg_max(operator, ms) AS what, sum(ms) AS ms, sum(calls) AS calls, sum(ms - win) AS floor_ms
    FROM host_distance WHERE dtype IN ('fp16', 'half', 'float16') AND attributed_by = 'host' AND ms >= 8 * (ms - win) GROUP BY file_id
),
-- Matrix products in fp32 on a GPU, by the names of the libraries' kernels; of light steps at the file with the host's.
kernel_name AS MATERIALIZED (SELECT DISTINCT name FROM device_slice),
singles AS (
    SELECT coalesce(description.described_by, work.file_id) AS file_id, arg_max(work.source, work.dur) AS source,
           coalesce(arg_max(work.operator, work.dur), 'a kernel') AS what,
           sum(work.dur) / 1e6 / any_value(steps) AS ms, count(*) / any_value(steps) AS calls
    FROM device_slice AS work JOIN (SELECT file_id, count(*) AS steps FROM step GROUP BY file_id) USING (file_id)
    LEFT JOIN description ON description.file_id = work.file_id
    WHERE work.kind = 'kernel' AND work.name IN (
        FROM kernel_name WHERE regexp_matches(name, '(?i)sgemm|simt|gemm_f32f32|f32f32_f32f32') AND NOT regexp_matches(name, '(?i)tf32|bf16|s1688')
    )
    GROUP BY ALL
),
-- With what their operators would win at their floors.
computing AS (
    SELECT file_id, arg_max(source, host_distance.ms) AS source, 'operators' AS what,
           sum(host_distance.ms) AS ms, sum(calls) AS calls, sum(host_distance.win) AS win
    FROM host_distance WHERE attributed_by = 'host' GROUP BY file_id
),
interpreter AS (
    SELECT file_id, regexp_replace(other, ' at (.*)$', '') AS what, nullif(regexp_extract(other, ' at (.*)$', 1), '') AS source,
           -- Another thread holds the interpreter also while it has no processor, which lengthens what it does as all else.
           greatest(least(other_ms, stopped_ms), least(stopped_ms * other_ms / (other_ms + thread_ms), other_ms * times)) AS ms
    FROM stopped JOIN stretch USING (file_id) WHERE other_ms > 0
),
-- The line at which forward is called whose results backward computes again.
checkpointed AS (
    SELECT host_event.file_id, any_value(host_time.source) AS source
    FROM (host_event JOIN plain ON number = named AND regexp_matches(name, 'torch/utils/checkpoint\.py\(\d+\): checkpoint$'))
    JOIN host_time ON host_time.file_id = host_event.file_id AND host_event.ts >= host_time.ts AND host_event.ts < host_time.ts + host_time.dur
    GROUP BY host_event.file_id
),
backward AS (
    SELECT file_id, ts, dur FROM host_event JOIN plain ON number = named WHERE name LIKE '<built-in method run\_backward of %' ESCAPE '\'
),
-- The time of what PyTorch itself has a cheaper way for, and of adding to gradients; with all that it calls.
call_time AS (
    WITH chosen AS (
        SELECT number, CASE WHEN name LIKE '%: zero_grad' THEN 'zero_grad' WHEN name LIKE '%tensor_str%' THEN 'format'
                            WHEN name LIKE '%: recompute_fn' THEN 'recompute'
                            WHEN regexp_matches(name, 'torch/optim/\w+\.py\(\d+\): __init__$') THEN 'new optimizer'
                            WHEN name LIKE '%: \_init\_group' ESCAPE '\' THEN 'state of an optimizer'
                            WHEN name LIKE '%: \_next\_index' ESCAPE '\' THEN 'sampler'
                            WHEN name LIKE '%/autograd/functional.py(%' THEN 'jacobian'
                            WHEN name IN ('aten::im2col', 'aten::col2im') THEN 'unfold'
                            WHEN regexp_matches(name, 'torch/(jit|fx|export)/') THEN 'trace'
                            WHEN name LIKE '%/nn/modules/module.py(%' THEN 'modules' ELSE plain END AS what FROM plain
        WHERE name IN ('autograd::engine::evaluate_function: torch::autograd::AccumulateGrad', 'autograd::engine::evaluate_function: EmbeddingBackward0', 'aten::one_hot', 'aten::sort', 'aten::argsort', 'aten::_unique2', 'aten::randperm',
                       'aten::im2col', 'aten::col2im', 'aten::nonzero', 'aten::masked_select', 'aten::linalg_inv_ex', 'aten::linalg_svd')
           OR regexp_matches(name, 'torch/(_tensor_str\.py\(\d+\): _str|(optim/optimizer|nn/modules/module)\.py\(\d+\): zero_grad)$')
           OR regexp_matches(name, 'torch/utils/checkpoint\.py\(\d+\): recompute_fn$|torch/utils/data/dataloader\.py\(\d+\): _next_index$|torch/optim/\w+\.py\(\d+\): (__init__|_init_group)$')
           OR regexp_matches(name, '(^|/)torch/__init__\.py\(\d+\): compile$')
           OR regexp_matches(name, 'torch/autograd/functional\.py\(\d+\): (jacobian|hessian)$')
           OR regexp_matches(name, 'torch/(jit/(_trace|_script)|fx/_symbolic_trace|export/__init__)\.py\(\d+\): (trace|script|symbolic_trace|export)$')
           OR regexp_matches(name, 'torch/nn/modules/module\.py\(\d+\): (eval|train|state_dict|load_state_dict|requires_grad_|apply|_apply|(named_)?(parameters|buffers|modules|children))$')
    ),
    written AS (
        SELECT file_id, ts FROM host_event JOIN plain ON plain.number = host_event.named WHERE name IN ('aten::zero_', 'aten::_foreach_zero_')
    ),
    -- Of calls within each other the outermost; print, which formats too, has its own advice.
    opened AS (
        SELECT host_event.file_id, host_event.ts, host_event.dur, chosen.what,
               max(host_event.ts + host_event.dur) OVER (PARTITION BY host_event.file_id ORDER BY host_event.ts, host_event.dur DESC, host_event.id
                                                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
        FROM host_event JOIN (FROM chosen UNION ALL SELECT number, 'print' FROM plain WHERE name = '<built-in function print>') AS chosen
          ON chosen.number = host_event.named
    ),
    called AS (
        SELECT opened.file_id, step.ts AS step_ts, what, opened.ts, opened.dur
        FROM opened
        ASOF LEFT JOIN written ON written.file_id = opened.file_id AND opened.ts + opened.dur >= written.ts
        JOIN host_step AS step ON step.file_id = opened.file_id AND opened.ts >= step.ts AND opened.ts < step.ts + step.dur
        -- Gradients that are set to None are not written.
        WHERE coalesce(opened.ts + opened.dur > reached, true) AND what <> 'print' AND (what <> 'zero_grad' OR written.ts >= opened.ts)
    ),
    one_step AS (
        SELECT called.file_id, called.step_ts, called.what,
               -- Of what backward runs, its forward's: the engine's own part has the line that calls it.
               arg_max(running.source, part * shared(called.ts, called.dur, running.ts, running.dur)) AS source, count(DISTINCT called.ts) AS calls,
               sum(part * shared(called.ts, called.dur, running.ts, running.dur)) AS ns
        FROM called JOIN running ON running.file_id = called.file_id AND running.step_ts = called.step_ts
         AND running.ts < called.ts + called.dur
         AND running.ts + running.dur > called.ts GROUP BY ALL
    )
    SELECT one_step.file_id, what, coalesce(any_value(checkpointed.source) FILTER (WHERE what = 'recompute'), any_value(one_step.source)) AS source,
           median(ns / step_ns) * any_value(bare_ms) AS ms, max(calls) AS calls
    FROM one_step JOIN step_running USING (file_id, step_ts) LEFT JOIN checkpointed USING (file_id) GROUP BY one_step.file_id, what
),
-- Backward adds to gradients that are filled with zeros, and keeps its own results where there are none: of several backward
-- passes in a step the first.
gradient_sums AS (
    SELECT file_id, ms / passes AS ms, calls / passes AS gradients
    FROM call_time JOIN (
        SELECT file_id, greatest(count(*) / any_value(steps), 1) AS passes FROM backward JOIN host_step_time USING (file_id) GROUP BY file_id
    ) USING (file_id)
    WHERE what = 'torch::autograd::AccumulateGrad'
),
-- What backward does after the last gradient that an optimizer takes: those are cleared, so that it keeps its own result there,
-- and it adds to the others.
untaken AS (
    WITH pass AS (
        SELECT backward.file_id, step.ts AS step_ts, min(backward.ts) AS ts, min(backward.ts + backward.dur) AS ended
        FROM backward ASOF JOIN host_step AS step ON step.file_id = backward.file_id AND backward.ts >= step.ts
        WHERE backward.ts < step.ts + step.dur AND backward.file_id NOT IN (SELECT file_id FROM device_slice) GROUP BY ALL
    ),
    event AS (
        SELECT file_id, ts, dur, name FROM host_event JOIN plain ON number = named
        WHERE name IN ('aten::add_', 'autograd::engine::evaluate_function: torch::autograd::AccumulateGrad')
    ),
    gradient AS (
        SELECT pass.*, event.ts AS begun, coalesce(addition.ts < event.ts + event.dur, false) AS is_added,
               max(event.ts + event.dur) FILTER (WHERE NOT coalesce(addition.ts < event.ts + event.dur, false)) OVER (PARTITION BY pass.file_id, step_ts) AS taken
        FROM event ASOF JOIN pass ON pass.file_id = event.file_id AND event.ts >= pass.ts
        ASOF LEFT JOIN (FROM event WHERE name = 'aten::add_') AS addition ON addition.file_id = event.file_id AND event.ts <= addition.ts
        WHERE event.name <> 'aten::add_' AND event.ts < pass.ended
    ),
    one_step AS (
        SELECT rest.file_id, step_ts, any_value(calls) AS calls, arg_max(source, running.dur) AS source,
               sum(part * shared(taken, ended - taken, running.ts, running.dur)) AS ns
        FROM (SELECT file_id, step_ts, taken, ended, count(*) AS calls FROM gradient WHERE begun >= taken GROUP BY ALL) AS rest
        JOIN running USING (file_id, step_ts) WHERE running.ts < ended AND running.ts + running.dur > taken GROUP BY ALL
    )
    SELECT file_id, any_value(source) AS source, max(calls) AS calls,
           list_median(list_resize(list(ns / step_ns), any_value(steps), 0)) * any_value(step_running.bare_ms) AS ms
    FROM one_step JOIN host_step_time USING (file_id) JOIN step_running USING (file_id, step_ts) GROUP BY file_id
),
-- Whether the largest table of embeddings has fewer rows than are looked up.
looked_up AS (
    WITH looked AS (
        SELECT host_event.file_id, TRY_CAST(args->'$."Input Dims"' AS BIGINT[][]) AS dims
        FROM host_event JOIN plain ON number = named JOIN slice USING (id) JOIN arg_set USING (arg_set_id) WHERE plain.name = 'aten::embedding'
    )
    SELECT file_id, arg_max(list_product(dims[2]) >= dims[1][1], dims[1][1]) AS are_many FROM looked WHERE len(dims[1]) > 0 GROUP BY file_id
),
replaceable AS (
    SELECT call_time.file_id, call_time.what || CASE WHEN call_time.what = 'EmbeddingBackward0' AND are_many THEN ' of many' ELSE '' END AS what, call_time.source, call_time.calls,
           call_time.ms + CASE call_time.what WHEN 'zero_grad' THEN coalesce(gradient_sums.ms, 0) WHEN 'new optimizer' THEN coalesce(state.ms, 0)
                          -- Where its integers become floating-point numbers on the same line.
                          WHEN 'aten::one_hot' THEN coalesce(converted.ms, 0) ELSE 0 END AS ms
    FROM call_time LEFT JOIN gradient_sums USING (file_id) LEFT JOIN looked_up USING (file_id)
    LEFT JOIN (SELECT file_id, source, sum(ms) AS ms FROM copies WHERE what = 'float' GROUP BY file_id, source) AS converted USING (file_id, source)
    LEFT JOIN (FROM call_time WHERE what = 'state of an optimizer') AS state ON state.file_id = call_time.file_id
    WHERE call_time.what NOT IN ('torch::autograd::AccumulateGrad', 'state of an optimizer')
      -- Of several rows, each by its own backward.
      AND (call_time.what <> 'jacobian' OR (SELECT count(*) FROM backward WHERE backward.file_id = call_time.file_id)
                                           >= 8 * (SELECT any_value(steps) FROM host_step_time WHERE host_step_time.file_id = call_time.file_id))
),
-- Lines that make tensors of nothing but sizes and numbers, and that nothing differentiates.
constants AS (
    SELECT file_id, source, arg_max(called, typical_ms) AS what, max(calls) AS calls,
           -- As many as there are gradients are these.
           sum(typical_ms) + CASE WHEN arg_max(called, typical_ms) = 'zero_' AND 2 * max(calls) > any_value(gradients)
                                  THEN any_value(gradient_sums.ms) ELSE 0 END AS ms,
           -- Ones are written into them by indices, a line or three later.
           bool_or(EXISTS (FROM host_cause AS later WHERE later.file_id = host_cause.file_id AND later.called = 'scatter_'
                           AND file_of(later.source) = file_of(host_cause.source)
                           AND line_of(later.source) - line_of(host_cause.source) BETWEEN 0 AND 3)) AS is_one_hot
    FROM host_cause LEFT JOIN gradient_sums USING (file_id)
    WHERE class IN ('operators', 'Python') AND source IS NOT NULL
      AND (what = 'aten::fill_' AND called IN ('empty', 'empty_like', 'new_empty', 'empty_strided', 'resize_') OR called IN ('zero_', 'fill_', 'zeros', 'ones', 'full', 'arange', 'eye', 'linspace', 'zeros_like', 'ones_like', 'full_like', 'new_zeros', 'new_ones', 'new_full', 'tril', 'triu'))
    GROUP BY file_id, source HAVING bool_or(called NOT IN ('tril', 'triu'))
),
-- Calls of a model whose result is detached and goes to another at once: what a generator made for its critic, which trains.
passed_on AS (
    WITH module AS (SELECT file_id, ts, dur, sourced FROM host_event JOIN plain ON number = named WHERE name LIKE 'nn.Module: %'),
    operator AS (SELECT file_id, ts, name FROM host_event JOIN plain ON number = named WHERE name LIKE 'aten::%'),
    detached AS (FROM operator WHERE name = 'aten::detach'),
    computed AS (FROM operator WHERE name <> 'aten::detach')
    SELECT module.file_id, module.ts, module.sourced
    FROM module ASOF JOIN detached ON detached.file_id = module.file_id AND detached.ts >= module.ts + module.dur
    ASOF JOIN module AS later ON later.file_id = module.file_id AND later.ts >= module.ts + module.dur
    ASOF LEFT JOIN computed ON computed.file_id = module.file_id AND computed.ts >= module.ts + module.dur
    WHERE detached.ts <= later.ts AND coalesce(later.ts <= computed.ts, true)
),
-- Calls of models that are in no other, and whether a gradient goes through them. Of those through which none goes, beside others
-- of the same through which one does, as for evaluation, the time.
whole_call AS (
    WITH called AS (
        SELECT file_id, ts, dur, named, name,
               max(ts + dur) OVER (PARTITION BY file_id ORDER BY ts, dur DESC, id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
        FROM host_event JOIN plain ON number = named WHERE name LIKE 'nn.Module: %'
    ),
    forward AS (
        SELECT DISTINCT host_event.file_id, host_event.ts FROM flow JOIN host_event ON host_event.id = slice_out WHERE flow.category = 'fwdbwd'
    )
    SELECT called.*, coalesce(forward.ts < called.ts + called.dur, false) AS is_differentiated
    FROM called ASOF LEFT JOIN forward ON forward.file_id = called.file_id AND called.ts <= forward.ts
    ASOF LEFT JOIN backward ON backward.file_id = called.file_id AND called.ts >= backward.ts
    WHERE coalesce(called.ts + called.dur > reached, true) AND coalesce(called.ts >= backward.ts + backward.dur, true)
),
evaluations AS (
    WITH judged AS (FROM whole_call),
    -- Calls of a part of the batch that trains play, as in reinforcement learning.
    evaluated AS (
        SELECT (file_id, named) FROM judged GROUP BY file_id, named
        HAVING avg(dur) FILTER (WHERE NOT is_differentiated) >= 0.5 * avg(dur) FILTER (WHERE is_differentiated)
    ),
    one_step AS (
        SELECT judged.file_id, step_ts, sum(part * shared(judged.ts, judged.dur, running.ts, running.dur)) AS ns,
               count(DISTINCT judged.ts) AS calls, arg_max(source, judged.dur) AS source, any_value(name) AS name
        FROM judged JOIN running ON running.file_id = judged.file_id AND running.ts < judged.ts + judged.dur
         AND running.ts + running.dur > judged.ts
        WHERE NOT is_differentiated AND (judged.file_id, named) IN (FROM evaluated)
          AND (judged.file_id, judged.ts) NOT IN (SELECT (file_id, ts) FROM passed_on) GROUP BY ALL
    )
    SELECT one_step.file_id, plain_name(any_value(name)) AS what, arg_max(source, ns) AS source,
           list_median(list_resize(list(ns / step_ns), any_value(steps), 0)) * any_value(step_running.bare_ms) AS ms, max(calls) AS calls
    FROM one_step JOIN host_step_time USING (file_id) JOIN step_running USING (file_id, step_ts) GROUP BY one_step.file_id
),
-- Calls of a model that looks up more rows in each step, as one that is given all tokens again with the next one.
grown AS (
    WITH looked_up AS (
        SELECT host_event.file_id, step.ts AS step_ts, sourced, arg_min(list_product(TRY_CAST(args->'$."Input Dims"' AS BIGINT[][])[2]), host_event.ts) AS many
        FROM host_event JOIN plain ON number = named JOIN slice USING (id) JOIN arg_set USING (arg_set_id)
        ASOF JOIN host_step AS step ON step.file_id = host_event.file_id AND host_event.ts >= step.ts
        WHERE plain.name = 'aten::embedding' AND host_event.file_id NOT IN (SELECT file_id FROM backward) GROUP BY ALL
    ),
    growth AS (
        SELECT file_id, list(many ORDER BY step_ts) AS every, every[-1] AS many, every[-1] - every[-2] AS more FROM looked_up GROUP BY file_id, sourced
        HAVING len(every) >= 3 AND more > 0 AND 10 * more <= many AND every[-2] - every[-3] = more
    ),
    one_step AS (
        SELECT whole_call.file_id, step_ts, sum(part * shared(whole_call.ts, whole_call.dur, running.ts, running.dur)) AS ns,
               count(DISTINCT whole_call.ts) AS calls, any_value(name) AS name, max(whole_call.ts) AS ts
        FROM whole_call JOIN running ON running.file_id = whole_call.file_id AND running.ts < whole_call.ts + whole_call.dur AND running.ts + running.dur > whole_call.ts
        WHERE whole_call.file_id IN (SELECT file_id FROM growth) GROUP BY ALL
    ),
    placed AS (
        SELECT one_step.*, place FROM one_step ASOF LEFT JOIN line_reached ON line_reached.file_id = one_step.file_id AND one_step.ts >= line_reached.ts
        LEFT JOIN named_place ON named_place.number = line_reached.number
    )
    SELECT placed.file_id, plain_name(any_value(name)) AS what, any_value(place) AS source, median(ns / step_ns) * any_value(bare_ms) AS ms, max(calls) AS calls,
           (SELECT max(many) FROM growth WHERE growth.file_id = placed.file_id) AS many, (SELECT arg_max(more, many) FROM growth WHERE growth.file_id = placed.file_id) AS more
    FROM placed JOIN step_running USING (file_id, step_ts) GROUP BY placed.file_id
),
-- The operators of one step by the gradients' graph: an operator's number is that of the next node, so that it has made one if a
-- later operator has a larger number; without a gradient it has none.
numbered AS (
    SELECT host_event.file_id, host_event.ts, sourced, TRY_CAST(args->>'$."Sequence number"' AS BIGINT) AS number,
           args->>'$."Fwd thread id"' = '0' AS is_forward
    FROM first_step AS step
    JOIN host_event ON host_event.file_id = step.file_id AND host_event.ts >= step.ts AND host_event.ts < step.ts + step.dur
    JOIN slice USING (id) LEFT JOIN arg_set USING (arg_set_id) WHERE slice.category = 'cpu_op'
),
-- Lines whose operators make nodes of that graph, none of which backward comes to, in that step or a later one.
unread AS (
    WITH gone_through AS (
        SELECT DISTINCT host_event.file_id, TRY_CAST(args->>'$."Sequence number"' AS BIGINT) AS number
        FROM host_event JOIN slice USING (id) JOIN arg_set USING (arg_set_id)
        WHERE slice.category = 'cpu_op' AND args->>'$."Fwd thread id"' <> '0'
    ),
    line AS (
        SELECT file_id, sourced, count(DISTINCT number) AS nodes
        FROM numbered JOIN (SELECT file_id, max(number) FILTER (WHERE is_forward) AS last FROM numbered GROUP BY file_id) USING (file_id)
        WHERE is_forward AND sourced >= 0 AND number < last AND file_id IN (SELECT file_id FROM numbered WHERE NOT is_forward)
          AND (file_id, sourced) NOT IN (SELECT (file_id, sourced) FROM passed_on)
        GROUP BY file_id, sourced
        HAVING NOT bool_or((file_id, number) IN (SELECT (file_id, number) FROM gone_through))
    ),
    spent AS (
        SELECT file_id, source, any_value(nodes) AS nodes, sum(typical_ms) AS ms
        FROM line JOIN named_place ON named_place.number = sourced JOIN host_cause USING (file_id)
        WHERE host_cause.source = place AND (class = 'operators' OR class = 'Python' AND called LIKE 'nn.Module: %') GROUP BY file_id, source
    )
    SELECT file_id, arg_max(source, ms) AS source, sum(ms) AS ms, sum(nodes) AS calls FROM spent GROUP BY file_id
),
-- Lines that compute on a CPU what no gradient goes through, in a step that has one: in no model that is only called, in no backward
-- and in no optimizer. Lines one after the other are one place.
asides AS (
    WITH called AS (
        SELECT numbered.file_id, sourced, number,
               coalesce(numbered.ts < whole_call.ts + whole_call.dur AND NOT is_differentiated, false) AS only_called,
               coalesce(lead(number) OVER (PARTITION BY numbered.file_id, number IS NULL ORDER BY numbered.ts) > number, number IS NOT NULL) AS makes_node
        FROM numbered ASOF LEFT JOIN backward ON backward.file_id = numbered.file_id AND numbered.ts >= backward.ts
        ASOF LEFT JOIN whole_call ON whole_call.file_id = numbered.file_id AND numbered.ts >= whole_call.ts
        WHERE coalesce(numbered.ts >= backward.ts + backward.dur, true) AND numbered.file_id IN (SELECT file_id FROM backward)
          AND numbered.file_id IN (SELECT file_id FROM numbered WHERE is_forward) AND numbered.file_id NOT IN (SELECT file_id FROM device_slice)
    ),
    line AS (
        SELECT file_id, sourced FROM called WHERE sourced >= 0 GROUP BY file_id, sourced
        HAVING NOT bool_or(makes_node OR only_called)
           AND (file_id, sourced) NOT IN (SELECT (file_id, sourced) FROM host_event JOIN plain ON plain.number = named WHERE plain.name LIKE 'Optimizer.%')
    ),
    spent AS (
        SELECT file_id, source, what, sum(typical_ms) AS ms, max(calls) AS calls, file_of(source) AS file, line_of(source) AS line,
               bool_or(coalesce(called IN ('copy_', 'lerp_', 'mul_', 'add_', 'sub_', 'addcmul_'), false)) AS is_update,
               regexp_matches(what, '^aten::(normal_?|uniform_|bernoulli_?|random_|exponential_|rand\w*|multinomial)$') AS draws,
               regexp_matches(what, '^aten::(isnan|isinf|isfinite|abs|ne|eq|any|all|logical_\w+|bitwise_\w+)$') AS checks
        FROM line JOIN named_place ON named_place.number = sourced JOIN host_cause USING (file_id)
        WHERE host_cause.source = place AND class = 'operators' AND what LIKE 'aten::%' AND NOT coalesce(called LIKE 'nn.Module: %', false) GROUP BY ALL
    )
    SELECT file_id, arg_max(what, (ms, what)) AS what, sum(ms) AS ms, max(calls) AS calls, file, min(line) AS first, max(line) AS last,
           coalesce(sum(ms) FILTER (WHERE draws) >= 0.5 * sum(ms), false) AS is_drawn, coalesce(sum(ms) FILTER (WHERE checks) >= 0.5 * sum(ms), false) AS is_check,
           -- The line that makes it so.
           CASE WHEN is_drawn THEN arg_max(source, ms) FILTER (WHERE draws) WHEN is_check THEN arg_max(source, ms) FILTER (WHERE checks) ELSE arg_max(source, ms) END AS source,
           -- In place, or as a · x + b · y.
           bool_or(is_update) OR bool_and(regexp_full_match(what, 'aten::(mul|add|detach|to|_to_copy|copy_|empty_strided)')) AND coalesce(sum(calls) FILTER (WHERE what = 'aten::mul') = 2 * sum(calls) FILTER (WHERE what = 'aten::add'), false) AS is_update,
           coalesce(sum(ms) FILTER (WHERE regexp_full_match(what, 'aten::(mul|add|sub|rsub|div)')) >= 0.5 * sum(ms), false) AS is_arithmetic
    FROM (SELECT *, line - dense_rank() OVER (PARTITION BY file_id, file ORDER BY line) AS block FROM spent)
    GROUP BY file_id, file, block
),
-- Two products of a line of which one takes the other's result, by their shapes: `times` is how much less the other order computes.
chains AS (
    WITH called AS (
        -- Operators, without those that only call others or make views.
        SELECT host_event.file_id, host_event.id, host_event.ts, sourced, plain.name,
               lag(CASE WHEN plain.name IN ('aten::mm', 'aten::bmm') THEN host_event.id END) OVER one AS before_id, lag(sourced) OVER one AS before_sourced
        FROM host_event JOIN plain ON plain.number = named
        WHERE plain.name LIKE 'aten::%' AND NOT regexp_matches(plain.name, '^aten::(matmul|linear|einsum|t|transpose|numpy_T|permute|as_strided|resolve_conj|resolve_neg|_?reshape(_alias)?|(_unsafe_)?view|(un)?squeeze|expand|detach)$')
        WINDOW one AS (PARTITION BY host_event.file_id ORDER BY host_event.ts, host_event.id)
    ),
    followed AS (
        SELECT called.file_id, id, before_id, sourced
        FROM called ASOF LEFT JOIN backward ON backward.file_id = called.file_id AND called.ts >= backward.ts
        WHERE name IN ('aten::mm', 'aten::bmm') AND before_id IS NOT NULL AND before_sourced = sourced AND coalesce(called.ts >= backward.ts + backward.dur, true)
    ),
    sized AS (
        SELECT slice.id, TRY_CAST(args->'$."Input Dims"' AS BIGINT[][]) AS dims FROM slice JOIN arg_set USING (arg_set_id)
        WHERE slice.id IN (SELECT id FROM followed UNION SELECT before_id FROM followed)
    ),
    pair AS (
        -- Of batches, which all have the same number of products, one.
        SELECT followed.file_id, place AS source, first.dims[1][-2:] AS a, first.dims[2][-2:] AS b, second.dims[1][-2:] AS c, second.dims[2][-2:] AS d
        FROM followed JOIN named_place ON named_place.number = sourced
        JOIN sized AS first ON first.id = before_id JOIN sized AS second ON second.id = followed.id
        WHERE len(a) = 2 AND len(b) = 2 AND len(c) = 2 AND len(d) = 2 AND len(list_distinct([dim[:-3] FOR dim IN first.dims[:2] || second.dims[:2]])) = 1
    ),
    ordered AS (
        SELECT file_id, source, (a[1] * a[2] * b[2] + c[1] * c[2] * d[2])
               / least(CASE WHEN c = [a[1], b[2]] THEN b[1] * b[2] * d[2] + a[1] * a[2] * d[2] END,
                       CASE WHEN d = [a[1], b[2]] THEN c[1] * c[2] * a[2] + c[1] * b[1] * b[2] END) AS times
        FROM pair
    )
    SELECT ordered.file_id, ordered.source, any_value(line.ms) AS ms, any_value(line.calls) AS calls, any_value(line.called) AS called, max(times) AS times
    FROM ordered JOIN (
        SELECT file_id, source, sum(typical_ms) AS ms, max(calls) AS calls, arg_max(called, typical_ms) AS called FROM host_cause
        WHERE class = 'operators' AND what IN ('aten::mm', 'aten::bmm') GROUP BY file_id, source
    ) AS line ON line.file_id = ordered.file_id AND line.source = ordered.source
    WHERE times >= 3 GROUP BY ordered.file_id, ordered.source
),
-- Convolutions that read one place for each result, right after an interpolation: done before it they read fewer places, and the
-- interpolation makes as many channels as they have results.
enlarged AS (
    WITH called AS (
        SELECT host_event.file_id, host_event.id, host_event.ts, sourced, plain.name,
               lag(CASE WHEN plain.name LIKE 'aten::upsample\_%' ESCAPE '\' THEN host_event.id END) OVER one AS before_id, lag(sourced) OVER one AS before_sourced
        FROM host_event JOIN plain ON plain.number = named
        WHERE plain.name LIKE 'aten::%' AND NOT regexp_matches(plain.name, '^aten::(empty\w*|resize_|contiguous|clone|copy_|to|_to_copy|as_strided|detach|view|set_)$')
        WINDOW one AS (PARTITION BY host_event.file_id ORDER BY host_event.ts, host_event.id)
    ),
    sized AS (
        SELECT slice.id, TRY_CAST(args->'$."Input Dims"' AS BIGINT[][]) AS dims, args->>'$."Concrete Inputs"[3]' AS stride, args->>'$."Concrete Inputs"[4]' AS padding
        FROM slice JOIN arg_set USING (arg_set_id)
        WHERE slice.id IN (SELECT id FROM called WHERE before_id IS NOT NULL UNION SELECT before_id FROM called)
    ),
    pair AS (
        SELECT DISTINCT called.file_id, called.name, place.place AS source, before_place.place AS before_source,
               small.dims[1] AS given, large.dims[1] AS made, large.dims[2] AS weight
        FROM called JOIN sized AS small ON small.id = before_id JOIN sized AS large ON large.id = called.id
        JOIN named_place AS place ON place.number = called.sourced JOIN named_place AS before_place ON before_place.number = before_sourced
        WHERE regexp_matches(name, '^aten::conv[123]d$') AND len(made) > 2 AND made[:2] = given[:2]
          AND coalesce(regexp_full_match(large.stride, '\[1(, 1)*\]'), true) AND coalesce(regexp_full_match(large.padding, '\[0(, 0)*\]'), true)
          AND list_product(weight[3:]) = 1 AND weight[2] = made[2] AND list_product(made) > list_product(given)
    ),
    spent AS (
        SELECT pair.*, list_product(made) / list_product(given) AS times,
               sum(ms) FILTER (WHERE contains(lower(operator), 'upsample')) AS enlarging_ms, sum(ms) FILTER (WHERE contains(lower(operator), 'conv')) AS convolving_ms
        FROM pair JOIN host_distance ON host_distance.file_id = pair.file_id AND (
            host_distance.source = before_source AND contains(lower(operator), 'upsample')
            OR host_distance.source = pair.source AND contains(lower(operator), 'conv') AND contains(shapes, replace(made::VARCHAR, ' ', '')))
        GROUP BY ALL
    )
    SELECT file_id, arg_max(before_source, enlarging_ms + convolving_ms) AS source, 'aten::upsample' AS what,
           sum(enlarging_ms + convolving_ms) AS ms, count(*) AS calls, arg_max(times, enlarging_ms) AS times,
           sum(greatest(1 - weight[1] / weight[2], 0) * enlarging_ms + (1 - 1 / times) * convolving_ms) AS win
    FROM spent GROUP BY file_id
),
-- Where PyTorch looks for anomalies, each operator formats the stack that called it, and backward tests its gradients.
anomalies AS (
    SELECT file_id, arg_max(source, typical_ms) AS source, sum(typical_ms) AS ms, count(*) AS calls FROM host_cause
    WHERE class IN ('operators', 'I/O', 'untraced')
      AND file_id IN (SELECT metadata.file_id FROM metadata WHERE name = 'tilewright anomalies') GROUP BY file_id
),
-- Lines that combine tensors over axes that only one of them has, and sum over axes: of `times` as many elements.
broadcasts AS (
    WITH shaped AS (
        SELECT DISTINCT host_event.file_id, place AS source, plain, TRY_CAST(args->'$."Input Dims"' AS BIGINT[][]) AS dims
        FROM host_event JOIN plain ON plain.number = named JOIN named_place ON named_place.number = sourced
        JOIN slice USING (id) JOIN arg_set USING (arg_set_id)
        WHERE host_event.dur > 100_000 AND plain.name IN ('aten::mul', 'aten::sub', 'aten::add', 'aten::div')
    ),
    combined AS (
        SELECT file_id, source, plain, [greatest(CASE WHEN axis < len(a) THEN a[len(a) - axis] ELSE 1 END, CASE WHEN axis < len(b) THEN b[len(b) - axis] ELSE 1 END)
                             FOR axis IN range(greatest(len(a), len(b)) - 1, -1, -1)] AS shape,
               list_product(shape) / greatest(list_product(a), list_product(b), 1) AS times,
               -- Two columns of elements that perhaps belong together, of which one has an axis more.
               CASE WHEN len(a) <> len(b) AND [n FOR n IN a IF n <> 1] = [n FOR n IN b IF n <> 1] AND len([n FOR n IN a IF n <> 1]) = 1
                    THEN format('{} and {}', a, b) END AS alike
        FROM (SELECT *, dims[1] AS a, dims[2] AS b FROM shaped WHERE len(dims) >= 2 AND len(dims[1]) > 0 AND len(dims[2]) > 0)
    ),
    -- On the line itself, or on one of the next three by the shape.
    summed AS (
        SELECT file_id, source, sum(typical_ms) AS ms, max(calls) AS calls, bool_or(is_sum(what)) AS sums FROM host_cause
        WHERE class = 'operators' GROUP BY file_id, source
    ),
    later AS (
        SELECT combined.file_id, combined.source, sum(ms) AS ms FROM (SELECT DISTINCT file_id, source, shape FROM combined WHERE times >= 8) AS combined
        JOIN host_distance ON host_distance.file_id = combined.file_id AND file_of(host_distance.source) = file_of(combined.source)
         AND line_of(host_distance.source) - line_of(combined.source) BETWEEN 1 AND 3 AND contains(shapes, replace(shape::VARCHAR, ' ', ''))
        GROUP BY ALL HAVING bool_or(is_sum(operator))
    )
    SELECT combined.file_id, combined.source, any_value(plain) AS what, any_value(summed.ms + CASE WHEN sums THEN 0 ELSE later.ms END) AS ms,
           any_value(summed.calls) AS calls, max(times) AS times, arg_max(alike, times) AS alike
    FROM combined JOIN summed ON summed.file_id = combined.file_id AND summed.source = combined.source
    LEFT JOIN later ON later.file_id = combined.file_id AND later.source = combined.source
    WHERE times >= 8 AND (sums OR later.ms IS NOT NULL) GROUP BY combined.file_id, combined.source
),
-- Copies to another type for which no line asks, as those of autocast; the first of a line are of its operands.
casts AS (
    WITH typed AS (
        SELECT host_event.file_id, place AS source, TRY_CAST(args->'$."Input type"' AS VARCHAR[]) AS types, host_event.dur
        FROM host_event JOIN plain ON plain.number = named JOIN named_place ON named_place.number = sourced
        JOIN slice USING (id) JOIN arg_set USING (arg_set_id) WHERE plain.name = 'aten::copy_'
    ),
    line AS (
        SELECT file_id, source, sum(dur) FILTER (WHERE types[1] <> types[2] AND (types[1] IN ('c10::BFloat16', 'c10::Half') OR types[2] IN ('c10::BFloat16', 'c10::Half')))
                                / sum(dur) AS part
        FROM typed GROUP BY file_id, source HAVING part > 0
    )
    SELECT host_cause.file_id, host_cause.source, sum(typical_ms) * any_value(part) AS ms, coalesce(sum(operators) FILTER (WHERE what = 'aten::copy_'), 0) AS calls
    FROM line JOIN host_cause ON host_cause.file_id = line.file_id AND host_cause.source = line.source
    WHERE class = 'operators' AND what IN ('aten::copy_', 'aten::_to_copy', 'aten::to', 'aten::empty_strided')
      AND called NOT IN ('to', 'float', 'half', 'bfloat16', 'double', 'type', 'copy_', 'tensor') GROUP BY host_cause.file_id, host_cause.source
),
-- Lines that break a compiled graph, by the functions in which Dynamo goes on after them. To enter compiled code again, forward
-- and backward, takes at most 0.4 ms; more than that is computed there.
breaks AS (
    WITH resumed AS (
        SELECT file_id, regexp_replace(name, '\(\d+\): .*$', '') || ':' || regexp_extract(name, '_at_(\d+)$', 1) AS source, count(*) AS calls
        FROM host_event JOIN plain ON number = named WHERE regexp_matches(name, '\(\d+\): torch_dynamo_resume_in_.*_at_\d+$') GROUP BY ALL
    ),
    entered AS (SELECT file_id, sum(ms) AS ms FROM entering_line GROUP BY file_id)
    SELECT file_id, arg_max(source, resumed.calls) AS source, sum(resumed.calls) / any_value(steps) AS calls,
           least(any_value(entered.ms), 0.4 * any_value(times) * sum(resumed.calls) / any_value(steps)) AS ms
    FROM resumed JOIN entered USING (file_id) JOIN host_step_time USING (file_id) JOIN stretch USING (file_id) GROUP BY file_id
),
-- Operators on all scores of an attention: of the shape of a softmax whose result a batch of products takes. Of light steps at
-- the file with the host's.
attention AS (
    WITH shaped AS (
        SELECT coalesce(described_by, host_distance.file_id) AS file_id, operator, source, ms, calls, TRY_CAST(shapes AS BIGINT[][])[1] AS dims
        FROM host_distance LEFT JOIN description USING (file_id)
    ),
    scores AS (
        SELECT DISTINCT file_id, dims FROM shaped WHERE operator = 'aten::_softmax' AND len(dims) >= 3
          AND EXISTS (FROM shaped AS product WHERE product.file_id = shaped.file_id AND product.operator = 'aten::bmm'
                      AND list_product(product.dims) = list_product(shaped.dims) AND product.dims[-2:] = shaped.dims[-2:])
          AND file_id NOT IN (SELECT file_id FROM shaped WHERE contains(operator, 'scaled_dot_product_attention_math'))
    )
    SELECT shaped.file_id, any_value(source) FILTER (WHERE operator = 'aten::_softmax') AS source, sum(ms) AS ms, sum(calls) AS calls,
           any_value(dims)::VARCHAR AS dims
    FROM shaped JOIN scores USING (file_id, dims) WHERE operator NOT IN ('aten::bmm', 'aten::baddbmm') GROUP BY shaped.file_id
),
logits AS (
    SELECT file_id, arg_max(source, host_distance.ms) AS source, 'log_softmax' AS what,
           sum(host_distance.ms) AS ms, sum(calls) AS calls,
           -- What they take since others use the processors, fewer passes do not save.
           sum(greatest(host_distance.win - CASE WHEN attributed_by = 'host' THEN host_distance.ms * (1 - 1 / times) ELSE 0 END, 0)) AS win
    FROM host_distance LEFT JOIN stretch USING (file_id)
    WHERE regexp_matches(operator, '^aten::(_log_softmax|nll_loss)') AND TRY_CAST(shapes AS BIGINT[][])[1][-1] >= 256 GROUP BY file_id
)
SELECT file_id, kind, source, what, ms, calls, inner_what, inner_source, inner_ms FROM waits
UNION ALL SELECT file_id, 'communication', source, 'collectives', waited_ms, calls, 'rank ' || last_rank, NULL, NULL FROM exchange
UNION ALL SELECT file_id, 'exchange', source, 'collectives', moved_ms, calls, NULL, NULL, megabytes FROM exchange
-- Batches that are evaluated in a loop on one line are the evaluation's, with what that line computes of their results.
UNION ALL SELECT file_id, 'loop', source, what, ms, calls, inner_what, NULL, runs FROM loops ANTI JOIN evaluations
          ON loops.file_id = evaluations.file_id AND loops.source = evaluations.source AND loops.ms <= 2 * evaluations.ms
-- Most of the calls are PyTorch's own where it looks for anomalies.
UNION ALL SELECT file_id, 'small', source, what, ms, calls, NULL, NULL, NULL FROM small ANTI JOIN anomalies USING (file_id)
UNION ALL SELECT file_id, 'Python', source, what, ms, calls, 'PyTorch', NULL, NULL FROM converting
UNION ALL SELECT file_id, 'Python', source, what, ms, calls, NULL, NULL, NULL FROM python
UNION ALL SELECT file_id, 'copy', source, what, ms, calls, NULL, NULL, NULL FROM copies
UNION ALL SELECT file_id, 'constant', source, what, ms, calls, CASE WHEN is_one_hot THEN 'scatter_' END, NULL, NULL FROM constants
UNION ALL SELECT file_id, 'double', source, what, ms, calls, NULL, NULL, NULL FROM doubles
UNION ALL SELECT file_id, 'half', source, what, ms, calls, NULL, NULL, floor_ms FROM halves
UNION ALL SELECT file_id, 'single', source, what, ms, calls, NULL, NULL, NULL FROM singles
UNION ALL SELECT file_id, 'optimizer', source, optimizer, ms, calls, NULL, NULL, kinds FROM optimizer_time
UNION ALL SELECT file_id, 'threads', source, what, ms, calls, NULL, NULL, win FROM computing
UNION ALL SELECT file_id, 'replaceable', source, what, ms, calls, NULL, NULL, NULL FROM replaceable
UNION ALL SELECT file_id, 'anomalies', source, 'anomalies', ms, calls, NULL, NULL,
                 greatest((SELECT sum(greatest(least(coalesce(win, host_distance.ms), host_distance.ms - 0.01 * host_distance.calls / steps), 0))
                           FROM host_distance JOIN host_step_time USING (file_id) WHERE host_distance.file_id = anomalies.file_id),
                          (SELECT sum(ms) / 2 FROM small WHERE small.file_id = anomalies.file_id))
FROM anomalies
UNION ALL SELECT file_id, 'evaluation', source, what,
                 greatest(ms, (SELECT max(loops.ms) FROM loops WHERE loops.file_id = evaluations.file_id
                               AND loops.source = evaluations.source AND loops.ms <= 2 * evaluations.ms)), calls, NULL, NULL, NULL
FROM evaluations
UNION ALL SELECT file_id, 'grown', source, what, ms, calls, many::VARCHAR, NULL, more FROM grown
UNION ALL SELECT file_id, 'unread', source, 'forward', ms, calls, NULL, NULL, NULL FROM unread
UNION ALL SELECT file_id, 'untaken', source, 'backward', ms, calls, NULL, NULL, NULL FROM untaken
UNION ALL SELECT file_id, 'chain', source, 'aten::mm', ms, calls, called, NULL, times FROM chains
UNION ALL SELECT file_id, 'casts', source, 'aten::copy_', ms, calls, NULL, NULL, NULL FROM casts
UNION ALL SELECT file_id, 'enlarged', source, times::VARCHAR, ms, calls, NULL, NULL, win FROM enlarged
UNION ALL SELECT file_id, 'broadcast', source, what, ms, calls, alike, NULL, times FROM broadcasts
UNION ALL SELECT file_id, 'breaks', source, 'graph breaks', ms, calls, NULL, NULL, NULL FROM breaks
UNION ALL SELECT attention.file_id, 'attention', source, dims, ms, calls / steps, NULL, NULL, NULL FROM attention JOIN host_step_time USING (file_id)
UNION ALL SELECT file_id, 'interpreter', source, what, ms, 1, NULL, NULL, NULL FROM interpreter
UNION ALL SELECT file_id, 'logits', source, what, ms, calls, NULL, NULL, win FROM logits
UNION ALL SELECT file_id, 'aside', source, what, ms, calls, CASE WHEN is_drawn THEN 'drawn' WHEN is_check THEN 'check' WHEN is_update THEN 'update' WHEN is_arithmetic THEN 'arithmetic' END, first::VARCHAR, last FROM asides;

-- What another cause says of the same lines is more exact.
DELETE FROM host_candidate AS general WHERE kind IN ('aside', 'data') AND EXISTS (
    FROM host_candidate AS other WHERE other.file_id = general.file_id AND other.ms >= 0.5 * general.ms
     AND CASE general.kind WHEN 'data' THEN other.kind = 'replaceable' AND other.what = 'sampler'
              ELSE other.kind NOT IN ('aside', 'threads', 'interpreter', 'anomalies') AND file_of(other.source) = file_of(general.source)
               AND line_of(other.source) BETWEEN TRY_CAST(general.inner_source AS BIGINT) AND general.inner_ms END
);
