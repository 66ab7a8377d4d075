-- Operators of kernels in CUDA graphs: a replay launches them together, so their launch does not identify them.

-- What PyTorch's and the libraries' kernels are called.
CREATE OR REPLACE TEMP MACRO pointwise_kernel() AS
    '\b(sigmoid|tanh|silu|exp|log|sqrt|rsqrt|neg|abs|sin|cos|erf|reciprocal|clamp|where|masked_fill|leaky_relu|threshold)(?:_backward)?_kernel';
CREATE OR REPLACE TEMP MACRO named_operator(kernel) AS CASE
    WHEN kernel LIKE 'triton\_%' ESCAPE '\' THEN kernel
    WHEN regexp_matches(kernel, '(?i)flash|fmha|attention') THEN 'attention'
    WHEN regexp_matches(kernel, '(?i)gemm|gemv|cutlass|cublas|nvjet|xmma|splitk') THEN 'matrix product'
    WHEN regexp_matches(kernel, '(?i)conv|wgrad|dgrad|cudnn') THEN 'convolution'
    WHEN regexp_matches(kernel, '(?i)layer_?norm|GammaBeta') THEN 'aten::native_layer_norm'
    WHEN regexp_matches(kernel, '(?i)softmax') THEN 'aten::_softmax'
    WHEN regexp_matches(kernel, '(?i)dropout') THEN 'aten::native_dropout'
    WHEN regexp_matches(kernel, '(?i)gelu') THEN 'aten::gelu'
    WHEN regexp_matches(kernel, '(?i)multi_tensor|adam|sgd') THEN 'optimizer'
    WHEN regexp_matches(kernel, '(?i)embedding') THEN 'aten::embedding'
    WHEN regexp_matches(kernel, 'CUDAFunctor(OnSelf|OnOther)?_add') THEN 'aten::add'
    WHEN regexp_matches(kernel, 'MulFunctor') THEN 'aten::mul'
    WHEN regexp_matches(kernel, 'Div(True|Floor|Trunc)?Functor') THEN 'aten::div'
    WHEN regexp_matches(kernel, pointwise_kernel()) THEN 'aten::' || regexp_extract(kernel, pointwise_kernel(), 1)
    WHEN regexp_matches(kernel, '(?i)reduce_kernel') THEN 'aten::sum'
    WHEN regexp_matches(kernel, '(?i)FillFunctor|Memset') THEN 'aten::fill_'
    WHEN regexp_matches(kernel, '(?i)copy|Memcpy') THEN 'aten::copy_'
    WHEN regexp_matches(kernel, '(?i)elementwise') THEN 'pointwise'
END;

-- Whether a kernel of that name can be one of that operator.
CREATE OR REPLACE TEMP MACRO agrees(kernel, operator) AS CASE named_operator(kernel)
    WHEN 'matrix product' THEN regexp_matches(operator, 'mm|linear|matmul|einsum|product')
    WHEN 'convolution' THEN regexp_matches(operator, 'conv')
    WHEN 'attention' THEN regexp_matches(operator, 'attention')
    ELSE contains(lower(kernel), regexp_replace(lower(operator), '^\w+::_?|_$', '', 'g'))
END;

-- First choice, `capture`: the calls recorded during the capture of the graph, if a file of the run has them. They launched
-- nothing then; a replay with the same number of kernels runs them in order.
CREATE OR REPLACE TEMP TABLE captured AS
WITH opened AS (
    SELECT file_id, ts, row_number() OVER (PARTITION BY file_id ORDER BY ts) AS capture
    FROM device_call WHERE regexp_matches(name, '^(cuda|cu)StreamBeginCapture')
),
closed AS (SELECT file_id, ts FROM device_call WHERE regexp_matches(name, '^(cuda|cu)StreamEndCapture')),
span AS (
    SELECT opened.file_id, capture, opened.ts, min(closed.ts) AS last_ts
    FROM opened JOIN closed ON closed.file_id = opened.file_id AND closed.ts > opened.ts
    GROUP BY opened.file_id, capture, opened.ts
),
inside AS (
    SELECT call.file_id, span.capture, call.slice_id, call.ts
    FROM device_call AS call
    JOIN span ON span.file_id = call.file_id AND call.ts BETWEEN span.ts AND span.last_ts
    WHERE regexp_matches(call.name, 'LaunchKernel|LaunchCooperative|Memcpy|Memset')
      AND call.slice_id NOT IN (SELECT launch_id FROM device_slice WHERE launch_id IS NOT NULL)
)
SELECT file_id, capture, slice_id AS launch_id,
       row_number() OVER (PARTITION BY file_id, capture ORDER BY ts) AS position,
       count(*) OVER (PARTITION BY file_id, capture) AS length
FROM inside;

CREATE OR REPLACE TEMP TABLE replayed AS
SELECT slice_id, file_id, correlation, name, row_number() OVER replay AS position,
       count(*) OVER (PARTITION BY file_id, correlation) AS length
FROM device_slice WHERE attributed_by = 'graph' OR (attributed_by IS NULL AND correlation IS NOT NULL)
-- Nodes are numbered as they were captured; branches run in any order.
WINDOW replay AS (PARTITION BY file_id, correlation ORDER BY graph_node, ts, slice_id);

-- Of several captures of that length the one whose operators agree with the kernels' names, then one of the same file,
-- then the last.
CREATE OR REPLACE TEMP TABLE by_capture AS
WITH paired AS (
    SELECT replayed.slice_id, replayed.file_id, replayed.correlation, captured.launch_id, captured.capture,
           captured.file_id AS of_file, agrees(replayed.name, coalesce(context.operator, ''))::BIGINT AS fits
    FROM replayed JOIN captured USING (position, length)
    LEFT JOIN launch_context AS context USING (launch_id)
),
scored AS (
    SELECT *, sum(fits) OVER (PARTITION BY file_id, correlation, of_file, capture) AS score FROM paired
)
SELECT slice_id, arg_max(launch_id, (score, of_file = file_id, of_file, capture)) AS launch_id
FROM scored GROUP BY slice_id;

-- Second choice, `same kernel`: the operator that launched a kernel of that name on that grid elsewhere in the file, or
-- in another one of the run, where it is always the same one.
CREATE OR REPLACE TEMP TABLE by_kernel AS
WITH wanted AS (
    SELECT DISTINCT name, grid, block FROM device_slice WHERE attributed_by = 'graph' OR attributed_by IS NULL
),
launched AS (
    SELECT device_slice.*, coalesce((arg_set.args->'$."Input Dims"')::VARCHAR, '') AS operands
    FROM device_slice
    JOIN wanted USING (name, grid, block)
    LEFT JOIN slice ON slice.id = operator_id
    LEFT JOIN arg_set USING (arg_set_id)
    WHERE attributed_by = 'launch'
),
known AS (
    SELECT file_id, name, grid, block, any_value(operator) AS operator, any_value(source) AS source,
           -- With different operands on the same grid the call is ambiguous.
           CASE WHEN count(DISTINCT operands) <= 1 THEN max(operator_id) END AS operator_id
    FROM launched
    -- Of a file, or of all that are in the run.
    GROUP BY GROUPING SETS ((file_id, name, grid, block), (name, grid, block))
    HAVING count(DISTINCT operator) = 1
)
SELECT d.slice_id, coalesce(own.operator, others.operator) AS operator, coalesce(own.source, others.source) AS source,
       CASE WHEN own.operator IS NULL THEN others.operator_id ELSE own.operator_id END AS operator_id
FROM device_slice d
LEFT JOIN known AS own ON own.file_id = d.file_id AND own.name = d.name AND own.grid = d.grid AND own.block = d.block
LEFT JOIN known AS others ON others.file_id IS NULL AND others.name = d.name AND others.grid = d.grid AND others.block = d.block
WHERE (d.attributed_by = 'graph' OR d.attributed_by IS NULL) AND coalesce(own.operator, others.operator) IS NOT NULL;

UPDATE device_slice SET operator_id = context.operator_id, operator = slice.name, source = context.place,
       source_function = context.function, ranges = coalesce(context.ranges, []),
       forward_ranges = coalesce(context.forward_ranges, []), attributed_by = 'capture'
FROM by_capture
JOIN launch_context AS context ON context.launch_id = by_capture.launch_id
JOIN slice ON slice.id = context.operator_id
WHERE by_capture.slice_id = device_slice.slice_id;

UPDATE device_slice SET operator_id = by_kernel.operator_id, operator = by_kernel.operator, source = by_kernel.source,
       attributed_by = 'same kernel'
FROM by_kernel
WHERE by_kernel.slice_id = device_slice.slice_id AND coalesce(attributed_by, 'graph') = 'graph';

-- Third choice, `name`.
UPDATE device_slice SET operator = named_operator(name), attributed_by = 'name'
WHERE coalesce(attributed_by, 'graph') = 'graph' AND named_operator(name) IS NOT NULL;
