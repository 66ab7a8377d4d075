"""The least time a kernel can take on a device, and the resource that bounds it."""

from __future__ import annotations

from typing import Literal

from tilewright.hardware.profiles import DeviceProfile

Bound = Literal["compute-bound", "DRAM-bound", "cache-bound", "launch-bound", "latency-bound"]


def floor_us(
    bytes: int,
    flops: int,
    transcendentals: int,
    dtype: str,
    working_set_bytes: int,
    profile: DeviceProfile,
    kind: str,
    *,
    bytes_written: int | None = None,
    programs: int | None = None,
) -> tuple[float, Bound]:
    """Floor in microseconds of one kernel, and its bound (the roofline of Williams, Waterman and
    Patterson, CACM 2009, with the launch and the number of programs as further limits).

    The floor is the largest of FLOPs over the matmul rate of `dtype` (`kind` "compute") or the vector
    rate (any other kind), transcendentals over theirs, and `bytes` over the bandwidth of the level
    that holds `working_set_bytes`: the last-level cache where that fits and its bandwidth is known,
    else DRAM. A CPU runs the launch first, so it is added; a GPU launches the next kernel behind this
    one, so a launch costs only what it exceeds the kernel by.

    With `bytes_written` (of `bytes`), the excess of reads over writes (or the reverse) moves at the read (write)
    bandwidth of DRAM, or of the cache where both are known; without it all bytes move at the copy
    bandwidth. `programs` is the number of independent programs of the kernel. If it is below the number of
    SMs (on a CPU, threads), the others idle: each program has one SM's share of the arithmetic rate, and the
    cache bandwidth that one SM was measured to draw; a kernel slowed by that is latency-bound.

    Dtypes without a matmul rate, such as integers, have the vector rate.
    """
    vector = profile.vector_TFLOPs
    rate = profile.matmul_TFLOPs.get(dtype, vector) if kind == "compute" else vector
    special = transcendentals * profile.flops_per_transcendental / (vector * 1e6)
    compute = max(flops / (rate * 1e6), special)
    cached = cache_us(bytes, bytes_written, profile) if working_set_bytes <= profile.l2_bytes else None
    memory = dram_us(bytes, bytes_written, profile) if cached is None else cached

    work = max(compute, memory)
    bound: Bound = "DRAM-bound" if cached is None else "cache-bound"
    if compute >= memory:
        bound = "compute-bound"
    if programs is not None and programs < profile.sms:
        busy = max(programs, 1)
        narrow = max(compute * profile.sms, one_sm_us(bytes, bytes_written, profile)) / busy
        if narrow > work:
            work, bound = narrow, "latency-bound"
    if profile.launch_us > work:
        bound = "launch-bound"
    if profile.device == "cpu":
        return work + profile.launch_us, bound
    return max(work, profile.launch_us), bound


def one_sm_us(nbytes: int, bytes_written: int | None, profile: DeviceProfile) -> float:
    """Time of one SM at the last-level cache, which reads while it writes; 0 if its rate was not measured."""
    read_GBps, write_GBps = profile.sm_read_GBps, profile.sm_write_GBps
    if read_GBps is None or write_GBps is None:
        return 0.0
    if bytes_written is None:
        return nbytes / ((read_GBps + write_GBps) * 1e3)
    return max((nbytes - bytes_written) / (read_GBps * 1e3), bytes_written / (write_GBps * 1e3))


def cache_us(nbytes: int, bytes_written: int | None, profile: DeviceProfile) -> float | None:
    """The longest of the times of reads, of writes, and of a copy of what is both: a cache reads while it writes."""
    if profile.l2_GBps is None:
        return None
    if bytes_written is None or profile.l2_read_GBps is None or profile.l2_write_GBps is None:
        return nbytes / (profile.l2_GBps * 1e3)
    bytes_read = nbytes - bytes_written
    copied = 2 * min(bytes_read, bytes_written)
    alone = max(bytes_read / profile.l2_read_GBps, bytes_written / profile.l2_write_GBps)
    return max(alone, copied / profile.l2_GBps) / 1e3


def dram_us(nbytes: int, bytes_written: int | None, profile: DeviceProfile) -> float:
    """Bytes both read and written move at the copy bandwidth, the rest at that of their direction."""
    if bytes_written is None:
        return nbytes / (profile.copy_GBps * 1e3)
    bytes_read = nbytes - bytes_written
    copied = 2 * min(bytes_read, bytes_written)
    one_way = profile.read_GBps if bytes_read > bytes_written else profile.write_GBps
    return copied / (profile.copy_GBps * 1e3) + (nbytes - copied) / (one_way * 1e3)
