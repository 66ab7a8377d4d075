-- The allocator events of PyTorch's profiler (profile_memory=True): a row per allocation or free. `bytes` is
-- negative for a free, `allocated` and `reserved` are the allocator's totals after it: a GPU's from the start of the
-- process, a CPU's from the first profile of the process, and only of what was allocated while one was running.
CREATE OR REPLACE VIEW memory_event AS
SELECT slice.id AS slice_id, slice.ts, slice.track_id, slice.parent_id, thread.upid,
       CASE TRY_CAST(json_extract_string(args, '$."Device Type"') AS BIGINT)
            WHEN 0 THEN 'CPU'
            WHEN 1 THEN 'GPU ' || json_extract_string(args, '$."Device Id"')
            ELSE 'device ' || json_extract_string(args, '$."Device Type"') || ':' || json_extract_string(args, '$."Device Id"')
       END AS device,
       TRY_CAST(json_extract_string(args, '$.Bytes') AS BIGINT) AS bytes,
       TRY_CAST(json_extract_string(args, '$."Total Allocated"') AS BIGINT) AS allocated,
       TRY_CAST(json_extract_string(args, '$."Total Reserved"') AS BIGINT) AS reserved,
       json_extract_string(args, '$.Addr') AS address
FROM slice JOIN arg_set USING (arg_set_id)
LEFT JOIN thread_track ON thread_track.id = slice.track_id
LEFT JOIN thread USING (utid)
WHERE slice.name = '[memory]';
