"""Snapshots of PyTorch's CUDA allocator (`torch.cuda.memory._dump_snapshot`): history, segments, blocks, out of memory.

A snapshot is a pickle of plain containers, by the structure that `torch.cuda.memory._snapshot` documents. Nothing in it
is looked up or called: a pickle that names a class or function is refused. The history becomes the events that
PyTorch's profiler has for its allocators, each within a slice with the line that allocated; blocks and failed
allocations are tables of their own.
"""

from __future__ import annotations

import json
import pickle
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from tilewright.records.errors import TraceError
from tilewright.store.rows import storable
from tilewright.trace.events.rows import append, next_id
from tilewright.trace.events.staging import Header

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_PROTOCOLS = range(2, 6)
_BYTES_EACH, _BYTES_MORE = 64, 1 << 30
"""Of memory for each byte of the file, and beside: a pickle can ask for far more than it holds."""
_LIMIT = 1 << 62
_STANDARD = re.compile(r"/lib(64)?/python\d[^/]*/(?!site-packages|dist-packages)")
_SIGNS = {
    "alloc": 1,
    "free_requested": -1,
    "segment_alloc": 1,
    "segment_map": 1,
    "segment_free": -1,
    "segment_unmap": -1,
}
Entry = Mapping[str, Any]


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it would run {module}.{name}")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


class Place(NamedTuple):
    """Where memory was allocated: the user's innermost line, its function, the layer around it, and the phase."""

    source: str | None
    function: str | None
    layer: str | None
    phase: str

    @property
    def shown(self) -> str:
        return " ".join(filter(None, (self.source, self.function))) or "no Python"


def is_snapshot(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2)
    return len(head) == 2 and head[0] == 0x80 and head[1] in _PROTOCOLS


def stage(plain: Path, path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` and the tables of snapshots from the file `plain`, which errors call `path`.

    Raises:
        TraceError: it is no snapshot, is damaged, or would run code.
    """
    snapshot = _read(plain, path)
    file_id = next_id(connection, "trace_file", "id")
    segments = _entries(snapshot["segments"])
    _add_segments(connection, file_id, segments)
    traces = snapshot["device_traces"]
    for device, entries in enumerate(traces):
        own = [segment for segment in segments if _number(segment.get("device", 0)) == device]
        _add_history(connection, file_id, device, _entries(entries), own)
    notes = () if any(traces) else ("no history: torch.cuda.memory._record_memory_history() records it",)
    return Header(format="memory snapshot", notes=notes)


def _read(plain: Path, path: Path) -> dict[str, Any]:
    try:
        with plain.open("rb") as file, _bounded(_BYTES_MORE + _BYTES_EACH * plain.stat().st_size):
            found = _Plain(file).load()
    except OSError:
        raise
    except Exception as error:
        why = "it asks for more memory than it can need" if isinstance(error, MemoryError) else str(error)
        raise TraceError(f"{path} is not read as a memory snapshot: {why}") from error
    known = isinstance(found, dict) and isinstance(found.get("segments"), list)
    if not known or not _are_lists(found.get("device_traces")):
        raise TraceError(f"{path} is no memory snapshot: it has no lists `segments` and `device_traces`")
    return dict(found)


def _are_lists(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(each, list) for each in found)


@contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    """Let the process take so much memory more, and no more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = now + nbytes
    if before[0] != resource.RLIM_INFINITY:
        most = min(most, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _number(value: object) -> int:
    """0 where it is no number that a device has."""
    return value if isinstance(value, int) and abs(value) < _LIMIT else 0


def _entries(found: object) -> list[Entry]:
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def place_of(frames: object) -> Place:
    """Of a stack, innermost frame first.

    >>> linear = {"filename": "/v/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"}
    >>> place_of([linear, {"filename": "/home/me/model.py", "line": 12, "name": "encode"}])
    Place(source='model.py:12', function='encode', layer='linear', phase='forward')
    """
    source = function = layer = None
    phase = "other"
    for frame in _entries(frames):
        file, name = str(frame.get("filename", "")), str(frame.get("name", ""))
        if "/torch/nn/modules/" in file and file.endswith(".py"):
            stem = Path(file).stem
            layer = layer or (stem if stem not in ("module", "container") else None)
            phase = "forward" if phase == "other" else phase
        elif "/torch/optim/" in file:
            phase = "optimizer"
        elif "/torch/autograd/" in file or name.startswith("torch::autograd::Engine"):
            phase = "backward"
        elif source is None and file.endswith(".py") and "/torch/" not in file and not _STANDARD.search(file):
            source, function = f"{Path(file).name}:{_number(frame.get('line'))}", name
    source, function, layer = (None if text is None else storable(text) for text in (source, function, layer))
    return Place(source, function, layer, phase)


def _add_segments(connection: DuckDBPyConnection, file_id: int, segments: Sequence[Entry]) -> None:
    first = next_id(connection, "memory_segment", "id")
    rows, blocks = list[tuple[object, ...]](), list[tuple[object, ...]]()
    for number, segment in enumerate(segments, first):
        device, address = _number(segment.get("device", 0)), _number(segment.get("address"))
        pool = storable(str(segment.get("segment_type", "")))
        sizes = (_number(segment.get(name)) for name in ("total_size", "allocated_size", "active_size"))
        rows.append((number, file_id, device, address, _number(segment.get("stream")), pool, *sizes))
        for block in _entries(segment.get("blocks")):
            size, at = _number(block.get("size")), _number(block.get("address", address))
            place, state = place_of(block.get("frames")), storable(str(block.get("state", "")))
            asked = _number(block.get("requested_size", size))
            blocks.append((number, file_id, at, size, asked, state, place.source, place.function, place.layer))
            address += size
    append(connection, "memory_segment", rows)
    append(connection, "memory_block", blocks)


def _add_history(
    connection: DuckDBPyConnection, file_id: int, device: int, entries: Sequence[Entry], segments: Sequence[Entry]
) -> None:
    """Events of one device; what it had before the history is what it has in the end without what that added."""
    totals = {
        "segment": sum(_number(segment.get("total_size")) for segment in segments),
        "block": sum(_number(segment.get("allocated_size")) for segment in segments),
    }
    for entry in entries:
        totals[_kind(entry)] -= _change(entry)
    staged, failed, phases = list[tuple[object, ...]](), list[tuple[object, ...]](), list[tuple[int, str]]()
    process, ts = f"GPU {device}", 0
    for entry in entries:
        # Times have microseconds; two events need three moments.
        ts = max(_number(entry.get("time_us")) * 1000, ts + 3)
        change, kind = _change(entry), _kind(entry)
        totals[kind] += change
        place = place_of(entry.get("frames"))
        if entry.get("action") == "oom":
            free = entry.get("device_free")
            sizes = (_number(entry.get("size")), None if free is None else _number(free))
            failed.append((file_id, device, ts, *sizes, totals["block"], totals["segment"], place.source))
        if not change or kind == "segment":
            continue
        phases.append((ts, place.phase))
        args = {
            "Device Type": 1, "Device Id": device, "Bytes": change, "Addr": str(_number(entry.get("addr"))),
            "Total Allocated": totals["block"], "Total Reserved": totals["segment"],
        }  # fmt: skip
        staged.append(_event("X", "allocation", place.shown, process, "allocator", ts, 2, {"layer": place.layer}))
        staged.append(_event("i", "allocation", "[memory]", process, "allocator", ts + 1, None, args))
    for (start, phase), (end, _) in _runs(phases, ts):
        staged.append(_event("X", "user_annotation", f"phase {phase}", process, "phases", start, end - start, {}))
    append(connection, "staged", staged)
    append(connection, "out_of_memory", failed)


def _kind(entry: Entry) -> str:
    return "segment" if str(entry.get("action", "")).startswith("segment") else "block"


def _change(entry: Entry) -> int:
    return _SIGNS.get(str(entry.get("action")), 0) * _number(entry.get("size"))


def _runs(phases: Sequence[tuple[int, str]], end: int) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    """Each run of equal phases, and the one after it."""
    firsts = [next(run) for _, run in groupby(phases, lambda each: each[1])]
    yield from zip(firsts, [*firsts[1:], (end + 3, "")], strict=False)


def _event(
    phase: str, category: str, name: str, pid: str, tid: str, ts: int, dur: int | None, args: Mapping[str, object]
) -> tuple[object, ...]:
    return 0, phase, category, name, pid, tid, ts, dur, None, None, None, json.dumps(args)
