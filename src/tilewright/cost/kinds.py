"""The work of a generated kernel and of a call, with the kind by which its time is predicted."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tilewright.cost.convolutions import convolution_kind, convolution_product
from tilewright.cost.nests import nest_bytes
from tilewright.cost.operators import counted
from tilewright.cost.work import Work, predicted_us
from tilewright.graph import calls
from tilewright.hardware.profiles import DeviceProfile
from tilewright.loops.nest import Level, Nest
from tilewright.operators.table import row_of
from tilewright.records.program import Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.fx import Node

    from tilewright.loops.lower import Lowered

ELEMENTS_PER_PROGRAM = 1024
"""Of a generated kernel without reductions."""
WHOLE_ROW = 16384
"""Columns of a row that a program of a generated kernel holds; it reads longer ones in each pass."""
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
"""Positions of the two factors."""


def nest_kind(nest: Nest) -> str:
    """The kind of the kernel of a nest, as `kind_name` writes it."""
    reductions = {step.name for step in nest.steps if step.name.startswith("reduce")}
    if not reductions and nest.gathers:
        return "gather"
    return kind_name(
        passes=nest.stages if "reduce_cols" in reductions else 1,
        sums_columns="reduce_rows" in reductions,
        columns=nest.col_count,
        transposes=nest.transposes,
    )


def kind_name(*, passes: int, sums_columns: bool, columns: int, transposes: bool) -> str:
    """Of a generated kernel that passes over each row so many times, a row having so many columns.

    >>> kind_name(passes=3, sums_columns=False, columns=32000, transposes=False)
    'long rows, three passes'
    """
    kind = "pointwise"
    if sums_columns:
        kind = "columns and rows" if passes > 1 else "columns"
    elif passes > 1:
        long = "long " if columns > WHOLE_ROW else ""
        kind = f"{long}rows, {'two' if passes == 2 else 'three'} passes"
    return f"{kind}, transposed" if transposes else kind


def region_work(lowered: Lowered, members: Sequence[Node]) -> Work:
    """What the kernel of these operators has to do."""
    nest = lowered.nest
    counts = [counted(node) for node in members]
    value = calls.outputs(lowered.outputs[-1])[0]
    reduces = any(step.name == "reduce_cols" for step in nest.steps)
    return Work(
        nest_kind(nest),
        *nest_bytes(lowered),
        flops=sum(flops for flops, _ in counts),
        transcendentals=sum(transcendentals for _, transcendentals in counts),
        dtype=_dtype(value),
        programs=nest.row_count if reduces else -(-nest.row_count * nest.col_count // ELEMENTS_PER_PROGRAM),
        doubles=sum(_count(nest, step.level) for step in nest.steps if step.dtype == "float64"),
        draws=sum(_count(nest, step.level) for step in nest.steps if step.name == "draw"),
    )


def _count(nest: Nest, level: Level) -> int:
    """How often a step of this level is computed."""
    rows = nest.row_count if level in (Level.FULL, Level.ROW) else 1
    columns = nest.col_count if level in (Level.FULL, Level.COL) else 1
    return rows * columns


def call_kind(node: Node) -> str:
    """The kind of a call: one of `work.MATRIX`, with how the library computes it, or the operator's name."""
    name = calls.operator_name(calls.launched(node))
    row = row_of(node.target)
    if row is not None and row.own:
        return name
    if "attention" in name:
        library = next((f", {library}" for library in ("cudnn", "efficient", "flash") if library in name), "")
        return ("attention backward" if "backward" in name else "attention") + library
    if "convolution" in name:
        return convolution_kind(node) if name in ("convolution", "convolution_backward") else "convolution"
    return "product" if row is not None and row.operator_class == "compute" else name


def call_work(node: Node, cost: Cost) -> Work:
    """What a call has to do, of which the cost is known."""
    dtype = _dtype(next((v for v in calls.outputs(node) if v is not None), None))
    moved = cost.bytes_read, cost.bytes_written
    return Work(call_kind(node), *moved, cost.flops, cost.transcendentals, dtype, product=_product(node))


def attention_us(cost: Cost, dtype: str, profile: DeviceProfile) -> float | None:
    """The predicted time of a fused attention; None where its cost is unknown."""
    if cost.provenance == "unknown":
        return None
    work = Work("attention", cost.bytes_read, cost.bytes_written, cost.flops, cost.transcendentals, dtype)
    return predicted_us(work, profile)


def _dtype(value: Tensor | None) -> str:
    return "float32" if value is None else str(value.dtype).removeprefix("torch.")


def _product(node: Node) -> tuple[int, int, int, int] | None:
    """Batch, M, N, K of a plain product or of a convolution's forward; None for any other call."""
    name = calls.operator_name(node.target)
    if name == "convolution":
        return convolution_product(node)
    places = PRODUCTS.get(name)
    if places is None:
        return None
    left, right = (_shape(node.args[place]) for place in places)
    return prod(left[:-2]), left[-2], right[-1], left[-1]


def _shape(operand: object) -> tuple[int, ...]:
    value: Tensor | None = calls.output(operand)  # type: ignore[arg-type]
    assert value is not None
    return calls.shape_of(value)
