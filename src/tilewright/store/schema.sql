-- The table of the run itself, and views. The other tables are dataclasses of `tilewright.records` (`rows.py`).
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
    SELECT o.*, r.members, o.measured_us - least(o.measured_us, coalesce(o.floor_us, 0)) AS lost,
           o.operator_class = 'layout' AND coalesce(o.bytes, 0) = 0 AS is_view
    FROM operator o LEFT JOIN region r ON r.graph = o.graph AND r.name = o.region
    WHERE o.stage = 'after' AND o.measured_us > 0
), decided AS (
    SELECT t.graph, t.name,
           arg_max(d.verdict || ', ' || d.producer || ' → ' || d.consumer || ': ' || d.reason,
                   (d.measured_us IS NOT NULL, d.bytes_saved)) AS why
    FROM timed t JOIN decision d ON d.graph = t.graph AND d.verdict IN ('refused', 'tried and lost')
         -- What is to be replaced is the consumer; its producer is another launch.
         AND list_has_any(if(d.passed_by = 'fusion', [d.producer, d.consumer], [d.consumer]),
                          list_append(coalesce(t.members, []), t.name))
    GROUP BY t.graph, t.name
), grouped AS (
    SELECT arg_min(t.name, t.index) AS name, t.target, t.graph, t.shape, count(*) AS launches,
           sum(t.measured_us) AS measured_us, sum(t.floor_us) AS floor_us, sum(t.lost) AS lost_us,
           sum(t.lost) / (SELECT coalesce(sum(measured_us) FILTER (NOT is_view), sum(measured_us)) FROM timed) AS share,
           sum(t.predicted_us) AS predicted_us,
           greatest(sum(t.measured_us) / sum(t.predicted_us), sum(t.predicted_us) / sum(t.measured_us)) AS off,
           any_value(t.is_view) AS is_view,
           any_value(t.bound) AS bound, any_value(d.why) AS decided, any_value(t.source) AS source
    FROM timed t LEFT JOIN decided d ON d.graph = t.graph AND d.name = t.name
    GROUP BY t.graph, t.target, t.operator_class, t.shape, t.dtype, t.bytes, t.flops, len(t.members)
)
SELECT name, target, graph, shape, launches, measured_us, floor_us, lost_us, share, predicted_us, off, bound,
       CASE WHEN decided IS NOT NULL THEN decided
            WHEN is_view THEN 'a view: it moves no data, this is the host''s time for the call'
            WHEN floor_us IS NULL THEN 'no floor: the operator table does not know its work'
            WHEN bound = 'launch-bound' THEN 'only its launch takes time'
            WHEN off > 2 THEN 'predicted wrongly: times of such kernels are not fitted to this device yet'
            WHEN measured_us <= 1.3 * predicted_us THEN 'as expected: kernels of its kind take as long on this device'
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
