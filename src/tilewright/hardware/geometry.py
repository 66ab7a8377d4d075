"""A kernel's launch on its device: occupancy, waves, and the same for other constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.hardware.architectures import architecture
from tilewright.hardware.assembly import Instructions, read_sass
from tilewright.hardware.occupancy import Occupancy, Waves, occupancy
from tilewright.records.launch_record import Access, LaunchRecord, ProgramAccesses


@dataclass(frozen=True)
class Alternative:
    """The same kernel with other constants; `refused` says why it cannot run so."""

    change: Mapping[str, int]
    launch: LaunchRecord | None
    occupancy: Occupancy | None = None
    waves: Waves | None = None
    tiles: int | None = None
    refused: str = ""


@dataclass(frozen=True)
class KernelView:
    """One launch, its occupancy and its waves; `device` names the profile that they hold for."""

    launch: LaunchRecord
    device: str
    instructions: Instructions | None
    """None where the machine code is unknown."""
    occupancy: Occupancy
    waves: Waves | None
    grid_rule: str = ""
    """`⌈1000 / BLOCK_ROWS 16⌉`; empty where no such rule gives the grid."""
    walks: tuple[ProgramAccesses, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    notes: tuple[str, ...] = ()
    """Facts that are missing, and why."""


def occupancy_and_waves(launch: LaunchRecord, sms: int) -> tuple[Occupancy, Waves | None]:
    """Occupancy and waves of a launch on a device of `sms` multiprocessors; no waves if no block fits."""
    found = occupancy(architecture(launch.capability), launch.threads, launch.registers, launch.shared_bytes)
    return found, Waves(launch.programs, sms, found.blocks) if found.blocks else None


def view_of(launch: LaunchRecord, device: str, sms: int) -> KernelView:
    """The view that follows from the launch alone."""
    instructions = read_sass(launch.sass) if launch.sass else None
    return KernelView(launch, device, instructions, *occupancy_and_waves(launch, sms))


def tiles_of(walk: ProgramAccesses) -> int:
    """Tiles that a program walks: the largest number of distinct blocks that it touches of any operand."""
    tiles: dict[str, set[tuple[tuple[int, int], ...]]] = {}
    for access in walk.accesses:
        if access.elements:
            tiles.setdefault(access.operand, set()).add(access.ranges)
    return max((len(blocks) for blocks in tiles.values()), default=0)


def written(walk: ProgramAccesses) -> int:
    """Elements that a program stores."""
    return sum(access.elements for access in walk.accesses if access.direction == "write")


def read(walk: ProgramAccesses) -> int:
    """Elements that a program loads."""
    return sum(access.elements for access in walk.accesses if access.direction == "read")


def is_scattered(access: Access) -> bool:
    """Whether an access touches less than the whole of its ranges."""
    volume = 1
    for first, last in access.ranges:
        volume *= last - first + 1
    return 0 < access.elements < volume


def view_record(view: KernelView) -> dict[str, Any]:
    """The view as plain JSON values; instructions by name, walks in full."""
    record = asdict(view)
    if view.instructions is not None:
        moves = [
            {"memory": memory, "direction": direction, "bytes": width, "instructions": n}
            for (memory, direction, width), n in view.instructions.moves.items()
        ]
        record["instructions"] = asdict(view.instructions) | {"moves": moves, "spills": view.instructions.spills}
    _add_derived(record, view)
    for entry, other in zip(record["alternatives"], view.alternatives, strict=True):
        _add_derived(entry, other)
        if other.launch is not None:
            kept = ("grid", "threads", "registers", "stack_bytes", "shared_bytes", "measured_us")
            entry["launch"] = {key: entry["launch"][key] for key in kept}
    return record


def _add_derived(record: dict[str, Any], of: KernelView | Alternative) -> None:
    """Add the properties of occupancy and waves, which `asdict` leaves out."""
    if of.occupancy is not None:
        record["occupancy"]["limited_by"] = list(of.occupancy.limited_by)
    if of.waves is not None:
        waves = of.waves
        record["waves"] |= {"waves": waves.waves, "turns": waves.turns, "last": waves.last, "idle": waves.idle}
