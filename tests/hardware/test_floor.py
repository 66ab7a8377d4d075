"""Floors computed by hand."""

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
TWO_WAYS = replace(GPU, l2_read_GBps=6000.0, l2_write_GBps=4000.0)
NO_CACHE = replace(GPU, l2_GBps=None)
NO_SM = replace(GPU, sm_read_GBps=None, sm_write_GBps=None)
MB, IN_L2, BEYOND_L2 = 1_000_000, 4_000_000, 1_000_000_000


def floor(
    nbytes: int,
    flops: int = 0,
    special: int = 0,
    dtype: str = "float32",
    kind: str = "pointwise",
    working_set: int = BEYOND_L2,
    on: DeviceProfile = GPU,
    **more: int | None,
) -> tuple[float, str]:
    return floor_us(nbytes, flops, special, dtype, working_set, on, kind, **more)


DRAM = [
    # At 1000 GB/s; 1e8 FLOPs at 10 TFLOP/s take 10 µs.
    (floor(100 * MB, 10**8), 100.0, "DRAM-bound"),
    # What a GPU hides of the launch a CPU adds.
    (floor(100 * MB, on=CPU), 102.0, "DRAM-bound"),
    (floor(1 * MB, on=CPU), 3.0, "launch-bound"),
    (floor(0, working_set=0), 2.0, "launch-bound"),
    # All read at 1250, all written at 2000, half and half copied at 1000, 80 read and 20 written: 40 copied and 60
    # read; 20 read and 80 written: 40 copied and 60 written.
    (floor(100 * MB, bytes_written=0), 80.0, "DRAM-bound"),
    (floor(100 * MB, bytes_written=100 * MB), 50.0, "DRAM-bound"),
    (floor(100 * MB, bytes_written=50 * MB), 100.0, "DRAM-bound"),
    (floor(100 * MB, bytes_written=20 * MB), 40.0 + 48.0, "DRAM-bound"),
    (floor(100 * MB, bytes_written=80 * MB), 40.0 + 30.0, "DRAM-bound"),
]
CACHE = [
    # Within 10 MB of L2, at 5000 GB/s: 4 MB take less than the launch.
    (floor(40 * MB, working_set=IN_L2), 8.0, "cache-bound"),
    (floor(4 * MB, working_set=IN_L2), 2.0, "launch-bound"),
    # Exactly the size of L2 still fits; one byte more does not. Without a rate of the cache nothing is in it.
    (floor(50 * MB, working_set=10 * MB), 10.0, "cache-bound"),
    (floor(50 * MB, working_set=10 * MB + 1), 50.0, "DRAM-bound"),
    (floor(40 * MB, working_set=1000, on=NO_CACHE), 40.0, "DRAM-bound"),
    # 60 MB, copied at 5000: all read at 6000; all written at 4000; half and half at 5000, where each way alone would
    # take 5 and 7.5 µs; 40 read and 20 written: 40 copied; 50 and 10: what is read, alone.
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS, bytes_written=0), 10.0, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS, bytes_written=60 * MB), 15.0, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS, bytes_written=30 * MB), 12.0, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS, bytes_written=20 * MB), 8.0, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS, bytes_written=10 * MB), 50 / 6, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, on=TWO_WAYS), 12.0, "cache-bound"),
    (floor(60 * MB, working_set=IN_L2, bytes_written=0), 12.0, "cache-bound"),
]
ARITHMETIC = [
    # 1e10 FLOPs of a product at 100, at 10 (fp32), and at the vector rate outside of one; no matrix unit takes int64.
    (floor(1000, 10**10, dtype="bfloat16", kind="compute", working_set=1000), 100.0, "compute-bound"),
    (floor(1000, 10**10, kind="compute", working_set=1000), 1000.0, "compute-bound"),
    (floor(1000, 10**10, dtype="bfloat16", working_set=1000), 1000.0, "compute-bound"),
    (floor(1000, 10**10, dtype="int64", kind="compute", working_set=1000), 1000.0, "compute-bound"),
    # 1e8 exponentials of 16 FLOPs each at 10 TFLOP/s.
    (floor(1000, 10**6, 10**8, working_set=1000), 160.0, "compute-bound"),
]
FEW_PROGRAMS = [
    # 100 MB take 100 µs from DRAM, 80 if all is read. One SM reads them in 1000 µs, or half in 500 while it writes the
    # other half in 1000; where nobody says which half, both at once take 667.
    (floor(100 * MB, bytes_written=0, programs=1), 1000.0, "latency-bound"),
    (floor(100 * MB, bytes_written=50 * MB, programs=1), 1000.0, "latency-bound"),
    (floor(100 * MB, programs=1), 1e5 / 150, "latency-bound"),
    (floor(100 * MB, programs=0), 1e5 / 150, "latency-bound"),
    (floor(100 * MB, bytes_written=50 * MB, programs=8), 125.0, "latency-bound"),
    # Ten draw as much as DRAM gives, and so do all that follow.
    (floor(100 * MB, bytes_written=50 * MB, programs=10), 100.0, "DRAM-bound"),
    (floor(100 * MB, bytes_written=0, programs=20), 80.0, "DRAM-bound"),
    (floor(100 * MB, programs=10_000), 100.0, "DRAM-bound"),
    # A single program computes at the rate of one SM of a hundred, also where nobody measured what one draws.
    (floor(1000, 10**8, working_set=1000, programs=1), 1000.0, "latency-bound"),
    (floor(8, 8, working_set=8, programs=1), 2.0, "launch-bound"),
    (floor(100 * MB, programs=1, on=NO_SM), 100.0, "DRAM-bound"),
    (floor(100 * MB, 10**8, programs=1, on=NO_SM), 1000.0, "latency-bound"),
]


@pytest.mark.parametrize(("found", "us", "bound"), DRAM + CACHE + ARITHMETIC + FEW_PROGRAMS)
def test_by_hand(found: tuple[float, str], us: float, bound: str) -> None:
    assert found == (pytest.approx(us), bound)


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
        found, _ = floor(nbytes, working_set=programs << 19, on=h200, bytes_written=of_these, programs=programs)
        assert 0.46 * took_us <= found <= took_us, of_these


@pytest.mark.parametrize(
    ("GBps", "written"),
    # Of three bytes moved, so many were written.
    [(9073, 0), (9113, 0), (8235, 1.5), (8120, 1.5), (4874, 3), (10787, 1), (10858, 1)],
)
def test_no_floor_in_l2_is_above_what_an_h200_took(GBps: float, written: float) -> None:
    """Kernels on all multiprocessors that stay in L2, one way, both ways, and two read for one written."""
    h200, nbytes = profile_for("h200"), 30_000_000
    of_these = round(nbytes * written / 3)
    found, bound = floor(nbytes, working_set=nbytes, on=h200, bytes_written=of_these, programs=132)
    # Rates of one kernel differ by 2 % from run to run.
    assert bound == "cache-bound" and 0.85 < found / (nbytes / GBps / 1e3) < 1.02
