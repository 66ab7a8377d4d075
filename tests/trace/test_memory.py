"""Holders of memory at its peak, compared with a simulated allocator."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trace.loading import complete, loaded, loaded_events, rows, written
from tests.trace.training_trace import TrainingTrace
from tilewright.trace.memory import BEFORE, NO_OPERATOR, DeviceMemory, Holder, memory

FIXTURES = Path(__file__).parent / "fixtures"


def memory_of(events: list[dict[str, Any]]) -> list[DeviceMemory]:
    connection, _ = loaded_events(events)
    return memory(connection)


def event(ts: float, size: int, total: int, address: int, device: int = 0, **more: Any) -> dict[str, Any]:
    args = {"Bytes": size, "Total Allocated": total, "Addr": address, "Device Type": device, "Device Id": -1 + device}
    place = {"pid": 1, "tid": 1, "ts": ts, **more}
    return {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", **place, "args": args}


def slice_(name: str, ts: float, dur: float, category: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return complete(name, ts, dur, tid, cat=category)


@pytest.mark.parametrize("seed", range(4))
def test_the_peak_is_held_by_whom_the_allocator_gave_it(seed: int) -> None:
    made = TrainingTrace(seed, operators=30)
    connection, _ = loaded_events(made.events)
    (gpu,) = memory(connection)
    assert gpu.device == "GPU 0" and gpu.training
    assert gpu.peak_bytes == made.peak == sum(made.live.values())
    assert {(each.operator, each.phase): each.bytes for each in gpu.holders} == made.live
    assert [each.bytes for each in gpu.holders] == sorted((each.bytes for each in gpu.holders), reverse=True)
    assert rows(connection, "SELECT max(allocated), count(*) FROM memory_event") == [(made.peak, gpu.ts.size)]


def test_phases_say_what_outlived_them() -> None:
    events = [
        slice_("forward", 0, 10, "user_annotation"),
        slice_("aten::mm", 1, 8),
        event(2, 100, 100, 1),
        event(3, 40, 140, 2),
        event(4, -40, 100, 2),
        # The thread that runs backward has no range of its own: the time decides.
        slice_("backward", 20, 10, "user_annotation"),
        slice_("autograd::engine::evaluate_function: MmBackward0", 21, 8, tid=2),
        event(22, 70, 170, 2, tid=2),
        event(23, -100, 70, 1, tid=2),
        slice_("Optimizer.step#SGD.step", 40, 10, "user_annotation"),
        event(41, -70, 0, 2),
    ]
    (cpu,) = memory_of(events)
    assert cpu.training and (cpu.peak_bytes, cpu.peak_ts) == (170, cpu.ts[3])
    assert [(p.phase, p.peak_bytes, p.allocated_bytes, p.kept_bytes) for p in cpu.phases] == [
        ("forward", 140, 140, 100),
        ("backward", 170, 70, 70),
        ("optimizer", 0, 0, 0),
    ]
    assert cpu.holders == [Holder("aten::mm", "forward", 100, 1), Holder("MmBackward0", "backward", 70, 1)]


def test_inference_keeps_nothing_and_needs_no_range() -> None:
    events = [slice_("aten::add", 0, 5), event(1, 64, 64, 9), event(2, -64, 0, 9), event(8, 32, 32, 9)]
    (cpu,) = memory_of(events)
    assert not cpu.training and [p.phase for p in cpu.phases] == ["forward"]
    assert cpu.holders == [Holder("aten::add", "forward", 64, 1)]
    assert NO_OPERATOR not in [each.operator for each in cpu.holders]


def test_an_operator_that_allocates_for_another_does_not_count() -> None:
    events = [
        slice_("aten::linear", 0, 20),
        slice_("aten::addmm", 1, 18),
        slice_("aten::empty", 2, 2),
        event(3, 10, 10, 1),
        slice_("aten::zeros", 30, 9),
        slice_("aten::empty", 31, 5),
        event(32, 20, 30, 2),
        event(50, 5, 35, 3),
    ]
    (cpu,) = memory_of(events)
    assert {each.operator: each.bytes for each in cpu.holders} == {"aten::addmm": 10, "aten::zeros": 20, NO_OPERATOR: 5}


def test_every_device_has_its_own_peak() -> None:
    events = [event(1, 8, 8, 5), event(2, 900, 1000, 5, device=1), event(3, -8, 0, 5)]
    gpu, cpu = memory_of(events)
    assert (gpu.device, gpu.peak_bytes, cpu.device, cpu.peak_bytes) == ("GPU 0", 1000, "CPU", 8)
    assert sum(each.bytes for each in gpu.holders) == 1000
    np.testing.assert_array_equal(cpu.allocated, [8, 0])


def test_files_do_not_lend_each_other_their_phases(tmp_path: Path) -> None:
    """Training in one file and inference in another, at the same times."""
    training = [slice_("backward", 0, 10, "user_annotation"), slice_("aten::mm", 1, 8), event(2, 64, 64, 1)]
    inference = [slice_("aten::mm", 1, 8), event(2, 32, 32, 1)]
    paths = [written(tmp_path / "train.json", training), written(tmp_path / "infer.json", inference)]
    first, second = memory(loaded(*paths)[0])
    assert (first.file, first.training, first.holders) == (0, True, [Holder("aten::mm", "backward", 64, 1)])
    assert (second.file, second.training, second.holders) == (1, False, [Holder("aten::mm", "forward", 32, 1)])


def test_damaged_events_are_left_out() -> None:
    too_large = {"Bytes": 2**63, "Total Allocated": 1, "Device Type": 0}
    broken = [
        event(1, 1, 1, 1) | {"args": args}
        for args in ({}, {"Bytes": "x", "Total Allocated": 1}, too_large, {"Bytes": None})
    ]
    assert memory_of(broken) == []
    (cpu,) = memory_of([*broken, event(2, 7, 7, 1)])
    assert cpu.peak_bytes == 7


@pytest.mark.parametrize("name", ["block_eager", "block_inductor"])
def test_a_recorded_training_step_on_a_gpu(name: str) -> None:
    """The file's own events, replayed one by one, against what is said of its peak."""
    with gzip.open(FIXTURES / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["name"] == "[memory]"]
    gpu_events = [event["args"] for event in sorted(events, key=lambda e: e["ts"]) if event["args"]["Device Type"] == 1]
    live: dict[int, int] = {}
    peak, at_peak = 0, 0
    for args in gpu_events:
        if args["Bytes"] > 0:
            live[args["Addr"]] = args["Bytes"]
        else:
            live.pop(args["Addr"], None)
        if args["Total Allocated"] > peak:
            peak, at_peak = args["Total Allocated"], sum(live.values())
    connection, _ = loaded(FIXTURES / f"{name}.json.gz")
    gpu = next(each for each in memory(connection) if each.device == "GPU 0")
    assert gpu.peak_bytes == peak and gpu.training
    assert sum(each.bytes for each in gpu.holders) == peak
    assert sum(each.bytes for each in gpu.holders if each.operator != BEFORE) == at_peak
    assert {each.phase for each in gpu.phases} >= {"forward", "backward", "optimizer"}


def test_training_holds_what_inference_frees(tmp_path: Path) -> None:
    """A chain of GELUs, recorded here: training keeps the input of each for backward, inference only two at a time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    size, layers = 4 * 256 * 256, 8
    found = {}
    for training in (True, False):
        x = torch.randn(256, 256, requires_grad=training)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
            y = x
            for _ in range(layers):
                y = torch.nn.functional.gelu(y)
            if training:
                y.sum().backward()
        recorded.export_chrome_trace(str(tmp_path / "trace.json"))
        (found[training],) = memory(loaded(tmp_path / "trace.json")[0])
        del x, y
    assert found[True].training and not found[False].training
    assert found[False].peak_bytes == 2 * size
    assert layers * size <= found[True].peak_bytes <= (layers + 3) * size
    forward = next(each for each in found[True].phases if each.phase == "forward")
    assert forward.kept_bytes == layers * size
    assert found[True].holders[0].operator == "aten::gelu"
