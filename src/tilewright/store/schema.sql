-- One run, one file. A table is one dataclass of `tilewright.records`: a row is an instance, a column
-- is a field; the fields of `Cost` are columns of the operator or region that has it.
-- Counts are elements unless the name says bytes; times are microseconds; sizes are bytes.

CREATE TABLE run (                      -- exactly one row
    created     TIMESTAMP NOT NULL,     -- UTC
    command     VARCHAR NOT NULL,       -- as typed: tilewright optimize block.py:case
    target      VARCHAR NOT NULL,
    "case"      VARCHAR NOT NULL,
    dims        MAP(VARCHAR, BIGINT) NOT NULL,   -- the named dimensions with their sizes
    machine     MAP(VARCHAR, VARCHAR) NOT NULL,  -- what the run ran on, as label and value
    tilewright  VARCHAR NOT NULL        -- the version that wrote this file
);

CREATE TABLE operator (
    graph               VARCHAR NOT NULL,   -- forward, backward
    stage               VARCHAR NOT NULL,   -- before: a node of the captured graph; after: one launch
    index               BIGINT NOT NULL,    -- its place in the order of execution
    name                VARCHAR NOT NULL,
    target              VARCHAR NOT NULL,
    operator_class      VARCHAR NOT NULL,   -- compute, pointwise, reduction, layout, random, library, unknown
    shape               BIGINT[] NOT NULL,
    dtype               VARCHAR NOT NULL,
    reads               BIGINT NOT NULL,
    writes              BIGINT NOT NULL,
    unused              BIGINT NOT NULL,    -- written, and read by nobody
    bytes_read          BIGINT NOT NULL,
    bytes_written       BIGINT NOT NULL,
    flops               BIGINT NOT NULL,
    transcendentals     BIGINT NOT NULL,
    reads_symbolic      VARCHAR,
    writes_symbolic     VARCHAR,
    unused_symbolic     VARCHAR,
    flops_symbolic      VARCHAR,
    provenance          VARCHAR NOT NULL,   -- formula, unknown: then the counts above mean nothing
    floor_us            DOUBLE,
    bound               VARCHAR,
    region              VARCHAR,
    source              VARCHAR,            -- the user's line
    shape_symbolic      VARCHAR,
    inputs              VARCHAR[] NOT NULL, -- names of the operators it reads
    predicted_us        DOUBLE,             -- by the model of times fitted to the device
    measured_us         DOUBLE,
    bytes               BIGINT GENERATED ALWAYS AS (bytes_read + bytes_written),
    intensity           DOUBLE GENERATED ALWAYS AS (1e0 * flops / nullif(bytes_read + bytes_written, 0))
);

CREATE TABLE region (                   -- a set of operators that became one kernel
    graph               VARCHAR NOT NULL,
    name                VARCHAR NOT NULL,
    members             VARCHAR[] NOT NULL,
    reads               BIGINT NOT NULL,
    writes              BIGINT NOT NULL,
    unused              BIGINT NOT NULL,
    bytes_read          BIGINT NOT NULL,
    bytes_written       BIGINT NOT NULL,
    flops               BIGINT NOT NULL,
    transcendentals     BIGINT NOT NULL,
    reads_symbolic      VARCHAR,
    writes_symbolic     VARCHAR,
    unused_symbolic     VARCHAR,
    flops_symbolic      VARCHAR,
    provenance          VARCHAR NOT NULL,
    language            VARCHAR NOT NULL,
    source_code         VARCHAR NOT NULL,
    floor_us            DOUBLE,
    bound               VARCHAR,
    predicted_us        DOUBLE,
    measured_us         DOUBLE,
    bytes               BIGINT GENERATED ALWAYS AS (bytes_read + bytes_written),
    intensity           DOUBLE GENERATED ALWAYS AS (1e0 * flops / nullif(bytes_read + bytes_written, 0))
);

CREATE TABLE decision (                 -- what became of one pair of neighbours
    graph           VARCHAR NOT NULL,
    producer        VARCHAR NOT NULL,
    consumer        VARCHAR NOT NULL,
    verdict         VARCHAR NOT NULL,   -- taken, refused, impossible, tried and lost
    reason          VARCHAR NOT NULL,
    bytes_saved     BIGINT NOT NULL,
    predicted_us    DOUBLE,
    measured_us     DOUBLE,
    source          VARCHAR,
    passed_by       VARCHAR NOT NULL
);

CREATE TABLE memory (                   -- live bytes after each step
    graph       VARCHAR NOT NULL,
    stage       VARCHAR NOT NULL,
    index       BIGINT NOT NULL,
    name        VARCHAR NOT NULL,
    live_bytes  BIGINT NOT NULL
);

CREATE TABLE fallback (                 -- runs as PyTorch runs it
    what    VARCHAR NOT NULL,
    "where" VARCHAR NOT NULL,
    why     VARCHAR NOT NULL
);

CREATE TABLE measurement (
    suite           VARCHAR NOT NULL,
    "case"          VARCHAR NOT NULL,
    impl            VARCHAR NOT NULL,
    direction       VARCHAR NOT NULL,   -- fwd, bwd, fwd+bwd, step, infer
    median_us       DOUBLE NOT NULL,
    p20_us          DOUBLE NOT NULL,
    p80_us          DOUBLE NOT NULL,
    repeats         BIGINT NOT NULL,
    predicted_us    DOUBLE,
    host_us         DOUBLE,
    gpu_us          DOUBLE,             -- sum over the kernels and copies on the device
    launches        BIGINT,             -- how many those are
    first_call_us   DOUBLE,             -- in which an implementation compiles
    peak_bytes      BIGINT,
    bytes           BIGINT,
    flops           BIGINT,
    GBps            DOUBLE,
    TFLOPs          DOUBLE,
    of_ceiling      DOUBLE,
    error           DOUBLE,
    eager_error     DOUBLE,
    device          VARCHAR NOT NULL,
    threads         BIGINT NOT NULL,
    torch           VARCHAR NOT NULL,
    triton          VARCHAR NOT NULL,
    commit          VARCHAR NOT NULL,
    date            VARCHAR NOT NULL,
    note            VARCHAR NOT NULL    -- clocks that disagree or fell, data that a cache held
);

CREATE TABLE ceiling (
    device  VARCHAR NOT NULL,
    kind    VARCHAR NOT NULL,
    dtype   VARCHAR NOT NULL,
    value   DOUBLE NOT NULL,
    unit    VARCHAR NOT NULL,           -- GB/s, TFLOP/s, us
    origin  VARCHAR NOT NULL            -- measured, datasheet
);

CREATE TABLE verified (                 -- a tensor against float64, beside eager's own error
    direction       VARCHAR NOT NULL,
    tensor          VARCHAR NOT NULL,
    dtype           VARCHAR NOT NULL,
    error           DOUBLE NOT NULL,
    eager_error     DOUBLE NOT NULL,
    max_error       DOUBLE NOT NULL,
    eager_max_error DOUBLE NOT NULL,
    bound           DOUBLE NOT NULL,
    max_bound       DOUBLE NOT NULL,
    ok              BOOLEAN NOT NULL
);

-- Every operator and launch on the roofline: its measured rate, else the rate at its floor. FLOPs per microsecond are 1e-6 TFLOP/s.
CREATE VIEW roofline AS
SELECT CASE WHEN stage = 'after' AND region IS NOT NULL THEN 'region' ELSE 'operator' END AS kind, graph, stage, index,
       name, CASE kind WHEN 'region' THEN 'region' ELSE operator_class END AS operator_class, region, provenance,
       intensity, flops, bytes, floor_us, measured_us, bound, measured_us IS NOT NULL AS measured,
       flops / nullif(coalesce(measured_us, floor_us), 0) / 1e6 AS TFLOPs,
       bytes / nullif(coalesce(measured_us, floor_us), 0) / 1e3 AS GBps,
       measured_us / nullif(floor_us, 0) AS times_floor
FROM operator;

-- Launches of the plan by the time that they lose to their floors, those that are alike in one row. `why` is the choice
-- against fusing one of their operators, a raced one first; else what the floor or the prediction explains; else
-- NULL. `off` is how many times the prediction is wrong. What has no floor loses all its time.
CREATE VIEW lost_time AS
WITH timed AS (
    SELECT o.*, r.members, o.measured_us - least(o.measured_us, coalesce(o.floor_us, 0)) AS lost
    FROM operator o LEFT JOIN region r ON r.graph = o.graph AND r.name = o.region
    WHERE o.stage = 'after' AND o.measured_us > 0
), decided AS (
    SELECT t.graph, t.name,
           arg_max(d.verdict || ', ' || d.producer || ' → ' || d.consumer || ': ' || d.reason,
                   (d.measured_us IS NOT NULL, d.bytes_saved)) AS why
    FROM timed t JOIN decision d ON d.graph = t.graph AND d.verdict IN ('refused', 'tried and lost')
         AND list_has_any([d.producer, d.consumer], list_append(coalesce(t.members, []), t.name))
    GROUP BY t.graph, t.name
), grouped AS (
    SELECT arg_min(t.name, t.index) AS name, t.target, t.graph, t.shape, count(*) AS launches,
           sum(t.measured_us) AS measured_us, sum(t.floor_us) AS floor_us, sum(t.lost) AS lost_us,
           sum(t.lost) / (SELECT sum(measured_us) FROM timed) AS share,
           sum(t.predicted_us) AS predicted_us,
           greatest(sum(t.measured_us) / sum(t.predicted_us), sum(t.predicted_us) / sum(t.measured_us)) AS off,
           t.operator_class = 'layout' AND coalesce(t.bytes, 0) = 0 AS is_view,
           any_value(t.bound) AS bound, any_value(d.why) AS decided, any_value(t.source) AS source
    FROM timed t LEFT JOIN decided d ON d.graph = t.graph AND d.name = t.name
    GROUP BY t.graph, t.target, t.operator_class, t.shape, t.dtype, t.bytes, t.flops, len(t.members)
)
SELECT name, target, graph, shape, launches, measured_us, floor_us, lost_us, share, predicted_us, off, bound,
       CASE WHEN decided IS NOT NULL THEN decided
            WHEN is_view THEN 'a view: it moves nothing, and takes only the host'
            WHEN floor_us IS NULL THEN 'its work is not known to the operator table'
            WHEN bound = 'launch-bound' THEN 'a launch is all that it takes'
            WHEN off > 2 THEN 'the model of times is not fitted to such a kernel on this device'
            WHEN measured_us <= 1.3 * predicted_us THEN 'as kernels of its kind take on this device'
       END AS why,
       source
FROM grouped
ORDER BY lost_us DESC, graph, name;

-- Launches and traffic before and after fusion. `unknown` counts operators without a formula, which
-- the sums omit. A view of a tensor moves no bytes and launches nothing.
CREATE VIEW fusion_summary AS
SELECT graph, stage,
       count(*) FILTER (WHERE bytes > 0 OR provenance = 'unknown') AS launches,
       sum(reads)::BIGINT AS reads, sum(writes)::BIGINT AS writes, sum(unused)::BIGINT AS unused,
       sum(bytes)::BIGINT AS bytes, sum(flops)::BIGINT AS flops, sum(floor_us) AS floor_us,
       count(*) FILTER (WHERE provenance = 'unknown') AS unknown
FROM operator
GROUP BY graph, stage
ORDER BY graph DESC, stage DESC;

-- Every measurement beside its peers: how many times faster than eager and than Inductor it was.
CREATE VIEW speedup AS
SELECT suite, "case", direction, impl, median_us, p20_us, p80_us, repeats,
       -- NULL where the spread of both leaves the ratio open by a factor of three.
       CASE WHEN p80_us * max(p80_us) FILTER (WHERE impl = 'eager') OVER peers
              <= 3 * p20_us * min(p20_us) FILTER (WHERE impl = 'eager') OVER peers
            THEN median(median_us) FILTER (WHERE impl = 'eager') OVER peers / nullif(median_us, 0) END AS times_eager,
       CASE WHEN p80_us * max(p80_us) FILTER (WHERE impl = 'inductor') OVER peers
              <= 3 * p20_us * min(p20_us) FILTER (WHERE impl = 'inductor') OVER peers
            THEN median(median_us) FILTER (WHERE impl = 'inductor') OVER peers / nullif(median_us, 0) END
           AS times_inductor,
       peak_bytes, GBps, TFLOPs, of_ceiling
FROM measurement
WINDOW peers AS (PARTITION BY suite, "case", direction)
ORDER BY measurement.rowid;
