-- What the thread of each step did. Needs attribution.sql, lines.sql, waits.sql, steps.sql and described.sql.

-- The thread that makes the steps: that of their ranges; else the one with the most Python, then the most operators.
CREATE OR REPLACE TEMP TABLE host_thread AS
WITH file AS (SELECT file_id, min(id) AS step_id FROM operator_step GROUP BY file_id)
SELECT file.file_id, thread.utid
FROM file JOIN process USING (file_id) JOIN thread USING (upid)
JOIN thread_track USING (utid) JOIN slice ON slice.track_id = thread_track.id
WHERE slice.category IN ('cpu_op', 'python_function') OR slice.id = file.step_id
GROUP BY file.file_id, thread.utid
QUALIFY row_number() OVER (
    PARTITION BY file.file_id
    ORDER BY bool_or(slice.id IS NOT DISTINCT FROM file.step_id) DESC, count(*) FILTER (WHERE category = 'python_function') DESC,
             count(*) DESC, utid
) = 1;

-- The class that an event gives to its time: the group in hundreds, then the place in `host_time.CLASSES`. 0: none.
CREATE OR REPLACE TEMP TABLE class_of AS
WITH named AS (SELECT DISTINCT category, name FROM slice WHERE category NOT IN ('kernel', 'gpu_memcpy', 'gpu_memset'))
SELECT row_number() OVER () - 1 AS number, category, name,
       CASE WHEN category IN ('user_annotation', 'cpu_op') AND name LIKE 'enumerate(DataLoader)#%'
              OR regexp_matches(name, 'torch/utils/data/dataloader\.py\(\d+\): (__next__|__iter__)$') THEN 411
            WHEN name = 'compilation' OR name LIKE '%(dynamo\_timed)' ESCAPE '\' THEN 410
            WHEN name LIKE 'garbage collection%' OR name = '<built-in function collect>' THEN 409
            WHEN category = 'cpu_op' AND regexp_matches(name, '^(c10d::|gloo:|nccl:|mpi:)')
              OR category = 'user_annotation' AND regexp_matches(name, '^(gloo|nccl|mpi):')
              OR regexp_matches(name, '^<built-in method (wait|barrier|monitored_barrier) of (torch|pybind11)') THEN 308
            WHEN category IN ('cuda_runtime', 'cuda_driver') AND regexp_matches(name, '^cu(da)?(Mem|Malloc|Free|HostAlloc)')
             AND NOT regexp_matches(name, 'Memcpy|Memset') OR name = '<built-in function _cuda_emptyCache>' THEN 307
            WHEN regexp_matches(name, '^<built-in function (sleep|select|waitpid|sem_wait|_wait_for_tstate_lock)>$')
              -- What another process sends is unpickled here.
              OR regexp_matches(name, '(^|/)subprocess\.py\(\d+\): (run|call|check_call|check_output|communicate|wait)$')
              OR regexp_matches(name, '(^|/)multiprocessing/(queues|connection|pool)\.py\(\d+\): (get|recv|recv_bytes|wait)$')
              OR regexp_matches(name, '^<built-in method (acquire|__enter__) of (_thread|_multiprocessing)\.')
              OR regexp_matches(name, '^<built-in method (poll|select|control|get) of (select|_queue)\.') THEN 306
            WHEN regexp_matches(name, '^<built-in function (open|print|input|p?read|p?write|fsync|fdatasync|l?stat|listdir|scandir|rename|replace|unlink|remove|mkdir|rmdir|link|sendfile|getaddrinfo|fromfile)>$')
              OR regexp_matches(name, '(^|/)(urllib/request\.py\(\d+\): urlopen|http/client\.py\(\d+\): (request|getresponse)|requests/sessions\.py\(\d+\): request|urllib3/connectionpool\.py\(\d+\): urlopen|httpx/_client\.py\(\d+\): request)$')
              OR regexp_matches(name, '^<built-in method \w+ of (_io\.|_csv\.|_socket\.|_ssl\.|sqlite3\.|mmap\.)')
              OR regexp_matches(name, '^<built-in method (fromfile|tofile|from_file|_write_file) of ')
              OR regexp_matches(name, '(torch/serialization|numpy/lib/(_npyio_impl|npyio))\.py\(\d+\): (load|save|loadtxt|savetxt)$')
            THEN 305
            WHEN category = 'cpu_op' AND name NOT LIKE 'synchronisation at %' THEN 203
            WHEN category IN ('cuda_runtime', 'cuda_driver') THEN 203
            WHEN category = 'python_function'
             AND regexp_matches(name, '(^|/)(tilewright/(measure|profiling)/|torch/(autograd/)?profiler)') THEN 102
            WHEN category = 'python_function' AND regexp_matches(name, '(\.py|^In \[\d+\])\(\d+\): ')
             AND NOT regexp_matches(name, '(^|/)(lib/python\d[^/]*/)?(contextlib|functools|pathlib|threading|warnings)\.py\(') THEN 101
            ELSE 0 END AS code
FROM named;

-- The lines and functions that the user's code was in, by number.
CREATE OR REPLACE TEMP TABLE reached AS
SELECT python_line.file_id, ts, enters, CASE WHEN line > 0 THEN coalesce(spelled.path, python_line.file) || ':' || line END AS place
FROM python_line JOIN host_thread USING (file_id, utid)
LEFT JOIN spelled ON spelled.file = python_line.file AND spelled.function = python_line.function;

CREATE OR REPLACE TABLE named_place AS
SELECT row_number() OVER () - 1 AS number, place FROM (
    SELECT place FROM reached UNION SELECT source FROM scratch.host_line UNION SELECT place FROM scratch.frame_place
) WHERE place IS NOT NULL;

CREATE OR REPLACE TEMP TABLE line_reached AS
SELECT file_id, ts, enters, coalesce(number, -1) AS number FROM reached LEFT JOIN named_place USING (place);

CREATE OR REPLACE TEMP TABLE frame_place AS
SELECT name, number FROM scratch.frame_place JOIN named_place USING (place);

-- Events of these threads. Where an optimizer's step ends the recording, PyTorch's range lasts until the profiler stops.
CREATE OR REPLACE TEMP TABLE host_event AS
SELECT slice.id, process.file_id, slice.ts, slice.dur,
       CASE WHEN wait.slice_id IS NOT NULL AND code < 300 THEN 304
            -- With a device, other threads run backward.
            WHEN slice.name LIKE '<built-in method run\_backward of %' ESCAPE '\'
             AND process.file_id IN (FROM scratch.device_file) THEN 203
            ELSE code END AS code,
       slice.category = 'python_function' AS is_python,
       frame.id IS NOT NULL AS is_own,
       class_of.number AS named, coalesce(frame_place.number, -1) AS framed, coalesce(named_place.number, -1) AS sourced
FROM host_thread
JOIN thread_track USING (utid) JOIN slice ON slice.track_id = thread_track.id
JOIN thread USING (utid) JOIN process USING (upid)
JOIN class_of ON class_of.category IS NOT DISTINCT FROM slice.category AND class_of.name IS NOT DISTINCT FROM slice.name
LEFT JOIN frame ON frame.id = slice.id
LEFT JOIN frame_place ON frame_place.name = frame.name
LEFT JOIN scratch.host_line ON host_line.id = slice.id
LEFT JOIN named_place ON named_place.place = host_line.source
LEFT JOIN (SELECT DISTINCT slice_id FROM wait) AS wait ON wait.slice_id = slice.id
WHERE slice.dur > 0 AND abs(slice.ts::HUGEINT) < 1::HUGEINT << 61 AND slice.dur < 1::BIGINT << 61
UNION ALL
-- Backward waits in C++ for collectives that other threads of the process run: of group 1, as what it does itself.
SELECT other.id, waiting.file_id, greatest(other.ts, waiting.ts),
       least(other.ts + other.dur, waiting.ts + waiting.dur) - greatest(other.ts, waiting.ts), 108, false, false,
       class_of.number, -1, -1
FROM (
    SELECT slice.ts, slice.dur, host_thread.file_id, host_thread.utid
    FROM host_thread JOIN thread_track USING (utid) JOIN slice ON slice.track_id = thread_track.id
    WHERE slice.name LIKE '<built-in method run\_backward of %' ESCAPE '\'
) AS waiting
JOIN process USING (file_id) JOIN thread USING (upid)
JOIN thread_track ON thread_track.utid = thread.utid JOIN slice AS other ON other.track_id = thread_track.id
JOIN (FROM class_of WHERE category IN ('user_annotation', 'cpu_op') AND regexp_matches(name, '^(gloo|nccl|mpi):')) AS class_of
  ON class_of.category = other.category AND class_of.name = other.name
WHERE thread.utid <> waiting.utid
  AND other.ts < waiting.ts + waiting.dur AND waiting.ts < other.ts + other.dur AND other.dur > 0
ORDER BY 1;

-- The steps on that thread: each lasts until the next one begins, the last one as long as its own range.
CREATE OR REPLACE TEMP TABLE host_step AS
SELECT file_id, ts, CASE WHEN lead(ts) OVER (PARTITION BY file_id ORDER BY ts) IS NULL THEN host_dur ELSE dur END AS dur
FROM operator_step ORDER BY file_id, ts;

-- Places and names by their numbers, -1 for none: view `host_time` has them. `stopped` is how long the thread had no processor.
CREATE OR REPLACE TABLE host_span (
    file_id BIGINT, utid BIGINT, step_ts BIGINT, ts BIGINT, dur BIGINT, code SMALLINT, slice_id BIGINT, what INTEGER, called_id BIGINT,
    called INTEGER, source INTEGER, inner_code SMALLINT, inner_what INTEGER, inner_source INTEGER, events INTEGER, stopped BIGINT
);
