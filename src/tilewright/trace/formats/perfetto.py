"""Perfetto's own format (`.pftrace`, `.perfetto-trace`): the track events of its SDK.

Messages follow Perfetto's `protos/perfetto/trace`; the package `perfetto` decodes them. Packets of other sources, such
as the kernel's scheduler, are rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.errors import TraceError
from tilewright.trace.events.rows import append
from tilewright.trace.events.staging import HERE, Header
from tilewright.trace.formats.clocks import BOOT, Clocks, NoSnapshot
from tilewright.trace.formats.exact import InvalidEvent
from tilewright.trace.formats.lanes import Lanes
from tilewright.trace.formats.packets import DamagedPacket, Packets, unpacked
from tilewright.trace.formats.track_event import Fields, Names, arguments_of, phase_of

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_BATCH = 50_000
_LIMIT = 2**62
_LOST = "packets before it were lost, and with them its names"
_STATE_CLEARED, _NEEDS_STATE = 1, 2
_CUT = "the file ends early"
# Packets with metadata of the trace; they are not events.
_ABOUT = frozenset(
    ("trace_config", "trace_stats", "trace_uuid", "synchronization_marker", "service_event", "system_info", "trigger",
     "extension_descriptor", "ui_state", "trace_provenance", "trace_attributes", "chrome_trigger", "chrome_metadata",
     "clone_snapshot_trigger", "recovered_trace_info", "ftrace_stats", "cpu_info", "perfetto_metatrace",
     "track_event_range_of_interest", "concurrent_session_event", "remote_clock_sync", None)
)  # fmt: skip

# The earliest event of a flow begins it, which is known only after reading all of them.
_ARROWS = {"flow_ids": "t", "flow_ids_old": "t", "terminating_flow_ids": "f", "terminating_flow_ids_old": "f"}

Row = tuple[object, ...]


def stage(plain: Path, path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged`, `lane` and `event_reject` from the unpacked file `plain`, which errors call `path`.

    Raises:
        TraceError: the file is not a trace, or the package `perfetto` is missing.
    """
    packets = Packets(plain, path)
    reader = _Reader(_packet_type(path))
    for packet in packets:
        reader.read(packet)
        if len(reader.rows) + len(reader.rejects) >= _BATCH:
            reader.flush(connection)
    reader.finish(connection)
    if not reader.found:
        raise TraceError(f"{path} is not a trace: none of its packets can be read")
    return Header("perfetto", reader.clocks.base_ns, notes=(_CUT,) if packets.cut_off else (), prefix="debug")


def _packet_type(path: Path) -> Any:
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
    except ImportError as error:
        raise TraceError(f"{path} is in Perfetto's own format, which needs a package: pip install perfetto") from error
    return TracePacket


@dataclass
class _Writer:
    """The incremental state of one sequence of packets."""

    complete: bool = True
    """Whether no packet was lost since the state was last reset."""
    clock: int = BOOT
    track: int = 0
    counters: tuple[int, ...] = ()
    double_counters: tuple[int, ...] = ()
    names: Names = field(default_factory=Names)


class _Reader:
    """Packets into rows of `staged`, in the order of the file."""

    def __init__(self, packet_type: Any) -> None:
        from google.protobuf.message import DecodeError

        self._packet_type, self._decode_error = packet_type, DecodeError
        self.clocks = Clocks()
        self.rows: list[Row] = []
        self.rejects: list[Row] = []
        self.found = False
        self._writers: dict[int, _Writer] = {}
        self._lanes = Lanes()
        self._levels: dict[int, float] = {}

    def read(self, raw: bytes) -> None:
        try:
            packet = self._packet_type.FromString(raw)
        except self._decode_error:
            self.rejects.append(("a packet that cannot be read", f"{len(raw)} bytes"))
            return
        self.found = True
        kind = packet.WhichOneof("data")
        if kind != "compressed_packets":
            self._read(packet, kind)
            return
        try:
            for inner in unpacked(packet.compressed_packets):
                found = self._packet_type.FromString(inner)
                self._read(found, found.WhichOneof("data"))
        except (DamagedPacket, self._decode_error) as error:
            self.rejects.append(("compressed packets that cannot be read", str(error) or f"{len(raw)} bytes"))

    def flush(self, connection: DuckDBPyConnection) -> None:
        append(connection, "staged", self.rows)
        append(connection, "event_reject", self.rejects)
        self.rows, self.rejects = [], []

    def finish(self, connection: DuckDBPyConnection) -> None:
        """Write the remaining rows and the tracks."""
        self.rows += self._lanes.described()
        self.flush(connection)
        self._lanes.write(connection)

    def _read(self, packet: Any, kind: str | None) -> None:
        number = packet.trusted_packet_sequence_id
        writer = self._writers.setdefault(number, _Writer())
        if packet.previous_packet_dropped:
            writer.complete = False
        if packet.incremental_state_cleared or packet.sequence_flags & _STATE_CLEARED:
            writer = self._writers[number] = _Writer()
        if packet.HasField("trace_packet_defaults"):
            _set_defaults(writer, packet.trace_packet_defaults)
        if packet.HasField("interned_data"):
            writer.names.add(packet.interned_data)
        if kind == "track_event":
            self._event(packet, writer)
        elif kind == "track_descriptor":
            self._lanes.describe(packet.track_descriptor)
        elif kind == "process_tree":
            self._lanes.add_processes(packet.process_tree)
        elif kind == "clock_snapshot":
            self._snapshot(number, packet.clock_snapshot)
        elif kind not in _ABOUT:
            self.rejects.append((f"packets of {kind} are not read", f"{packet.ByteSize()} bytes"))

    def _snapshot(self, writer: int, snapshot: Any) -> None:
        clocks = [(one.clock_id, one.timestamp, one.is_incremental, one.unit_multiplier_ns) for one in snapshot.clocks]
        self.clocks.add(writer, clocks)

    def _event(self, packet: Any, writer: _Writer) -> None:
        try:
            self.rows += self._rows(packet, writer)
        except InvalidEvent as why:
            self.rejects.append((str(why), str(packet.track_event)[:2000]))

    def _rows(self, packet: Any, writer: _Writer) -> list[Row]:
        """An event with its counter values and flow ends; raises InvalidEvent."""
        event = packet.track_event
        # Reading a missing field takes as long as a present one, so list the present fields once.
        fields = {known.name: value for known, value in event.ListFields()}
        ts = self._time(packet, writer)
        if not writer.complete and packet.sequence_flags & _NEEDS_STATE:
            raise InvalidEvent(_LOST)
        track = fields.get("track_uuid", writer.track)
        rows = list(self._extra_counters(fields, writer, ts))
        if fields.get("type") == event.TYPE_COUNTER:
            value = fields.get("counter_value", event.double_counter_value)
            return [self._counter(track, ts, value), *rows]
        phase, dur, identity = phase_of(fields)
        name = writer.names.event_name(fields)
        pid, tid = self._lanes.place(track, name)
        arrows = [(arrow, flow) for key, arrow in _ARROWS.items() for flow in fields.get(key, ())]
        if phase == "E" and arrows:
            raise InvalidEvent("an arrow from the end of a slice")
        category, arguments = writer.names.category(fields), arguments_of(fields, writer.names)
        rows.insert(0, (0, phase, category, name, pid, tid, ts, dur, identity, None, None, arguments))
        return rows + [
            (0, arrow, None, None, pid, tid, ts, None, str(flow), HERE, None, None) for arrow, flow in arrows
        ]

    def _time(self, packet: Any, writer: _Writer) -> int:
        if not packet.HasField("timestamp"):
            raise InvalidEvent("no timestamp")
        clock = packet.timestamp_clock_id if packet.HasField("timestamp_clock_id") else writer.clock
        try:
            ts = self.clocks.boot_ns(clock, packet.trusted_packet_sequence_id, packet.timestamp)
        except NoSnapshot:
            raise InvalidEvent(f"clock {clock}, which no snapshot joins to the others") from None
        if not -_LIMIT < ts < _LIMIT:
            raise InvalidEvent("timestamp is out of range")
        return ts

    def _extra_counters(self, fields: Fields, writer: _Writer, ts: int) -> Iterator[Row]:
        for kind, usual in (("counter", writer.counters), ("double_counter", writer.double_counters)):
            values = fields.get(f"extra_{kind}_values", ())
            for track, value in zip(fields.get(f"extra_{kind}_track_uuids", usual), values, strict=False):
                yield self._counter(track, ts, value)

    def _counter(self, track: int, ts: int, value: float) -> Row:
        counter = self._lanes.counter(track)
        if counter.is_incremental:
            value = self._levels[track] = self._levels.get(track, 0) + value
        pid, tid = self._lanes.place(track, None)
        return 0, "C", None, None, pid, tid, ts, None, None, None, None, f'{{"value": {value * counter.unit!r}}}'


def _set_defaults(writer: _Writer, defaults: Any) -> None:
    if defaults.HasField("timestamp_clock_id"):
        writer.clock = defaults.timestamp_clock_id
    if defaults.HasField("track_event_defaults"):
        event = defaults.track_event_defaults
        writer.track = event.track_uuid
        writer.counters = tuple(event.extra_counter_track_uuids)
        writer.double_counters = tuple(event.extra_double_counter_track_uuids)
