-- The most to gain first, of a bare step: what brings an operator of a line to its floor, what lets the host keep ahead
-- of the device, what each synchronisation takes, and the causes on the host. None is more than the step, and all floors together neither; one
-- gain may eat another.
CREATE OR REPLACE VIEW what_you_would_win AS
SELECT file_id, 'at its floor' AS how, operator, source, sum(calls)::BIGINT AS calls,
       sum(win_ms_per_step) AS ms_per_step,
       arg_max(verdict, ms_per_step) || ', '
           || round(sum(ms_per_step * scale) / sum(ms_per_step * scale - win_ms_per_step), 1)
           || ' × its floor' AS why
FROM distance WHERE win_ms_per_step > 0 GROUP BY file_id, operator, source
UNION ALL
SELECT file_id, 'a CUDA graph, or fewer launches', 'all of them', NULL, sum(calls)::BIGINT,
       sum(host_late_ms_per_step) - any_value(recorded_ms - bare_ms) AS ms, 'the device waited to be given work'
FROM distance JOIN bare_step USING (file_id) GROUP BY file_id HAVING ms > 0
UNION ALL
SELECT step_account.file_id, 'fewer, larger kernels', 'all of them', NULL, any_value(late.calls),
       sum(ms_per_step) - any_value(late.ms), 'the device paused between kernels that were queued'
FROM step_account
JOIN (
    SELECT file_id, sum(calls)::BIGINT AS calls, sum(host_late_ms_per_step) AS ms FROM distance GROUP BY file_id
) AS late USING (file_id)
WHERE class = 'launch-bound'
GROUP BY step_account.file_id HAVING sum(ms_per_step) - any_value(late.ms) > 1e-6
UNION ALL
SELECT file_id, 'no synchronisation', what, source, calls, least(lost_ms_per_step, bare_ms),
       'the device ran out of work while the host waited'
FROM synchronisation JOIN bare_step USING (file_id) WHERE lost_ms_per_step > 0
UNION ALL
SELECT file_id, action, what, source, calls, win_ms_per_step, why FROM cause
ORDER BY ms_per_step DESC, how, operator, source;
