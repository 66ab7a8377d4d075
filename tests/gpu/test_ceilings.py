"""Measured ceilings of a GPU, as far as any card must agree, and against kernels and clocks of the tests' own."""

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tilewright.hardware.ceilings import measure_ceilings
from tilewright.hardware.datasheet import datasheet_of
from tilewright.launch import nvrtc

pytestmark = pytest.mark.gpu
SOURCE = Path(__file__).parent / "rates.cu"


@pytest.fixture(scope="module")
def values() -> dict[tuple[str, str], float]:
    return {(ceiling.kind, ceiling.dtype): ceiling.value for ceiling in measure_ceilings("cuda")}


def test_figures_stand_in_proportion(values: dict[tuple[str, str], float]) -> None:
    assert 50 < values["copy", "float32"] < 20_000
    assert values["cache", "float32"] > values["copy", "float32"]
    assert values["cache read", "float32"] > values["read", "float32"]
    assert values["cache read", "float32"] > values["cache write", "float32"]
    assert values["shared", "int32"] > values["cache read", "float32"]
    assert values["matmul", "float16"] > 2 * values["matmul", "float32"]
    assert values["matmul", "bfloat16"] > values["matmul", "tf32"] > values["matmul", "float32"]
    assert values["vector", "float32"] >= values["matmul", "float32"]
    assert values["launch in a graph", ""] < values["launch", ""] < 50
    assert 1 < values["host to device", ""] < 1000 and 1 < values["device to host", ""] < 1000
    assert ("first touch", "float32") not in values


def test_nothing_beats_the_datasheet(values: dict[tuple[str, str], float]) -> None:
    datasheet = datasheet_of(torch.cuda.get_device_name())
    if datasheet is None or datasheet.shared_GBps is None:
        pytest.skip(f"no datasheet of {torch.cuda.get_device_name()}")
    for kind in ("copy", "read", "write"):
        assert 0.5 * datasheet.dram_GBps < values[kind, "float32"] <= datasheet.dram_GBps
    for dtype in ("bfloat16", "float16", "tf32", "float32"):
        assert values["matmul", dtype] <= datasheet.matmul_TFLOPs[dtype]
    assert 0.8 * datasheet.vector_TFLOPs < values["vector", "float32"] <= datasheet.vector_TFLOPs
    assert 0.8 * datasheet.shared_GBps < values["shared", "int32"] <= datasheet.shared_GBps


def median_us(call: Callable[[], object]) -> float:
    """By events around each of nine calls, after two."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(11)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(float(start.elapsed_time(stop)) * 1e3 for start, stop in events[2:])


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def walked_GBps(reads: bool, writes: bool) -> float:
    """A block of 1024 threads a multiprocessor; 35 MB on an H200, of the 50 in its L2, 250 times less 50 times."""
    vectors = 8192 if reads and writes else 16384
    which = ("READS", int(reads)), ("WRITES", int(writes))
    walk = nvrtc.kernel(SOURCE, "walk", "PPqi", device=0, threads=1024, definitions=which)
    source = torch.randint(2**31, (multiprocessors() * vectors * 4,), dtype=torch.int32, device="cuda:0")
    target = torch.zeros_like(source)

    def walks(number: int) -> None:
        walk((multiprocessors(),), source.data_ptr(), target.data_ptr(), vectors, number)

    spent_us = median_us(lambda: walks(250)) - median_us(lambda: walks(50))
    if reads and writes:
        assert torch.equal(source, target)
    return 200 * (reads + writes) * source.nbytes / spent_us / 1e3


@pytest.mark.parametrize(("kind", "reads", "writes"), [("", 1, 1), (" read", 1, 0), (" write", 0, 1)])
def test_the_cache_gives_a_kernel_of_another_kind_as_much(
    values: dict[tuple[str, str], float], kind: str, reads: int, writes: int
) -> None:
    """No more, or the ceiling is none, and not much less, or nothing reaches it; from run to run a rate of an
    H200's L2 changes by 4 %."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    if multiprocessors() * 16384 * 16 > 0.6 * l2_bytes:
        pytest.skip(f"{multiprocessors()} blocks walk too much for an L2 of {l2_bytes} bytes")
    found = walked_GBps(bool(reads), bool(writes))
    assert 0.9 < found / values[f"cache{kind}", "float32"] < 1.05
    if torch.cuda.get_device_name() == "NVIDIA H200":
        # Of 132 programs, each was measured to draw 68 GB/s, to write 35, and to copy 62.
        assert found > 0.95 * 132 * {"": 62.0, " read": 68.0, " write": 35.0}[kind]


def test_multiply_adds_of_another_kernel_are_as_fast(values: dict[tuple[str, str], float]) -> None:
    blocks, turns = 8 * multiprocessors(), 400
    which = ("READS", 0), ("WRITES", 0)
    multiply_add = nvrtc.kernel(SOURCE, "multiply_add", "Pffi", device=0, threads=256, definitions=which)
    out = torch.zeros(blocks * 256, device="cuda:0")
    took_us = median_us(lambda: multiply_add((blocks,), out.data_ptr(), -1.0, 1.5, turns))
    # Even steps bring every chain back to where it began: 6 x thread + 0.1 x (0 + ... + 5).
    expected = 6.0 * torch.arange(256, device="cuda:0").repeat(blocks) + 1.5
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    TFLOPs = 2 * 6 * 64 * turns * out.numel() / took_us / 1e6
    assert 0.9 < TFLOPs / values["vector", "float32"] < 1.03
