"""The machine as rows that a person reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from tilewright.hardware.datasheet import datasheet_of, stated
from tilewright.hardware.detect import Gpu, Machine
from tilewright.records.measurement import Ceiling

UNKNOWN = "unknown"


def machine_report(machine: Machine, ceilings: Sequence[Ceiling] = ()) -> list[tuple[str, str]]:
    """Rows (label, value): the machine, then each ceiling beside the datasheet's figure and the share reached."""
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
    return rows + [_ceiling_row(ceiling, machine) for ceiling in ceilings]


def machine_record(machine: Machine, ceilings: Sequence[Ceiling]) -> dict[str, object]:
    """`machine_report` field by field: the machine, and each ceiling with `stated` and `of_stated` (or None)."""
    return {
        "machine": asdict(machine),
        "ceilings": [
            asdict(ceiling) | {"stated": figure, "of_stated": ceiling.value / figure if figure else None}
            for ceiling, figure in ((ceiling, _stated(ceiling, machine)) for ceiling in ceilings)
        ],
    }


def _gpu_rows(gpu: Gpu) -> list[tuple[str, str]]:
    return [
        ("GPU", gpu.name),
        ("GPU memory", f"{_size(gpu.memory_bytes)}, L2 {_size(gpu.l2_bytes)}"),
        ("SMs", f"{_count(gpu.sms)}, compute capability {gpu.capability or UNKNOWN}"),
        ("link", gpu.pcie or UNKNOWN),
    ]


def _ceiling_row(ceiling: Ceiling, machine: Machine) -> tuple[str, str]:
    value = f"{ceiling.figure} {ceiling.origin}"
    figure = _stated(ceiling, machine)
    if figure is not None:
        value += f", {ceiling.value / figure:.1%} of the datasheet's {figure:,.4g}"
    return f"{ceiling.kind} {ceiling.dtype}".strip(), value


def _stated(ceiling: Ceiling, machine: Machine) -> float | None:
    gpu = next((gpu for gpu in machine.gpus if gpu.name == ceiling.device), None)
    return stated(ceiling, datasheet_of(ceiling.device), gpu)


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
