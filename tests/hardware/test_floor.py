"""Floors computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile, profile_for

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
    origin="datasheet",
    sm_read_GBps=100.0,
    sm_write_GBps=50.0,
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
    nbytes: int, flops: int, special: int, dtype: str, working_set: int, kind: str, expected: float, bound: str
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


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # Of 60 MB in L2, copied at 5000: all read at 6000; all written at 4000; half and half at 5000, where each
        # way alone would take 5 and 7.5 µs; 40 read and 20 written: 40 copied; 50 and 10: what is read, alone.
        (0, 10.0),
        (60_000_000, 15.0),
        (30_000_000, 12.0),
        (20_000_000, 8.0),
        (10_000_000, 50 / 6),
        (None, 12.0),
    ],
)
def test_a_cache_reads_while_it_writes(written: int | None, expected: float) -> None:
    both = replace(GPU, l2_read_GBps=6000.0, l2_write_GBps=4000.0)
    got = floor_us(60_000_000, 0, 0, "float32", 4_000_000, both, "pointwise", bytes_written=written)
    assert_floor(got, expected, "cache-bound")
    assert floor_us(60_000_000, 0, 0, "float32", 4_000_000, GPU, "pointwise", bytes_written=written)[0] == 12.0


def test_unknown_cache_bandwidth_leaves_dram() -> None:
    blind = replace(GPU, l2_GBps=None)
    assert_floor(floor_us(40_000_000, 0, 0, "float32", 1000, blind, "pointwise"), 40.0, "DRAM-bound")


@pytest.mark.parametrize(
    ("programs", "written", "expected", "bound"),
    [
        # 100 MB take 100 µs from DRAM, 80 if all is read. One SM reads them in 1000 µs, or half in 500 while it
        # writes the other half in 1000; where nobody says which half, both at once take 667.
        (1, 0, 1000.0, "latency-bound"),
        (1, 50_000_000, 1000.0, "latency-bound"),
        (1, None, 1e5 / 150, "latency-bound"),
        (0, None, 1e5 / 150, "latency-bound"),
        (8, 50_000_000, 125.0, "latency-bound"),
        # Ten draw as much as DRAM gives, and so do all that follow.
        (10, 50_000_000, 100.0, "DRAM-bound"),
        (20, 0, 80.0, "DRAM-bound"),
        (10_000, None, 100.0, "DRAM-bound"),
    ],
)
def test_few_programs_draw_what_few_sms_draw(programs: int, written: int | None, expected: float, bound: str) -> None:
    got = floor_us(100_000_000, 0, 0, "float32", MANY, GPU, "reduction", bytes_written=written, programs=programs)
    assert_floor(got, expected, bound)


@pytest.mark.parametrize(
    ("programs", "read", "copied", "written"),
    [
        (1, 224.5, 97.9, 62.9),
        (4, 222.2, 97.7, 63.1),
        (8, 158.1, 97.5, 62.8),
        (16, 137.0, 97.8, 62.8),
        (33, 104.8, 97.9, 61.0),
    ],
)
def test_no_floor_of_few_programs_is_above_what_an_h200_took(
    programs: int, read: float, copied: float, written: float
) -> None:
    """Programs of 1024 threads that walk 512 KiB of their own, in L2: GB/s that each was measured to move."""
    h200, nbytes = profile_for("h200"), 1_000_000_000
    for rate, of_these in ((read, 0), (copied, nbytes // 2), (written, nbytes)):
        took_us = nbytes / (rate * programs * 1e3)
        floor, _ = floor_us(
            nbytes, 0, 0, "float32", programs << 19, h200, "pointwise", bytes_written=of_these, programs=programs
        )
        assert 0.46 * took_us <= floor <= took_us, of_these


@pytest.mark.parametrize(
    ("GBps", "written"),
    # Of three bytes moved, so many were written.
    [(9073, 0), (9113, 0), (8235, 1.5), (8120, 1.5), (4874, 3), (10787, 1), (10858, 1)],
)
def test_no_floor_in_l2_is_above_what_an_h200_took(GBps: float, written: float) -> None:
    """Kernels on all multiprocessors that stay in L2, one way, both ways, and two read for one written."""
    h200, nbytes = profile_for("h200"), 30_000_000
    of_these = round(nbytes * written / 3)
    floor, bound = floor_us(nbytes, 0, 0, "float32", nbytes, h200, "pointwise", bytes_written=of_these, programs=132)
    # Rates of one kernel differ by 2 % from run to run.
    assert bound == "cache-bound" and 0.85 < floor / (nbytes / GBps / 1e3) < 1.02


def test_where_nobody_measured_an_sm_few_programs_still_compute_alone() -> None:
    a100 = profile_for("a100")
    assert a100.sm_read_GBps is None
    few, many = (
        floor_us(100_000_000, flops, 0, "float32", MANY, a100, "reduction", programs=1) for flops in (0, 10**9)
    )
    assert few[1] == "DRAM-bound"
    assert_floor(many, 10**9 / (19.5e6 / 108), "latency-bound")


def test_a_single_program_computes_at_the_rate_of_one_sm() -> None:
    got = floor_us(1000, 100_000_000, 0, "float32", 1000, GPU, "reduction", programs=1)
    assert_floor(got, 1000.0, "latency-bound")
    assert floor_us(8, 8, 0, "float32", 8, GPU, "reduction", programs=1)[1] == "launch-bound"
