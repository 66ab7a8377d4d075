"""The ceilings of devices from which floors are computed: of datasheets, or measured on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from tilewright.hardware import kernel_times
from tilewright.hardware.architectures import DeviceLimits, architecture, known, stated_limits
from tilewright.hardware.datasheet import DATASHEETS
from tilewright.hardware.detect import idle_cpus
from tilewright.hardware.kernel_times import KernelTimes
from tilewright.records.errors import CacheError, UsageError, warn_once
from tilewright.records.measurement import BUSY, Ceiling, Origin

if TYPE_CHECKING:
    from tilewright.hardware.detect import Gpu, Machine

KIB = 1024
MIB = 1024**2


@dataclass(frozen=True)
class DeviceProfile:
    """The ceilings of one device. GB/s count bytes read plus bytes written, 10⁹ each."""

    name: str
    device: Literal["cpu", "cuda"]
    copy_GBps: float
    read_GBps: float
    write_GBps: float
    l2_GBps: float | None
    """Copy within the last-level cache; None if neither measured nor stated."""
    l2_bytes: int
    """Last-level cache; 0 where unknown, so that nothing is taken to fit."""
    matmul_TFLOPs: Mapping[str, float]
    """By dtype, as PyTorch names it: `float32`, `bfloat16`, ..."""
    vector_TFLOPs: float
    """fp32 multiply-adds outside matrix units."""
    flops_per_transcendental: int
    """Vector FLOPs that pass in the time of one exponential, logarithm, tanh or the like."""
    launch_us: float
    sms: int
    """Streaming multiprocessors; on a CPU the hardware threads."""
    origin: Origin
    sm_read_GBps: float | None = None
    """Reads of one SM from the last-level cache while few others read; None if not measured."""
    sm_write_GBps: float | None = None
    """Writes of one SM into the last-level cache."""
    capability: str | None = None
    """Compute capability of a GPU, `9.0`."""
    l2_read_GBps: float | None = None
    """Reads from the last-level cache; None if only copies were measured."""
    l2_write_GBps: float | None = None
    """Writes into the last-level cache."""
    kernel_times: KernelTimes = field(default_factory=dict)
    """Coefficients that predict the times of kernels, by kind."""
    timed_on: str | None = None
    """Compute capability of the GPU on which they were fitted; None on a CPU."""

    @property
    def is_timed(self) -> bool:
        """Whether kernels were timed on such a device."""
        return self.timed_on == self.capability

    @property
    def generation(self) -> int:
        """The major compute capability; 0 for a CPU and for an AMD GPU."""
        row = known(self.capability)
        return int(row.capability.split(".")[0]) if row is not None and row.cuda else 0

    @property
    def limits(self) -> DeviceLimits | None:
        """The device's limits by the table of architectures; None on a CPU, or if the table lacks the architecture."""
        row = known(self.capability)
        return None if row is None else stated_limits(row.capability, self.sms, self.l2_bytes)


# No datasheet states a launch. Back to back, a small kernel of a GPU queue costs about 2 µs on all of these.
_GPU_LAUNCH_US = 2.0


def _stated(
    name: str, driver_name: str, capability: str, *, l2_bytes: int, l2_GBps: float | None = None, **matmul: float
) -> DeviceProfile:
    """A GPU's profile: its datasheet, and figures that the datasheet lacks; `matmul` in TFLOP/s by dtype."""
    sheet = DATASHEETS[driver_name]
    return DeviceProfile(
        name=name,
        device="cuda",
        copy_GBps=sheet.dram_GBps,
        read_GBps=sheet.dram_GBps,
        write_GBps=sheet.dram_GBps,
        l2_GBps=l2_GBps,
        l2_bytes=l2_bytes,
        matmul_TFLOPs={**sheet.matmul_TFLOPs, **matmul},
        vector_TFLOPs=sheet.vector_TFLOPs,
        flops_per_transcendental=architecture(capability).flops_per_transcendental,
        launch_us=_GPU_LAUNCH_US,
        sms=sheet.sms,
        origin="datasheet",
        capability=capability,
    )


_PROFILED = (
    DeviceProfile(
        name="h200",
        device="cuda",
        # Measured on an H200 SXM (torch 2.11, CUDA 13.0), 4 GiB buffers, medians, L2 flushed.
        copy_GBps=4255.0,
        read_GBps=4426.0,
        write_GBps=4680.0,
        # `tilewright doctor`, kernels that stay in L2: 8.0 to 8.2 TB/s copied, 9.2 read, 4.8 written.
        l2_GBps=8150.0,
        l2_read_GBps=9240.0,
        l2_write_GBps=4820.0,
        # What PyTorch reports; NVIDIA's "H100 Tensor Core GPU Architecture" gives 50 MB for the same chip.
        l2_bytes=60 * MIB,
        # `tilewright doctor`, cuBLAS at 4096 and 8192, the best of three runs: bf16 reached 782 to 815.
        matmul_TFLOPs={
            "bfloat16": 815.0,
            "float32": 51.3,
            "float16": 773.0,
            "tf32": 405.0,
            # NVIDIA H200 datasheet: FP64 Tensor Core.
            "float64": 67.0,
        },
        # `tilewright doctor`: multiply-adds alone, on all multiprocessors.
        vector_TFLOPs=66.2,
        # 128 multiply-adds and 16 special functions per SM and cycle ("H100 ... Architecture").
        flops_per_transcendental=16,
        # `tilewright doctor`: small operators replayed from one CUDA graph, 0.84 to 0.93 in three runs.
        launch_us=0.84,
        # "NVIDIA H100 Tensor Core GPU Architecture", table of the SXM5 part.
        sms=132,
        origin="measured",
        # One program of 1024 threads, which walks 1 MiB of its own: 113 and 32 bytes a cycle of 1.98 GHz. Where 33
        # read, each draws 106 GB/s; a copy moves 98 however many do.
        sm_read_GBps=225.0,
        sm_write_GBps=63.7,
        capability="9.0",
    ),
    # "NVIDIA H100 Tensor Core GPU Architecture": L2 of 50 MB.
    _stated("h100", "NVIDIA H100 80GB HBM3", "9.0", l2_bytes=50 * MIB),
    # "NVIDIA Blackwell Architecture Technical Brief"; SMs and L2 as CUDA reports them.
    _stated("b200", "NVIDIA B200", "10.0", l2_bytes=126 * MIB),
    # "NVIDIA A100 Tensor Core GPU Architecture": L2 of 40 MB, 5120 bytes per cycle, at 1410 MHz boost.
    _stated("a100", "NVIDIA A100-SXM4-80GB", "8.0", l2_bytes=40 * MIB, l2_GBps=7219.0),
    # "NVIDIA Ada GPU Architecture": L2 of 98304 KB in the L40S, of 73728 KB in the RTX 4090.
    _stated("l40s", "NVIDIA L40S", "8.9", l2_bytes=96 * MIB),
    _stated("rtx4090", "NVIDIA GeForce RTX 4090", "8.9", l2_bytes=72 * MIB),
    # "NVIDIA RTX Blackwell GPU Architecture": L2 of 98304 KB.
    _stated("rtx5090", "NVIDIA GeForce RTX 5090", "12.0", l2_bytes=96 * MIB),
    # "AMD CDNA 3 Architecture": Infinity Cache of 256 MB, at most 17.2 TB/s.
    _stated("mi300x", "AMD Instinct MI300X", "gfx942", l2_bytes=256 * MIB, l2_GBps=17200.0),
    # "AMD CDNA 2 Architecture": L2 of 8 MB in each die.
    _stated("mi250", "AMD Instinct MI250", "gfx90a", l2_bytes=8 * MIB),
    # "AMD CDNA 4 Architecture": Infinity Cache of 256 MB.
    _stated("mi355x", "AMD Instinct MI355X", "gfx950", l2_bytes=256 * MIB),
    # "NVIDIA Turing GPU Architecture": L2 of 5632 KB. bf16 has no matrix unit: at best it runs at the fp32 rate.
    _stated("2080ti", "NVIDIA GeForce RTX 2080 Ti", "7.5", l2_bytes=5632 * KIB, bfloat16=13.4),
    DeviceProfile(
        name="cpu",
        device="cpu",
        # A desktop with two channels of DDR5-5600 (JEDEC JESD79-5: 2 × 8 bytes × 5600 MT/s).
        copy_GBps=89.6,
        read_GBps=89.6,
        write_GBps=89.6,
        l2_GBps=None,
        # 32 MB of L3, as in AMD's Ryzen 7 7700 and 9700X.
        l2_bytes=32 * MIB,
        # 8 cores × 2 AVX2 multiply-add units × 8 lanes × 2 FLOPs × 4.5 GHz; bf16 and fp16 widen to fp32.
        matmul_TFLOPs={"float32": 1.15, "float64": 0.576, "bfloat16": 1.15, "float16": 1.15},
        vector_TFLOPs=1.15,
        # A polynomial of about eight multiply-adds: there is no special unit.
        flops_per_transcendental=16,
        # No datasheet states it: dispatch of a small PyTorch operator takes about a microsecond.
        launch_us=1.0,
        sms=8,
        origin="datasheet",
    ),
)
_TIMED: dict[str, Any] = {"kernel_times": kernel_times.H200, "timed_on": "9.0"}
_PROFILES = tuple(replace(one, **_TIMED) if one.device == "cuda" else one for one in _PROFILED)
_BY_NAME = {profile.name: profile for profile in _PROFILES}


def profile_names() -> tuple[str, ...]:
    """The names that `profile_for` takes."""
    return tuple(_BY_NAME)


def profile_of_driver(name: str) -> DeviceProfile | None:
    """The profile of a GPU by the name that its driver gives; None for one that is not known.

    >>> profile_of_driver("NVIDIA H100 80GB HBM3").name, profile_of_driver("AMD Instinct MI300X").name
    ('h100', 'mi300x')
    """
    plain = name.lower().replace(" ", "")
    return next((one for one in _PROFILES if one.device == "cuda" and one.name in plain), None)


def profile_for(name: str) -> DeviceProfile:
    """The profile of that name (upper or lower case); UsageError lists the known ones.

    >>> profile_for("a100").copy_GBps
    2039.0
    """
    profile = _BY_NAME.get(name.lower())
    if profile is None:
        raise UsageError(f"no profile of a device named {name!r}; known: {', '.join(_BY_NAME)}")
    return profile


def local_profile(refresh: bool = False, device: str | None = None) -> DeviceProfile:
    """This machine as `local_ceilings` found it: its first GPU if it has one, else its CPU."""
    return measured_profile(*local_ceilings(refresh, device))


def kept_profile(device: str) -> DeviceProfile:
    """`cpu`, `cuda` or `cuda:N` of this machine without measuring: by kept ceilings, else by a datasheet.

    The datasheet is that of the GPU's name, else of its compute capability or the one below it nearest to that; of
    a CPU, and of any other device, the desktop's.
    """
    import torch

    from tilewright.hardware import ceilings
    from tilewright.hardware.detect import detect

    machine = detect()
    is_gpu = device.startswith("cuda")
    # PyTorch numbers the devices that a program may use, which are not all that there are.
    name = torch.cuda.get_device_name(device) if is_gpu else ceilings.device_name(machine, "cpu")
    if kept := ceilings.kept_ceilings(name):
        return measured_profile(machine, kept)
    if not is_gpu:
        return profile_for("cpu")
    return nearest_profile(name, ".".join(map(str, torch.cuda.get_device_capability(device))))


def nearest_profile(name: str, capability: str) -> DeviceProfile:
    """The datasheet of a GPU by its name, else the newest that is not newer than it, with its own capability.

    >>> nearest_profile("NVIDIA H200", "9.0").name, nearest_profile("NVIDIA A10G", "8.6").name
    ('h200', 'a100')
    """
    gpus = [profile for profile in _PROFILES if profile.device == "cuda"]
    words = name.lower().replace(" ", "")
    if named := [profile for profile in gpus if profile.name in words]:
        return named[0]
    known = sorted((one for one in gpus if one.generation), key=lambda profile: _version(profile.capability))
    older = [profile for profile in known if _version(profile.capability) <= _version(capability)]
    return replace((older or known[:1])[-1], capability=capability)


def _version(capability: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in (capability or "0.0").split("."))


def local_ceilings(refresh: bool = False, device: str | None = None) -> tuple[Machine, list[Ceiling]]:
    """This machine, and the ceilings of its first GPU if it has one, else (or with `device="cpu"`) of its CPU.

    Ceilings kept from an earlier run are used; without them, or with `refresh`, they are measured
    (seconds) and kept. Where they cannot be kept, a warning says why; where other programs use the CPU that
    is measured, a line on standard error says so, and faster ones that were kept stay.
    """
    import torch

    from tilewright.hardware import ceilings
    from tilewright.hardware.detect import detect

    machine = detect()
    chosen = device or ("cuda" if machine.gpus and torch.cuda.is_available() else "cpu")
    name = ceilings.device_name(machine, chosen)
    kept = ceilings.kept_ceilings(name)
    measured = None if refresh else kept
    if measured is None:
        busy = chosen == "cpu" and _is_busy(machine)
        measured = ceilings.measure_ceilings(chosen, machine=machine)
        if busy:
            measured = [replace(ceiling, origin=BUSY) for ceiling in measured]
        if busy and kept:
            measured = list(_faster(kept, measured).values())
        try:
            ceilings.keep_ceilings(measured)
        except CacheError as error:
            warnings.warn(f"{error}; they will be measured again next time", stacklevel=2)
    return machine, measured


HIGHER = 1.1
"""Factor by which a ceiling that is measured again must be higher, or a launch shorter, to replace the one kept."""


def remeasured_profile(device: str) -> DeviceProfile | None:
    """The profile of `cpu`, `cuda` or `cuda:N` after measuring again, for a run that beat its floor; None where no
    ceiling is higher than the one kept.

    Of both figures the faster one is kept from now on: other programs slow a device down, and nothing makes it faster.
    """
    from tilewright.hardware import ceilings
    from tilewright.hardware.detect import detect

    machine = detect()
    kept = ceilings.kept_ceilings(ceilings.device_name(machine, device)) or []
    best, before = _faster(kept, ceilings.measure_ceilings(device, machine=machine)), _by_kind(kept)
    if all(key in before and _times_faster(one, before[key]) < HIGHER for key, one in best.items()):
        return None
    ceilings.keep_ceilings(list(best.values()))
    return measured_profile(machine, list(best.values()))


def _by_kind(ceilings: Iterable[Ceiling]) -> dict[tuple[str, str], Ceiling]:
    return {(one.kind, one.dtype): one for one in ceilings}


def _faster(kept: Iterable[Ceiling], measured: Iterable[Ceiling]) -> dict[tuple[str, str], Ceiling]:
    """Of both measurements the faster one of each kind, in the order of `kept`."""
    before = _by_kind(kept)
    new = _by_kind(measured).items()
    return before | {key: one for key, one in new if key not in before or _times_faster(one, before[key]) > 1}


def _times_faster(one: Ceiling, other: Ceiling) -> float:
    return other.value / one.value if one.unit == "us" else one.value / other.value


BUSY_CPUS = 0.3
"""CPUs in use from which measurements come out too low."""


def _is_busy(machine: Machine) -> bool:
    """Whether other programs use CPUs that are to be measured; a line says so."""
    threads = machine.cpu.threads or 1
    missing = threads - idle_cpus()
    if missing < BUSY_CPUS:
        return False
    warn_once(
        f"other programs use {missing:.1f} of {threads} CPU threads: ceilings measured now come out too low; "
        "`tilewright doctor --refresh` measures them again, best when the machine is idle"
    )
    return True


def measured_profile(machine: Machine, ceilings: list[Ceiling]) -> DeviceProfile:
    """A profile out of the measured ceilings of one device of `machine`.

    UsageError if one of copy, read, write, vector, launch is missing.
    """
    from tilewright.hardware.ceilings import kept_kernel_times

    values = {(ceiling.kind, ceiling.dtype): ceiling.value for ceiling in ceilings}
    by_kind = {ceiling.kind: ceiling.value for ceiling in ceilings}
    missing = {"copy", "read", "write", "vector", "launch"} - by_kind.keys()
    if missing:
        raise UsageError(f"measured ceilings lack {', '.join(sorted(missing))}; measure them again")
    name = ceilings[0].device
    gpu = next((gpu for gpu in machine.gpus if gpu.name == name), None)
    return DeviceProfile(
        name=name,
        device="cuda" if gpu else "cpu",
        copy_GBps=by_kind["copy"],
        read_GBps=by_kind["read"],
        write_GBps=by_kind["write"],
        l2_GBps=by_kind.get("cache"),
        l2_read_GBps=by_kind.get("cache read"),
        l2_write_GBps=by_kind.get("cache write"),
        l2_bytes=(gpu.l2_bytes if gpu else machine.cpu.last_level_bytes) or 0,
        matmul_TFLOPs={dtype: value for (kind, dtype), value in values.items() if kind == "matmul"},
        vector_TFLOPs=by_kind["vector"],
        flops_per_transcendental=_flops_per_transcendental(gpu),
        # Replayed from a CUDA graph, a launch is without the host's share; a floor must not exceed that.
        launch_us=by_kind.get("launch in a graph", by_kind["launch"]),
        sms=(gpu.sms if gpu else machine.cpu.threads) or 1,
        origin=BUSY if any(ceiling.origin == BUSY for ceiling in ceilings) else "measured",
        capability=gpu.capability if gpu else None,
        # Kinds of kernels that were not timed here keep an H200's shares of the ceilings.
        kernel_times={**(kernel_times.H200 if gpu else {}), **(own := kept_kernel_times(name))},
        timed_on=(gpu.capability if own else "9.0") if gpu else None,
    )


def _flops_per_transcendental(gpu: Gpu | None) -> int:
    """By the table of architectures; as on the newest ones on a GPU that it lacks. A CPU computes a polynomial of
    about eight multiply-adds.
    """
    found = known(gpu.capability) if gpu else None
    return found.flops_per_transcendental if found else 16
