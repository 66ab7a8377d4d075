"""Stamped ranges in a trace of Kineto's: at the right time on its clock, on their thread, whatever their names."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tests.waiting import in_threads
from tilewright.measure.recording.host_ranges import HostRanges


def joined(ranges: HostRanges, folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "bare.json").write_text(text)
    ranges.join(folder / "bare.json", folder / "joined.json")
    document = json.loads((folder / "joined.json").read_text())
    assert {key: value for key, value in document.items() if key != "traceEvents"} == {
        key: value for key, value in json.loads(text).items() if key != "traceEvents"
    }
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_one_clock_with_the_profiler(tmp_path: Path) -> None:
    ranges = HostRanges()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(20):
            close = ranges.mark("outer")
            with record_function("inner"):
                torch.ones(3).exp()
            close()
    profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
    events = joined(ranges, tmp_path, (tmp_path / "kineto.json").read_text())
    outer = [event for event in events if event["name"] == "outer"]
    inner = [event for event in events if event["name"] == "inner"]
    assert len(outer) == len(inner) == 20
    for around, within in zip(outer, inner, strict=True):
        assert (around["pid"], around["tid"]) == (within["pid"], within["tid"])
        # Kineto converts its clock once a recording: some microseconds may lie between the two.
        assert around["ts"] - 50 < within["ts"] and within["ts"] + within["dur"] < around["ts"] + around["dur"] + 50


@pytest.mark.parametrize("events", ["[]", "[ ]", '[{"ph": "i", "name": "mine", "ts": 1}]'])
def test_events_of_every_length(tmp_path: Path, events: str) -> None:
    ranges = HostRanges()
    text = f'{{"baseTimeNanoseconds": 1000, "traceEvents": {events}, "traceName": "x"}}'
    assert len(joined(ranges, tmp_path, text)) == len(json.loads(events))
    ranges.mark('a "name"\n</script>')()
    found = joined(ranges, tmp_path, text)
    assert len(found) == len(json.loads(events)) + 1
    assert found[0]["name"] == 'a "name"\n</script>' and found[0]["pid"] == os.getpid()


def test_a_header_of_any_length(tmp_path: Path) -> None:
    ranges = HostRanges()
    ranges.mark("range")()
    text = json.dumps({"notes": ["x" * 1000] * 3000, "baseTimeNanoseconds": 1000, "traceEvents": []})
    assert [event["name"] for event in joined(ranges, tmp_path, text)] == ["range"]


def test_every_thread_marks_its_own(tmp_path: Path) -> None:
    ranges = HostRanges()
    in_threads([lambda: [ranges.mark("range")() for _ in range(500)]] * 8)
    found = joined(ranges, tmp_path, '{"traceEvents": []}')
    assert len(found) == 4000 and all(event["dur"] >= 0 for event in found)
