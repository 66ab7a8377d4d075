"""Keeping ceilings, and real ones only as far as any machine must agree."""

from __future__ import annotations

import math
import timeit
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewright.hardware.ceilings import (
    _bench,
    _copied_GBps,
    device_name,
    keep_ceilings,
    kept_ceilings,
    machine_dir,
    measure_ceilings,
)
from tilewright.hardware.detect import Cpu, detect
from tilewright.records.errors import CacheError, UsageError
from tilewright.records.measurement import Ceiling

COPY = Ceiling("AMD EPYC 9654 96-Core/Processor", "copy", "float32", 123.0, "GB/s", "measured")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path))
    return tmp_path


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


def test_a_folder_that_cannot_be_made_is_named(home: Path) -> None:
    (home / "machine").write_text("")
    with pytest.raises(CacheError, match=r"cannot keep the measured ceilings in .*\.json: "):
        keep_ceilings([COPY])


def test_figures_of_an_older_format_are_measured_again() -> None:
    path = keep_ceilings([COPY])
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    assert kept_ceilings(COPY.device) is None


def test_a_device_that_is_not_here_is_named() -> None:
    machine = detect()
    assert device_name(machine, "cpu") == (machine.cpu.model or "CPU")
    for absent in (f"cuda:{len(machine.gpus)}", "tpu"):
        with pytest.raises(UsageError, match=f"no device '{absent}' here"):
            device_name(machine, absent)


def sane(ceilings: list[Ceiling]) -> dict[tuple[str, str], float]:
    assert all(math.isfinite(ceiling.value) and ceiling.value > 0 for ceiling in ceilings)
    assert len({ceiling.device for ceiling in ceilings}) == 1
    units = {"launch": "us", "matmul": "TFLOP/s", "vector": "TFLOP/s"}
    assert all(ceiling.unit == units.get(ceiling.kind.split()[0], "GB/s") for ceiling in ceilings)
    return {(ceiling.kind, ceiling.dtype): ceiling.value for ceiling in ceilings}


def test_a_cpu_is_measured() -> None:
    here = detect()
    # A small made-up cache keeps the buffers, and so the test, small.
    small = type(here)(**(vars(here) | {"cpu": Cpu("test", l3_bytes=4 * 1024**2)}))
    values = sane(measure_ceilings("cpu", machine=small, seconds=0.02))
    assert values.keys() == {
        ("copy", "float32"),
        ("read", "float32"),
        ("write", "float32"),
        ("cache", "float32"),
        ("matmul", "float32"),
        ("matmul", "bfloat16"),
        ("vector", "float32"),
        ("launch", ""),
        ("first touch", "float32"),
    }
    # From a museum piece to the largest server: wrong units would be off by a thousand.
    assert 0.3 < values["cache", "float32"] < 20_000
    assert 0.3 < values["copy", "float32"] < 5000
    assert 0.001 < values["matmul", "float32"] < 100
    assert 0.1 < values["launch", ""] < 1000


def test_the_cache_of_a_cpu_is_as_fast_as_numpy_finds_it() -> None:
    """One thread each; both are the best of several, since other programs may use the cache and the CPU meanwhile."""
    half, threads = 512 * 1024, torch.get_num_threads()
    small = replace(detect(), cpu=Cpu("test", l3_bytes=4 * half))
    torch.set_num_threads(1)
    try:
        measured = max(_copied_GBps(_bench("cpu", small, 0.05)) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    source = np.random.default_rng(0).standard_normal(half // 4, dtype=np.float32)
    target = np.zeros_like(source)
    took = min(timeit.repeat(lambda: np.multiply(source, np.float32(2.0), out=target), number=50, repeat=20)) / 50
    assert 0.25 < measured / (2 * source.nbytes / took / 1e9) < 4
