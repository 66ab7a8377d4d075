"""A page that steps through the programs of kernels, tile by tile, as the interpreter ran them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.hardware.geometry import Alternative, KernelView, tiles_of
from tilewright.records.atomic_file import write_document
from tilewright.records.launch_record import Access, LaunchRecord, Operand
from tilewright.report.page import asset, policy_hash, template
from tilewright.report.page_budget import harmless_json

MOST_STEPS = 2000
"""Steps of a program that the page holds."""
_SIZES = {"bool": 1, "complex64": 8, "complex128": 16}


def write_replay(found: Sequence[tuple[str, Sequence[KernelView]]], out: Path) -> Path:
    """Write the page of these kernels, by the headings of their launches; returns `out`. StoreError if it cannot be."""
    from markupsafe import Markup

    kernels = [_kernel(subject, view) for subject, views in found for view in views]
    style = "\n".join(map(asset, ("page.css", "tile_replay.css")))
    script = '"use strict";\n(() => {\n' + "\n".join(map(asset, ("dom.js", "tile_replay.js"))) + "})();\n"
    page = template("tile_replay.html.j2").render(
        title=", ".join(subject for subject, _ in found),
        kernels=kernels,
        style=Markup(style),
        style_hash=policy_hash(style),
        script=Markup(script),
        script_hash=policy_hash(script),
        island=Markup(harmless_json(kernels)),
    )
    return write_document(out, page, "page")


def _kernel(subject: str, view: KernelView) -> dict[str, Any]:
    launch = view.launch
    operands = {operand.name: operand for operand in launch.operands}
    return {
        "subject": subject,
        "name": launch.name,
        "place": launch.place,
        "device": view.device,
        "grid": [size for size in launch.grid if size > 1] or [1],
        "rule": view.grid_rule,
        "programs_of_grid": launch.programs,
        "source": launch.source.rstrip().split("\n"),
        "operands": [_operand(operand) for operand in launch.operands],
        "programs": [
            {
                "program": list(walk.program),
                "steps": [_step(access, operands[access.operand]) for access in walk.accesses[:MOST_STEPS]],
                "left_out": max(len(walk.accesses) - MOST_STEPS, 0),
            }
            for walk in view.walks
        ],
        "tiles": [_launched(view), *(_alternative(view, other) for other in view.alternatives)],
        "notes": [note for note in (*view.notes, launch.note) if note],
    }


def _operand(operand: Operand) -> dict[str, Any]:
    rows = 1
    for size in operand.shape[:-1]:
        rows *= size
    columns = operand.shape[-1] if operand.shape else 1
    text = f"{operand.name} {operand.dtype}[{', '.join(map(str, operand.shape))}]"
    return {"name": operand.name, "text": text, "rows": max(rows, 1), "columns": max(columns, 1)}


def _step(access: Access, operand: Operand) -> dict[str, Any]:
    *leading, (left, right) = access.ranges or ((0, -1),)
    top = bottom = 0
    for (first, last), size in zip(leading, operand.shape, strict=False):
        top, bottom = top * size + first, bottom * size + last
    return {
        "operand": access.operand,
        "direction": access.direction,
        "ranges": [list(ends) for ends in access.ranges],
        "box": [top, bottom, left, right],
        "offsets": list(access.offsets),
        "shape": list(access.shape),
        "elements": access.elements,
        "lanes": access.lanes,
        "bytes": access.elements * itemsize(operand.dtype),
        "line": access.line,
    }


def itemsize(dtype: str) -> int:
    """Bytes of an element.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn"), itemsize("int64"), itemsize("bool")
    (2, 1, 8, 1)
    """
    if dtype in _SIZES:
        return _SIZES[dtype]
    digits = "".join(letter if letter.isdigit() else " " for letter in dtype).split()
    return max(int(digits[0]) // 8, 1) if digits else 1


def _launched(view: KernelView) -> dict[str, Any]:
    return {"change": "as launched", **_figures(view.launch, view, tiles_of(view.walks[0]) if view.walks else None)}


def _alternative(view: KernelView, other: Alternative) -> dict[str, Any]:
    change = ", ".join(f"{name} {value}" for name, value in other.change.items())
    if other.launch is None or other.refused:
        return {"change": change, "refused": other.refused}
    return {"change": change, **_figures(other.launch, other, other.tiles)}


def _figures(launch: LaunchRecord, of: KernelView | Alternative, tiles: int | None) -> Mapping[str, Any]:
    return {
        "programs": launch.programs,
        "tiles": tiles,
        "registers": launch.registers,
        "shared": launch.shared_bytes,
        "blocks": of.occupancy.blocks if of.occupancy else None,
        "waves": of.waves.waves if of.waves else None,
        "idle": of.waves.idle if of.waves else None,
        "measured_us": launch.measured_us,
    }
