"""Traces in Perfetto's own format, packet by packet; run as a script, the fixture of it:

python -m tests.trace.track_events tests/trace/fixtures/track_events.pftrace
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

BEGIN, END, INSTANT, COUNTER = 1, 2, 3, 4
REALTIME, MONOTONIC, BOOT = 1, 3, 6
STATE_CLEARED, NEEDS_STATE = 1, 2
# What tracks of the fixture are called by.
TRAINER, MAIN, AUTOGRAD, REQUESTS, WORLD, BELOW, MEMORY, HEAT, RISING, SERVER, WORKER = range(1, 12)


class Trace:
    """Packets of one or more writers; times are nanoseconds since boot unless a clock is given."""

    def __init__(self) -> None:
        self.message = protos.Trace()

    def packet(self, ts: int | None = None, writer: int = 1, clock: int | None = None, **fields: Any) -> Any:
        packet = self.message.packet.add(trusted_packet_sequence_id=writer, **fields)
        if ts is not None:
            packet.timestamp = ts
        if clock is not None:
            packet.timestamp_clock_id = clock
        return packet

    def snapshot(self, clocks: Mapping[int, int], writer: int = 1) -> Any:
        packet = self.packet(writer=writer)
        for number, time in clocks.items():
            packet.clock_snapshot.clocks.add(clock_id=number, timestamp=time)
        return packet.clock_snapshot

    def track(self, uuid: int, parent: int = 0, **fields: Any) -> None:
        """`process`, `thread` and `counter` are mappings of their fields."""
        described = {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields.items()}
        self.packet(track_descriptor=dict(uuid=uuid, parent_uuid=parent, **described))

    def event(
        self,
        ts: int,
        kind: int,
        track: int | None,
        name: str = "",
        writer: int = 1,
        clock: int | None = None,
        **more: Any,
    ) -> Any:
        event = self.packet(ts, writer, clock).track_event
        event.MergeFrom(protos.TrackEvent(type=kind, **more))
        if track is not None:
            event.track_uuid = track
        if name:
            event.name = name
        return event

    def older(self, ts: int, phase: str, name: str, track: int = MAIN, **more: int) -> None:
        event = self.packet(ts).track_event
        event.track_uuid, event.name = track, name
        event.legacy_event.MergeFrom(protos.TrackEvent.LegacyEvent(phase=ord(phase), **more))

    def bytes(self) -> bytes:
        return bytes(self.message.SerializeToString(deterministic=True))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


def fixture() -> Trace:
    """A little of everything that the reader knows, and of what it does not."""
    trace = Trace()
    trace.snapshot({BOOT: 1_000_000, REALTIME: 1_790_000_000_001_000_000, MONOTONIC: 400_000})
    trace.packet(trace_config={"duration_ms": 5})
    _tracks(trace)
    _slices(trace)
    _counters(trace)
    _a_writer_with_numbers_for_names(trace)
    packed = Trace()
    packed.event(1_000_090, INSTANT, MAIN, "packed")
    trace.packet(compressed_packets=zlib.compress(packed.bytes()))
    trace.older(1_000_100, "X", "complete", duration_us=2)
    trace.older(1_003_000, "b", "asynchronous", unscoped_id=5)
    trace.older(1_004_000, "e", "asynchronous", unscoped_id=5)
    tree = trace.packet().process_tree
    tree.processes.add(pid=300, cmdline=["/usr/bin/other"])
    tree.threads.add(tid=301, tgid=300, name="helper")
    trace.packet(ftrace_events={"cpu": 0}).ftrace_events.event.add(timestamp=1_000_500, pid=100)
    return trace


def _tracks(trace: Trace) -> None:
    trace.track(TRAINER, process={"pid": 100, "process_name": "trainer"})
    trace.track(MAIN, TRAINER, thread={"pid": 100, "tid": 100, "thread_name": "main"})
    trace.track(AUTOGRAD, TRAINER, thread={"pid": 100, "tid": 101, "thread_name": "autograd"})
    trace.track(REQUESTS, TRAINER, name="requests")
    trace.track(WORLD, name="the world")
    trace.track(BELOW, MAIN, name="below main")
    trace.track(MEMORY, TRAINER, name="memory", counter={"unit": 3})
    trace.track(HEAT, name="heat", counter={"unit_name": "K", "unit_multiplier": 10})
    trace.track(RISING, TRAINER, name="rising", counter={"is_incremental": True})
    trace.track(SERVER, process={"pid": 200, "process_name": "server"})
    trace.track(WORKER, SERVER, thread={"pid": 200, "tid": 200, "thread_name": "worker"})


def _slices(trace: Trace) -> None:
    trace.event(1_000_010, BEGIN, MAIN, "step", categories=["train", "loop"])
    notes = trace.event(1_000_020, BEGIN, MAIN, "forward", flow_ids=[77]).debug_annotations
    notes.add(name="whole", int_value=-5)
    notes.add(name="large", uint_value=2**62)
    notes.add(name="yes", bool_value=True)
    notes.add(name="half", double_value=0.5)
    notes.add(name="text", string_value='a "b"')
    notes.add(name="shape", array_values=[{"int_value": 3}, {"int_value": 4}])
    notes.add(name="outer", dict_entries=[{"name": "inner", "dict_entries": [{"name": "one", "string_value": "x"}]}])
    notes.add(name="json", legacy_json_value='{"k": [1, 2]}')
    trace.event(1_000_025, INSTANT, MAIN, "mark", flow_ids=[78])
    trace.event(1_000_030, END, MAIN)
    trace.event(1_000_040, END, MAIN).debug_annotations.add(name="late", int_value=9)
    trace.event(1_000_022, BEGIN, AUTOGRAD, "backward", terminating_flow_ids=[77])
    trace.event(1_000_026, END, AUTOGRAD)
    trace.event(1_000_050, END, AUTOGRAD)
    trace.event(1_000_060, BEGIN, AUTOGRAD, "never ends", terminating_flow_ids=[78])
    # Two that begin at once: the arrow is the outer one's.
    trace.event(1_000_052, BEGIN, MAIN, "outer", flow_ids=[79])
    trace.event(1_000_052, BEGIN, MAIN, "inner")
    trace.event(1_000_054, END, MAIN)
    trace.event(1_000_055, END, MAIN, terminating_flow_ids=[])
    trace.event(1_000_070, INSTANT, AUTOGRAD, "flown to", terminating_flow_ids=[79])
    for ts, kind, name in ((11, BEGIN, "request 1"), (15, BEGIN, "part"), (18, END, ""), (19, END, "")):
        trace.event(1_000_000 + ts, kind, REQUESTS, name)
    trace.event(1_000_012, INSTANT, WORLD, "flare")
    trace.event(1_000_013, BEGIN, BELOW, "inside")
    trace.event(1_000_014, END, BELOW)
    trace.event(1_000_095, INSTANT, None, "no track")
    trace.event(1_000_096, INSTANT, 999, "a track that nobody described")


def _counters(trace: Trace) -> None:
    for ts, nbytes in ((10, 1000), (20, 2000), (30, 500)):
        trace.event(1_000_000 + ts, COUNTER, MEMORY, counter_value=nbytes)
    for ts, kelvin, more in ((10, 1.5, 1), (20, 2.25, 2)):
        trace.event(1_000_000 + ts, COUNTER, HEAT, double_counter_value=kelvin)
        trace.event(1_000_000 + ts, COUNTER, RISING, counter_value=more)
    begun = {"extra_counter_track_uuids": [MEMORY], "extra_counter_values": [700]}
    trace.event(1_000_080, BEGIN, MAIN, "with a counter", **begun)
    trace.event(1_000_085, END, MAIN)


def _a_writer_with_numbers_for_names(trace: Trace) -> None:
    """It has a clock of its own, tells times by another one too, and loses packets."""
    own = 64
    defaults = {"timestamp_clock_id": own, "track_event_defaults": {"track_uuid": WORKER}}
    trace.packet(writer=2, sequence_flags=STATE_CLEARED, trace_packet_defaults=defaults)
    clocks = trace.snapshot({BOOT: 2_000_000}, writer=2).clocks
    clocks.add(clock_id=own, timestamp=0, is_incremental=True, unit_multiplier_ns=1000)
    packet = trace.packet(5, writer=2, sequence_flags=NEEDS_STATE)
    packet.interned_data.event_names.add(iid=1, name="by number")
    packet.interned_data.event_categories.add(iid=1, name="io")
    packet.interned_data.debug_annotation_names.add(iid=1, name="bytes")
    packet.interned_data.debug_annotation_string_values.add(iid=4, str=b"file")
    packet.track_event.MergeFrom(protos.TrackEvent(type=BEGIN, name_iid=1, category_iids=[1]))
    packet.track_event.debug_annotations.add(name_iid=1, int_value=4096)
    packet.track_event.debug_annotations.add(name="what", string_value_iid=4)
    trace.packet(3, writer=2, sequence_flags=NEEDS_STATE).track_event.type = END
    trace.event(404_000, BEGIN, WORKER, "monotonic", writer=2, clock=MONOTONIC)
    trace.event(405_000, END, WORKER, writer=2, clock=MONOTONIC)
    trace.event(1, BEGIN, WORKER, "no such clock", writer=2, clock=99)
    lost = trace.packet(7, writer=2, previous_packet_dropped=1, sequence_flags=NEEDS_STATE)
    lost.track_event.MergeFrom(protos.TrackEvent(type=INSTANT, name_iid=1))
    anew = trace.packet(writer=2, sequence_flags=STATE_CLEARED)
    anew.trace_packet_defaults.track_event_defaults.track_uuid = WORKER
    anew.interned_data.event_names.add(iid=1, name="anew")
    last = trace.packet(2_020_000, writer=2, sequence_flags=NEEDS_STATE)
    last.track_event.MergeFrom(protos.TrackEvent(type=INSTANT, name_iid=1))


if __name__ == "__main__":
    fixture().write(Path(sys.argv[1]))
