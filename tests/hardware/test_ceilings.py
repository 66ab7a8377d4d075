"""Keeping ceilings, and the arithmetic of measured ones on a clock of the test's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewright.hardware.ceilings import device_name, keep_ceilings, kept_ceilings, machine_dir, measure_ceilings
from tilewright.hardware.detect import Cpu, detect
from tilewright.measure.timing.stopwatch import CpuStopwatch, Lap
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Ceiling

pytestmark = pytest.mark.usefixtures("home")
MIB = 1024**2
COPY = Ceiling("AMD EPYC 9654 96-Core/Processor", "copy", "float32", 123.0, "GB/s", "measured")


def test_kept_ceilings_come_back_for_their_device_alone(home: Path) -> None:
    path = keep_ceilings([COPY])
    assert path.parent == home / "machine" == machine_dir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept_ceilings(COPY.device) == [COPY]
    assert kept_ceilings("another device") is None


def test_another_thread_count_has_ceilings_of_its_own() -> None:
    keep_ceilings([COPY])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert kept_ceilings(COPY.device) is None
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", ["0", "-1", "NaN", "Infinity", '"fast"'])
def test_a_figure_that_cannot_be_is_not_believed(value: str) -> None:
    path = keep_ceilings([COPY])
    path.write_text(path.read_text().replace("123.0", value))
    assert kept_ceilings(COPY.device) is None


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"ceilings": []}', '{"ceilings": [{"kind": "copy"}]}', "another format"]
)
def test_damaged_files_and_those_of_another_format_are_measured_again(content: str) -> None:
    path = keep_ceilings([COPY])
    path.write_text(path.read_text().replace('"format": 3', '"format": 2') if "format" in content else content)
    assert kept_ceilings(COPY.device) is None


def test_a_device_that_is_not_here_is_named() -> None:
    machine = detect()
    assert device_name(machine, "cpu") == (machine.cpu.model or "CPU")
    for absent in (f"cuda:{len(machine.gpus)}", "tpu"):
        with pytest.raises(UsageError, match=f"no device '{absent}' here"):
            device_name(machine, absent)


class OneMillisecond(CpuStopwatch):
    """Runs each call, and reports a millisecond for it."""

    def __init__(self) -> None:
        self.calls = 0

    def time(self, function: Callable[[], object], look: Callable[[object], None] | None = None) -> Lap:
        function()
        self.calls += 1
        return Lap(1000.0)

    def now(self) -> float:
        return self.calls / 1000


@pytest.mark.parametrize(("busy", "kept"), [(1, True), (2, True), (3, False)])
def test_a_cache_is_never_slower_than_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], busy: int, kept: bool
) -> None:
    """On a machine that is busy for so many measurements: measured again, and left out after three."""
    rates = iter([1e-6] * busy + [1e6] * 3)
    monkeypatch.setattr("tilewright.hardware.ceilings.CpuStopwatch", OneMillisecond)
    monkeypatch.setattr("tilewright.hardware.ceilings._copied_GBps", lambda bench: next(rates))
    machine = replace(detect(), cpu=Cpu(f"busy {busy}", l3_bytes=4 * MIB), ram_bytes=2**40)
    found = {c.kind: c.value for c in measure_ceilings("cpu", machine=machine, seconds=0.02)}
    assert found.get("cache") == (1e6 if kept else None) and found["copy"] > 0
    assert ("measured slower than memory 3 times" in capsys.readouterr().err) == (not kept)


def test_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.hardware.ceilings.CpuStopwatch", OneMillisecond)
    machine = replace(detect(), cpu=Cpu("test", l3_bytes=4 * MIB), ram_bytes=2**40)
    ceilings = measure_ceilings("cpu", machine=machine, seconds=0.02)
    per_ms = {
        # Sixteen MiB, four times the cache; in it, fifty times from one quarter to another.
        ("copy", "float32"): (2 * 16 * MIB, "GB/s"),
        ("read", "float32"): (16 * MIB, "GB/s"),
        ("write", "float32"): (16 * MIB, "GB/s"),
        ("cache", "float32"): (50 * 2 * MIB, "GB/s"),
        ("first touch", "float32"): (64 * MIB, "GB/s"),
        # Twice 512 would take eight milliseconds, and five of those are more than twenty.
        ("matmul", "float32"): (2 * 512**3, "TFLOP/s"),
        ("matmul", "bfloat16"): (2 * 512**3, "TFLOP/s"),
        ("vector", "float32"): (2 * 512**3, "TFLOP/s"),
    }
    rates = {"GB/s": 1e3 / 1e9, "TFLOP/s": 1e3 / 1e12}
    expected = {(*key, unit): pytest.approx(work * rates[unit]) for key, (work, unit) in per_ms.items()}
    expected["launch", "", "us"] = pytest.approx(1.0)
    assert {(c.kind, c.dtype, c.unit): c.value for c in ceilings} == expected
    assert {c.device for c in ceilings} == {"test"}
