"""Floors computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile

# Round figures: 1000 GB/s is 1e3 bytes a µs per unit, 100 TFLOP/s is 1e8 FLOPs a µs.
GPU = DeviceProfile(
    name="toy",
    device="cuda",
    copy_GBps=1000.0,
    read_GBps=1250.0,
    write_GBps=2000.0,
    l2_GBps=5000.0,
    l2_bytes=10_000_000,
    matmul_TFLOPs={"bfloat16": 100.0, "float32": 10.0},
    vector_TFLOPs=10.0,
    flops_per_transcendental=16,
    launch_us=2.0,
    sms=100,
    max_threads_per_sm=2048,
    registers_per_sm=65536,
    shared_bytes_per_sm=228 * 1024,
    origin="datasheet",
)
CPU = replace(GPU, device="cpu", sms=2)
MANY = 1_000_000_000


def assert_floor(got: tuple[float, str], expected: float, bound: str) -> None:
    assert got[0] == pytest.approx(expected)
    assert got[1] == bound


@pytest.mark.parametrize(
    ("nbytes", "flops", "special", "dtype", "working_set", "kind", "expected", "bound"),
    [
        # 100 MB at 1000 GB/s; 1e8 FLOPs at 10 TFLOP/s take 10 µs.
        (100_000_000, 100_000_000, 0, "float32", MANY, "pointwise", 100.0, "DRAM-bound"),
        # 4 MB within 10 MB of L2, at 5000 GB/s: under launch at 0.8 µs, above it with 40 MB moved.
        (40_000_000, 0, 0, "float32", 4_000_000, "pointwise", 8.0, "cache-bound"),
        (4_000_000, 0, 0, "float32", 4_000_000, "pointwise", 2.0, "launch-bound"),
        # The same product: 1e10 FLOPs at 100, at 10 (fp32), and at the vector rate outside a matmul.
        (1000, 10_000_000_000, 0, "bfloat16", 1000, "compute", 100.0, "compute-bound"),
        (1000, 10_000_000_000, 0, "float32", 1000, "compute", 1000.0, "compute-bound"),
        (1000, 10_000_000_000, 0, "bfloat16", 1000, "pointwise", 1000.0, "compute-bound"),
        # No matmul unit takes int64.
        (1000, 10_000_000_000, 0, "int64", 1000, "compute", 1000.0, "compute-bound"),
        # 1e8 exponentials of 16 FLOPs each at 10 TFLOP/s.
        (1000, 1_000_000, 100_000_000, "float32", 1000, "pointwise", 160.0, "compute-bound"),
        # Exactly the size of L2 still fits; one byte more does not.
        (50_000_000, 0, 0, "float32", 10_000_000, "reduction", 10.0, "cache-bound"),
        (50_000_000, 0, 0, "float32", 10_000_001, "reduction", 50.0, "DRAM-bound"),
        (0, 0, 0, "float32", 0, "pointwise", 2.0, "launch-bound"),
    ],
)
def test_by_hand(
    nbytes: int,
    flops: int,
    special: int,
    dtype: str,
    working_set: int,
    kind: str,
    expected: float,
    bound: str,
) -> None:
    assert_floor(floor_us(nbytes, flops, special, dtype, working_set, GPU, kind), expected, bound)


def test_a_cpu_adds_the_launch_that_a_gpu_hides() -> None:
    work = (100_000_000, 0, 0, "float32", MANY)
    assert_floor(floor_us(*work, GPU, "pointwise"), 100.0, "DRAM-bound")
    assert_floor(floor_us(*work, CPU, "pointwise"), 102.0, "DRAM-bound")
    assert_floor(floor_us(1_000_000, 0, 0, "float32", MANY, CPU, "pointwise"), 3.0, "launch-bound")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # Of 100 MB: all read at 1250, all written at 2000, half and half copied at 1000,
        # 80 read and 20 written: 40 copied and 60 read; 20 read and 80 written: 40 copied and 60 written.
        (0, 80.0),
        (100_000_000, 50.0),
        (50_000_000, 100.0),
        (20_000_000, 40.0 + 48.0),
        (80_000_000, 40.0 + 30.0),
        (None, 100.0),
    ],
)
def test_one_way_traffic_moves_at_its_own_bandwidth(written: int | None, expected: float) -> None:
    got = floor_us(100_000_000, 0, 0, "float32", MANY, GPU, "reduction", bytes_written=written)
    assert_floor(got, expected, "DRAM-bound")


def test_unknown_cache_bandwidth_leaves_dram() -> None:
    blind = replace(GPU, l2_GBps=None)
    assert_floor(floor_us(40_000_000, 0, 0, "float32", 1000, blind, "pointwise"), 40.0, "DRAM-bound")


@pytest.mark.parametrize(
    ("programs", "expected", "bound"),
    [
        # 100 MB from DRAM take 100 µs. Ten of 100 SMs pull a tenth of 5000 GB/s: 200 µs.
        (10, 200.0, "latency-bound"),
        (1, 2000.0, "latency-bound"),
        # Twenty pull 1000 GB/s, as much as DRAM gives.
        (20, 100.0, "DRAM-bound"),
        (100, 100.0, "DRAM-bound"),
        (10_000, 100.0, "DRAM-bound"),
    ],
)
def test_too_few_programs_leave_the_device_idle(programs: int, expected: float, bound: str) -> None:
    got = floor_us(100_000_000, 0, 0, "float32", MANY, GPU, "reduction", programs=programs)
    assert_floor(got, expected, bound)


def test_a_single_program_computes_at_the_rate_of_one_sm() -> None:
    got = floor_us(1000, 100_000_000, 0, "float32", 1000, GPU, "reduction", programs=1)
    assert_floor(got, 1000.0, "latency-bound")
    assert floor_us(8, 8, 0, "float32", 8, GPU, "reduction", programs=1)[1] == "launch-bound"
