"""An export of Nsight Systems, made here after its documented schema, comes in with Kineto's words."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.trace.kineto import analysed
from tests.trace.loading import accounted, loaded, rows
from tilewright.records.errors import TraceError

PID, TID = 4243, 4250
PROCESS = PID << 24
THREAD = PROCESS | TID
SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
CREATE TABLE ThreadNames (nameId INTEGER NOT NULL, priority INTEGER, globalTid INTEGER);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER, id INTEGER, name TEXT, busLocation TEXT);
CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER,
    cacheConfig INTEGER, registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL,
    staticSharedMemory INTEGER NOT NULL, dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
    localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER,
    domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL);
CREATE TABLE CUDNN_EVENTS (start INTEGER NOT NULL, end INTEGER, globalTid INTEGER, nameId INTEGER);
"""
STRINGS = {1: "cudaLaunchKernel_v7000", 2: "void gemm<float>(int)", 3: "gemm", 4: "cudaMemcpyAsync_v3020", 5: "forward",
           6: "python3", 7: "cuLaunchKernel", 8: "cudaDeviceSynchronize_v3020"}  # fmt: skip
RUNTIME = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, ?, 0, NULL)"
KERNEL = (
    "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, 2, 3, NULL, 0, 0, 32, 132, 1, 1, 256, 1, 1, "
    "16, 1024, 0, 0, 1, NULL, NULL)"
)
RANGE = "INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, NULL, NULL, ?, ?, NULL, ?, 0, NULL, NULL, NULL)"


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "report.sqlite"
    with sqlite3.connect(path) as made:
        made.executescript(SCHEMA)
        made.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
        made.execute("INSERT INTO PROCESSES VALUES (?, ?, 'python3')", (PROCESS, PID))
        made.execute("INSERT INTO ThreadNames VALUES (6, 0, ?)", (THREAD,))
        made.execute("INSERT INTO TARGET_INFO_GPU VALUES (0, 0, 'NVIDIA H200', '0000:01:00')")
        made.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.15.1')")
        for start, end, correlation, name in ((100, 200, 1, 1), (300, 380, 2, 7), (500, 900, 3, 4), (900, 990, 4, 8)):
            made.execute(RUNTIME, (start, end, THREAD, correlation, name))
        made.execute(KERNEL, (1000, 2000, 1, PROCESS))
        made.execute(KERNEL, (2000, 2600, 2, PROCESS))
        made.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (2700, 2900, 0, 1, 7, 3, ?, 4096, 2, 2, 1)", (PROCESS,)
        )
        made.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (3000, 3010, 0, 1, 7, 99, ?, 0, 64, NULL, 0)", (PROCESS,)
        )
        made.execute(RANGE, (50, 600, 59, None, None, THREAD, 5))
        made.execute(RANGE, (60, None, 34, None, "a mark", THREAD, None))
        made.execute(RANGE, (70, 80, 60, 11, "from here to there", THREAD, None))
        made.execute(RANGE, (95, None, 59, None, "never popped", THREAD, None))
        made.execute("INSERT INTO CUDNN_EVENTS VALUES (1, 2, ?, 1)", (THREAD,))
    made.close()
    return path


def test_export(export: Path) -> None:
    connection, (file,) = loaded(export)
    assert file.format == "nsys" and file.events == accounted(file)
    assert file.note == "not read: CUDNN_EVENTS"
    assert rows(
        connection,
        "SELECT category, s.name, ts, dur, process.name, tid FROM slice s JOIN thread_track t ON t.id = track_id "
        "JOIN thread USING (utid) JOIN process USING (upid) ORDER BY ts, dur DESC",
    ) == [
        ("user_annotation", "forward", 50, 550, "python3", TID),
        ("user_annotation", "a mark", 60, 0, "python3", TID),
        ("user_annotation", "never popped", 95, -1, "python3", TID),
        ("cuda_runtime", "cudaLaunchKernel", 100, 100, "python3", TID),
        ("cuda_driver", "cuLaunchKernel", 300, 80, "python3", TID),
        ("cuda_runtime", "cudaMemcpyAsync", 500, 400, "python3", TID),
        ("cuda_runtime", "cudaDeviceSynchronize", 900, 90, "python3", TID),
        ("kernel", "void gemm<float>(int)", 1000, 1000, "GPU 0", 7),
        ("kernel", "void gemm<float>(int)", 2000, 600, "GPU 0", 7),
        ("gpu_memcpy", "Memcpy DtoH", 2700, 200, "GPU 0", 7),
        ("gpu_memset", "Memset (Device)", 3000, 10, "GPU 0", 7),
    ]
    assert rows(connection, "SELECT s.name, dur FROM slice s JOIN process_track t ON t.id = track_id") == [
        ("from here to there", 10)
    ]
    assert rows(
        connection,
        "SELECT a.name, b.name FROM flow JOIN slice a ON a.id = slice_out "
        "JOIN slice b ON b.id = slice_in ORDER BY a.ts",
    ) == [
        ("cudaLaunchKernel", "void gemm<float>(int)"),
        ("cuLaunchKernel", "void gemm<float>(int)"),
        ("cudaMemcpyAsync", "Memcpy DtoH"),
    ]
    assert rows(
        connection,
        "SELECT EXTRACT_ARG(arg_set_id, 'args.grid[0]'), EXTRACT_ARG(arg_set_id, 'args.shared memory'), "
        "EXTRACT_ARG(arg_set_id, 'args.registers per thread') FROM slice WHERE category = 'kernel' LIMIT 1",
    ) == [("132", "1040", "32")]
    assert rows(connection, "SELECT reason FROM reject") == [("a flow event whose other end is missing",)]
    assert rows(connection, "SELECT str_value FROM metadata WHERE name = 'EXPORT_SCHEMA_VERSION'") == [("3.15.1",)]


def test_gpus_have_their_names_whatever_the_processes_are_called(export: Path) -> None:
    """In a container the first process is 1, and an export may not list its GPUs."""
    with sqlite3.connect(export) as made:
        made.execute("INSERT INTO PROCESSES VALUES (?, 1, 'dumb-init')", (1 << 24,))
        made.execute("DELETE FROM TARGET_INFO_GPU")
        made.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE correlationId = 2")
    made.close()
    connection, _ = loaded(export)
    assert rows(connection, "SELECT name, device FROM process WHERE device IS NOT NULL ORDER BY device") == [
        ("GPU 0", 0),
        ("GPU 1", 1),
    ]
    assert rows(connection, "SELECT name FROM process WHERE pid = 1") == [("dumb-init",)]


def test_the_start_of_cuda_has_its_call(export: Path) -> None:
    """Its 800 ms before the first kernel belong to the call that the host was in."""
    with sqlite3.connect(export) as made:
        made.execute("INSERT INTO StringIds VALUES (9, 'cudaDeviceGetStreamPriorityRange_v5050')")
        made.execute(RUNTIME, (-800_000_000, -1_000, THREAD, 9, 9))
    made.close()
    connection = analysed([export])
    found = rows(
        connection,
        "SELECT class, name, t.dur FROM device_time t JOIN slice ON slice.id = cause WHERE class = 'idle' LIMIT 1",
    )
    assert found == [("idle", "cudaDeviceGetStreamPriorityRange", 800_001_000)]


def test_older_exports_lack_tables_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT)")
        made.execute("INSERT INTO NVTX_EVENTS VALUES (1, 5, 59, 'step')")
    made.close()
    connection, _ = loaded(path)
    assert rows(connection, "SELECT name, dur FROM slice") == [("step", 4)]


def test_other_databases_and_damage(export: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as made:
        made.execute("CREATE TABLE StringIds (id, value)")
    made.close()
    with pytest.raises(TraceError, match="is not an export of Nsight Systems"):
        loaded(other)
    export.write_bytes(export.read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"report\.sqlite"):
        loaded(export)


@pytest.mark.parametrize("value", ["'text'", "NULL", "1e300", "9223372036854775807", "x'00ff'", "5"])
def test_values_of_the_wrong_kind(export: Path, value: str) -> None:
    """SQLite takes any value in any column; an event less, then, never a wrong one."""
    with sqlite3.connect(export) as made:
        made.execute("CREATE TABLE loose AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute("ALTER TABLE loose RENAME TO CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = {value} WHERE correlationId = 1")
    made.close()
    connection, (file,) = loaded(export)
    assert rows(connection, "SELECT dur FROM slice WHERE category = 'kernel'") == [(600,)]
    assert rows(connection, "SELECT count(*) FROM reject WHERE reason LIKE 'start or end%'") == [(1,)]
    assert file.events == accounted(file)
