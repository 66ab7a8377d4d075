"""Loads trace files into a run: every event becomes a row of the schema, or of `reject` with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.records.errors import TraceError
from tilewright.store import Run, new_run_path
from tilewright.trace.analysis import analyse
from tilewright.trace.events.counters import add_counters
from tilewright.trace.events.flows import find_points, write_flows
from tilewright.trace.events.rows import append, next_id
from tilewright.trace.events.slices import Slices, find_slices, write_slices
from tilewright.trace.events.staging import Header, drop_tables, make_tables
from tilewright.trace.events.tracks import Tracks, add_metadata
from tilewright.trace.formats import chrome, nsys, snapshot
from tilewright.trace.formats.collection import files_at
from tilewright.trace.formats.source import failing, unpacked
from tilewright.trace.whatif.answer import add_predictions

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MEMORY = "480MB"
_THREADS = 4


@dataclass(frozen=True)
class Loaded:
    """The row of `trace_file` for one file."""

    id: int
    path: str
    format: str
    rank: int | None
    world_size: int | None
    bytes: int
    events: int
    slices: int
    paired: int
    flow_points: int
    counters: int
    metadata: int
    rejects: int
    base_ns: int
    shift_ns: int
    note: str | None


def trace_run(paths: Sequence[Path], *, command: str, tell: Callable[[str], None] = print) -> tuple[Path, list[Loaded]]:
    """A new run with the traces at `paths`; returns its path and the loaded files.

    Raises:
        TraceError: a file is missing, damaged, or no trace, or there is no event in them; no run is left.
        StoreError: the run cannot be written.
    """
    target = " ".join(str(path) for path in paths)
    name = paths[0].name.partition(".")[0]
    with Run.create(new_run_path(name), command=command, target=target, case=name) as run:
        loaded = load_traces(paths, run.connection, tell)
        if not any(file.events for file in loaded):
            raise TraceError(f"no event in {target}")
        tell("accounting for its time")
        analyse(run.connection)
        add_predictions(run.connection)
        return run.path, loaded


def load_traces(
    paths: Sequence[Path], connection: DuckDBPyConnection, tell: Callable[[str], None] = lambda _: None
) -> list[Loaded]:
    """Add the traces at `paths`, files, folders or archives, to the database of `connection`, after any that it has.

    The tables and macros of the timeline are created if missing. `tell` is called with the name of each file. The
    connection must be in no transaction.

    Raises:
        TraceError: a file is missing, damaged, or no trace; nothing of it was added, the files before it stay.
    """
    loaded = list[Loaded]()
    with _bounded(connection):
        for script in ("schema.sql", "macros.sql", "memory.sql"):
            connection.execute(files("tilewright.trace").joinpath(script).read_text("utf-8"))
        for path in paths:
            with files_at(path) as files_there:
                loaded += _load_all(files_there, connection, tell)
    return loaded


def _load_all(
    there: Sequence[tuple[Path, str]], connection: DuckDBPyConnection, tell: Callable[[str], None]
) -> list[Loaded]:
    """One trace, or those of a folder or archive, in which other files may lie too."""
    import duckdb

    loaded, refused = list[Loaded](), list[TraceError]()
    for path, name in there:
        tell(f"reading {Path(name).name}")
        try:
            loaded.append(_load(path, name, connection))
        except duckdb.Error as error:
            raise TraceError(f"{name} cannot be loaded: {str(error).partition(chr(10))[0]}") from error
        except TraceError as error:
            refused.append(error)
            if len(there) > 1:
                tell(f"left out: {error}")
        finally:
            drop_tables(connection)
    if refused and not loaded:
        raise refused[0]
    return loaded


@contextmanager
def _transaction(connection: DuckDBPyConnection) -> Iterator[None]:
    """Run the block in a transaction."""
    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(Exception):
            connection.execute("ROLLBACK")
        raise


@contextmanager
def _bounded(connection: DuckDBPyConnection) -> Iterator[None]:
    """Bound DuckDB's memory (the rest goes to its temporary folder), and preserve the order of rows."""
    settings: dict[str, object] = {
        "memory_limit": _MEMORY,
        "threads": _THREADS,
        "preserve_insertion_order": True,
        "pandas_analyze_sample": 1 << 30,
        # Write each full row group to disk; by default each thread keeps five in memory.
        "write_buffer_row_group_count": 1,
    }
    before = {name: connection.execute(f"SELECT current_setting('{name}')").fetchall()[0][0] for name in settings}
    settings["threads"] = min(_THREADS, int(before["threads"]))
    try:
        for name, value in settings.items():
            connection.execute(f"SET {name} = '{value}'")
        yield
    finally:
        for name, value in before.items():
            connection.execute(f"SET {name} = '{value}'")


def _load(path: Path, name: str, connection: DuckDBPyConnection) -> Loaded:
    make_tables(connection)
    with failing(Path(name)):
        header = _stage(path, Path(name), connection)
    # Row ids, which give the position in the file, are final only after a commit; so the next part is a new
    # transaction.
    with _transaction(connection):
        return _place(path, name, connection, header)


def _stage(path: Path, shown: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` and `event_reject` from a file of any format, which errors call `shown`."""
    if nsys.is_nsys(path):
        return nsys.stage(path, connection)
    if {".pftrace", ".perfetto-trace"} & set(path.suffixes):
        raise TraceError(f"{shown} is in Perfetto's own format, which is not read: `traceconv json` makes JSON of it")
    with unpacked(path) as plain:
        if snapshot.is_snapshot(plain):
            return snapshot.stage(plain, shown, connection)
        return chrome.stage(plain, shown, connection)


def _place(path: Path, name: str, connection: DuckDBPyConnection, header: Header) -> Loaded:
    """Move the staged events to the tables of the schema."""
    file_id = next_id(connection, "trace_file", "id")
    events = _count(connection, "staged") + _count(connection, "event_reject")
    if events and not header.notes and not _count(connection, "staged"):
        ((why,),) = connection.execute("SELECT reason FROM event_reject LIMIT 1").fetchall()
        raise TraceError(f"{name} is not a trace: none of its {events:,} entries is an event; the first is: {why}")
    shift = _align(connection, header)
    tracks = Tracks(connection, file_id)
    tracks.find()
    counters = add_counters(connection, tracks)
    slices, flow_points, clocks = _add_slices_and_flows(connection, tracks)
    tracks.write()
    metadata = add_metadata(connection, tracks, header)
    connection.execute("INSERT INTO reject SELECT ?, ?, reason, event FROM event_reject", [file_id, name])
    loaded = Loaded(
        id=file_id,
        path=name,
        format=header.format,
        rank=header.rank,
        world_size=header.world_size,
        bytes=path.stat().st_size,
        events=events,
        slices=len(slices.ids),
        paired=slices.paired,
        flow_points=flow_points,
        counters=counters,
        metadata=metadata,
        rejects=_count(connection, "event_reject"),
        base_ns=header.base_ns,
        shift_ns=shift,
        note="; ".join(filter(None, (*header.notes, clocks))) or None,
    )
    append(connection, "trace_file", [tuple(vars(loaded).values())])
    return loaded


def _add_slices_and_flows(connection: DuckDBPyConnection, tracks: Tracks) -> tuple[Slices, int, str | None]:
    """Rows of slices and flows; returns the number of joined flow events and a note on their clocks.

    NumPy nests and joins on one processor, while DuckDB reads and writes on the others.
    """
    found = find_slices(connection, tracks)
    with ThreadPoolExecutor(1) as beside:
        reading = beside.submit(find_points, connection)
        slices = found.nested()
        points = reading.result()
        writing = beside.submit(write_slices, connection, slices)
        flows = points.joined(slices)
        writing.result()
    return slices, len(points.seq) - flows.rejected, write_flows(connection, slices, flows)


def _align(connection: DuckDBPyConnection, header: Header) -> int:
    """Shift the staged times to the zero of the first file; returns the shift."""
    first = connection.execute("SELECT base_ns FROM trace_file ORDER BY id LIMIT 1").fetchone()
    shift = header.base_ns - int(first[0]) if first and first[0] and header.base_ns else 0
    if shift:
        connection.execute("UPDATE staged SET ts = ts + ?", [shift])
    return shift


def _count(connection: DuckDBPyConnection, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
    assert row is not None
    return int(row[0])
