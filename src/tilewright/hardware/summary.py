"""The machine as rows that a person reads."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.hardware.detect import Gpu, Machine
from tilewright.hardware.profiles import DeviceProfile
from tilewright.records.measurement import Ceiling

UNKNOWN = "unknown"


def machine_report(
    machine: Machine, ceilings: Sequence[Ceiling], profile: DeviceProfile | None
) -> list[tuple[str, str]]:
    """Rows (label, value): the machine, then each ceiling, beside what `profile` says of the same.

    `profile` is the shipped profile of this very device (`shipped_profile`), or None if there is none.
    """
    cpu = machine.cpu
    rows = [
        ("CPU", cpu.model or UNKNOWN),
        ("cores", f"{_count(cpu.cores)} ({_count(cpu.threads)} threads)"),
        ("instruction set", " ".join(cpu.isa) if cpu.isa else UNKNOWN),
        ("caches of a core", f"L1 {_size(cpu.l1_bytes)}, L2 {_size(cpu.l2_bytes)}"),
        ("L3", _size(cpu.l3_bytes)),
        ("memory", _size(machine.ram_bytes)),
        *(row for gpu in machine.gpus for row in _gpu_rows(gpu)),
    ]
    if not machine.gpus:
        rows.append(("GPU", "none"))
    else:
        rows.append(("driver", f"{machine.driver or UNKNOWN}, up to CUDA {machine.driver_cuda or UNKNOWN}"))
    rows += [
        ("OS", machine.os or UNKNOWN),
        ("kernel", machine.kernel or UNKNOWN),
        ("Python", machine.python),
        ("PyTorch", f"{machine.torch or 'none'} ({f'CUDA {machine.cuda}' if machine.cuda else 'no CUDA'})"),
        ("Triton", machine.triton or "none"),
    ]
    return rows + [_ceiling_row(ceiling, profile) for ceiling in ceilings]


def _gpu_rows(gpu: Gpu) -> list[tuple[str, str]]:
    return [
        ("GPU", gpu.name),
        ("GPU memory", f"{_size(gpu.memory_bytes)}, L2 {_size(gpu.l2_bytes)}"),
        ("SMs", f"{_count(gpu.sms)}, compute capability {gpu.capability or UNKNOWN}"),
        ("link", gpu.pcie or UNKNOWN),
    ]


def _ceiling_row(ceiling: Ceiling, profile: DeviceProfile | None) -> tuple[str, str]:
    label = f"{ceiling.kind} {ceiling.dtype}".strip()
    unit = "µs" if ceiling.unit == "us" else ceiling.unit
    value = f"{ceiling.value:.4g} {unit} {ceiling.origin}"
    stated = _stated(ceiling, profile) if profile else None
    if profile is None or stated is None:
        return label, value
    return label, f"{value}; {profile.name} profile ({profile.origin}) {stated:.4g} {unit}"


def _stated(ceiling: Ceiling, profile: DeviceProfile) -> float | None:
    if ceiling.kind == "matmul":
        return profile.matmul_TFLOPs.get(ceiling.dtype)
    return {
        "copy": profile.copy_GBps,
        "read": profile.read_GBps,
        "write": profile.write_GBps,
        "cache": profile.l2_GBps,
        "vector": profile.vector_TFLOPs,
        "launch": profile.launch_us,
        "first touch": profile.first_touch_GBps,
    }.get(ceiling.kind)


def _count(number: int | None) -> str:
    return UNKNOWN if number is None else str(number)


def _size(nbytes: int | None) -> str:
    """Binary units, as caches and memories are sold.

    >>> _size(48 * 1024), _size(32 * 1024**2), _size(None)
    ('48 KiB', '32 MiB', 'unknown')
    """
    if nbytes is None:
        return UNKNOWN
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.4g} {unit}"
    return f"{nbytes} B"
