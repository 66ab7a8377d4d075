-- The timeline, with the names and meaning of Perfetto's SQL tables. Times are nanoseconds. Every event of a
-- file is a row of one of these tables, or of `reject` with the reason.

CREATE TABLE IF NOT EXISTS trace_file (     -- ours: one row a file that was loaded
    id          BIGINT NOT NULL,
    path        VARCHAR NOT NULL,
    format      VARCHAR NOT NULL,           -- chrome, nsys
    rank        BIGINT,                     -- of a distributed job, where the file says so
    world_size  BIGINT,
    bytes       BIGINT NOT NULL,            -- of the file as it lies on the disk
    events      BIGINT NOT NULL,            -- in the file
    slices      BIGINT NOT NULL,            -- rows of `slice`; a begin and its end are one
    paired      BIGINT NOT NULL,            -- ends that closed a begin, so that events = the sum of the others
    flow_points BIGINT NOT NULL,            -- events that ended in rows of `flow`
    counters    BIGINT NOT NULL,            -- counter events; each of their values is a row of `counter`
    metadata    BIGINT NOT NULL,
    rejects     BIGINT NOT NULL,
    base_ns     BIGINT NOT NULL,            -- the file's own zero of time
    shift_ns    BIGINT NOT NULL,            -- added to its times, so that all files count from the first one's zero
    note        VARCHAR                     -- what a reader should know: clocks that disagree, damage repaired
);

CREATE TABLE IF NOT EXISTS process (
    upid    BIGINT NOT NULL,
    id      BIGINT NOT NULL,                -- = upid
    pid     BIGINT,                         -- NULL where the file gives a word instead of a number
    name    VARCHAR,                        -- a GPU's is "GPU 0"
    labels  VARCHAR,                        -- ours
    device  BIGINT,                         -- ours: the GPU that this process stands for
    file_id BIGINT NOT NULL                 -- ours
);

CREATE TABLE IF NOT EXISTS thread (
    utid            BIGINT NOT NULL,
    id              BIGINT NOT NULL,        -- = utid
    tid             BIGINT,                 -- NULL where the file gives a word; a stream of a GPU process
    name            VARCHAR,
    upid            BIGINT,
    is_main_thread  BIGINT
);

CREATE TABLE IF NOT EXISTS track (
    id          BIGINT NOT NULL,
    name        VARCHAR,
    type        VARCHAR NOT NULL,           -- in Perfetto's words: thread_execution, json_counter, ...
    parent_id   BIGINT
);

CREATE TABLE IF NOT EXISTS thread_track (id BIGINT NOT NULL, name VARCHAR, utid BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS process_track (id BIGINT NOT NULL, name VARCHAR, upid BIGINT);
CREATE TABLE IF NOT EXISTS counter_track (id BIGINT NOT NULL, name VARCHAR, unit VARCHAR, upid BIGINT);

CREATE TABLE IF NOT EXISTS slice (
    id          BIGINT NOT NULL,            -- in the order of time, within one load
    ts          BIGINT NOT NULL,
    dur         BIGINT NOT NULL,            -- -1: never ended; 0: an instant
    track_id    BIGINT NOT NULL,
    category    VARCHAR,
    name        VARCHAR,
    depth       BIGINT NOT NULL,            -- its parent's + 1, or 0
    parent_id   BIGINT,                     -- the innermost slice of its track that holds it whole
    arg_set_id  BIGINT,
    cat         VARCHAR GENERATED ALWAYS AS (category)
);

CREATE TABLE IF NOT EXISTS overlap (        -- ours: slices that outlast one begun before them; Perfetto drops these
    slice_id    BIGINT NOT NULL
);

CREATE TABLE IF NOT EXISTS arg_set (        -- ours: what `args` is a view of
    arg_set_id  BIGINT NOT NULL,            -- the slice's
    args        JSON NOT NULL USING COMPRESSION zstd    -- a third of the time and a sixth of the size of the default
);

CREATE TABLE IF NOT EXISTS flow (
    id          BIGINT NOT NULL,
    slice_out   BIGINT NOT NULL,
    slice_in    BIGINT NOT NULL,
    trace_id    VARCHAR,                    -- the id in the file
    name        VARCHAR,                    -- ours
    category    VARCHAR                     -- ours: ac2g, fwdbwd
);

CREATE TABLE IF NOT EXISTS counter (
    id          BIGINT NOT NULL,
    ts          BIGINT NOT NULL,
    track_id    BIGINT NOT NULL,
    value       DOUBLE NOT NULL
);

CREATE TABLE IF NOT EXISTS metadata (       -- of the files (key_type "single") and of their processes and threads
    id          BIGINT NOT NULL,
    name        VARCHAR NOT NULL,
    key_type    VARCHAR NOT NULL,
    int_value   BIGINT,
    str_value   VARCHAR,
    upid        BIGINT,                     -- ours
    utid        BIGINT,                     -- ours
    file_id     BIGINT NOT NULL             -- ours
);

CREATE TABLE IF NOT EXISTS reject (         -- ours: events that are no row of another table
    file_id BIGINT NOT NULL,
    file    VARCHAR NOT NULL,
    reason  VARCHAR NOT NULL,
    event   VARCHAR NOT NULL
);

CREATE TABLE IF NOT EXISTS recording (      -- ours: how tilewright made its traces, one row a process
    file_id     BIGINT NOT NULL,
    described_by BIGINT,                    -- the file with a step in every detail, where these steps are light
    steps_asked BIGINT NOT NULL,
    steps_kept  BIGINT NOT NULL,            -- whole steps in the trace
    steps_seen  BIGINT NOT NULL,
    step_events BIGINT NOT NULL,            -- of one step, as counted in the warm-up
    events      BIGINT NOT NULL,
    most_events BIGINT NOT NULL,            -- the limit
    cut         BOOLEAN NOT NULL,           -- the limit ended the trace in the middle
    seconds_kept DOUBLE NOT NULL,
    seconds     DOUBLE NOT NULL,
    bare_us     DOUBLE,                     -- a step without the profiler, on the wall clock
    recorded_us DOUBLE,                     -- and with it
    timed_us    DOUBLE[] NOT NULL,          -- of each step after those in the trace, without it
    timed_queued_us DOUBLE,                 -- how long their thread could have run and had no processor, where the system tells
    recorded_thread_us DOUBLE[],            -- processor time of the thread that makes the steps, in each of those in the trace,
    recorded_queued_us DOUBLE[],            -- how long it could have run and had no processor, where the system tells,
    thread_us   DOUBLE,                     -- and its processor time in a bare step
    other_us    DOUBLE,                     -- and of the other threads of Python's,
    other       VARCHAR,                    -- of which this one takes most, at this line
    beside      VARCHAR,                    -- another thread, and the line at which it is most often
    workers     BIGINT NOT NULL,            -- processes that the program started, as DataLoader does
    workers_us  DOUBLE,                     -- their processor time in a bare step
    workers_queued_us DOUBLE,               -- and how long they could have run, and had no processor
    shapes      BOOLEAN NOT NULL,
    stacks      BOOLEAN NOT NULL,
    memory      BOOLEAN NOT NULL
);

-- Of snapshots of PyTorch's CUDA allocator: what it got from the driver, what that is divided into, and what it could not get.
CREATE TABLE IF NOT EXISTS memory_segment (
    id              BIGINT NOT NULL,
    file_id         BIGINT NOT NULL,
    device          BIGINT NOT NULL,
    address         BIGINT NOT NULL,
    stream          BIGINT NOT NULL,
    pool            VARCHAR NOT NULL,   -- large or small
    bytes           BIGINT NOT NULL,
    allocated_bytes BIGINT NOT NULL,
    active_bytes    BIGINT NOT NULL     -- with what another stream may still use
);
CREATE TABLE IF NOT EXISTS memory_block (
    segment_id      BIGINT NOT NULL,
    file_id         BIGINT NOT NULL,
    address         BIGINT NOT NULL,
    bytes           BIGINT NOT NULL,
    requested_bytes BIGINT NOT NULL,
    state           VARCHAR NOT NULL,   -- active_allocated, active_awaiting_free, or inactive
    source          VARCHAR,            -- the line that allocated it, its function, and the layer of torch.nn around it
    function        VARCHAR,
    layer           VARCHAR
);
CREATE TABLE IF NOT EXISTS out_of_memory (
    file_id         BIGINT NOT NULL,
    device          BIGINT NOT NULL,
    ts              BIGINT NOT NULL,
    bytes           BIGINT NOT NULL,    -- asked for
    device_free     BIGINT,             -- what the driver had left
    allocated       BIGINT NOT NULL,
    reserved        BIGINT NOT NULL,
    source          VARCHAR
);

CREATE TABLE IF NOT EXISTS prediction (     -- ours: the mean step that a simulation predicts for each change
    change          VARCHAR NOT NULL,
    what            VARCHAR NOT NULL,
    measured_us     DOUBLE NOT NULL,
    predicted_us    DOUBLE NOT NULL
);
CREATE TABLE IF NOT EXISTS critical_path (  -- ours: from the begin of the first step to the end of the last, without holes
    ts              BIGINT NOT NULL,
    dur             BIGINT NOT NULL,
    kind            VARCHAR NOT NULL,
    name            VARCHAR NOT NULL
);
