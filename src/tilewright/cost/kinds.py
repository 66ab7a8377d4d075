"""The work of a generated kernel and of a call, with the kind by which its time is predicted."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tilewright.cost.nests import nest_bytes
from tilewright.cost.products import alignment_of, convolution_kind, is_attention, products_of, rate_dtype, shape_of
from tilewright.cost.work import Work, predicted_us
from tilewright.graph import calls
from tilewright.hardware.profiles import DeviceProfile
from tilewright.loops.nest import Level, Nest, Step
from tilewright.operators.counting import cost_of
from tilewright.operators.language import Op
from tilewright.operators.table import row_of
from tilewright.records.program import Cost
from tilewright.schedule.blocks import block_width, power_of_two
from tilewright.schedule.places import WHOLE_ROW
from tilewright.schedule.tiles import SHORT_ROW

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

    from tilewright.loops.lower import Lowered

ELEMENTS_PER_PROGRAM = 1024
"""Elements of a program of a generated kernel without reductions; a program of column sums has four times as many."""
ELEMENTS_SUMMED = 2048
"""Elements of a result that a program of sums by index takes."""
THREADS = 256
"""Threads of a program of column sums; with more columns than threads, programs take fewer rows."""
NARROW_BLOCK = 64
"""The most columns of a block that counts as narrow: 128 bytes of 16-bit elements."""
SPECIAL = frozenset({"div", "idiv"})
"""Operators computed through a reciprocal. Conversions between floats and 64-bit integers run at the same rate."""
LONG = 4
"""Instructions of an operation on 64-bit integers, which a GPU computes in halves."""
SHIFTED_LOAD = 48
"""Operations that a conditional load costs in a kernel with reductions, whose threads then load single elements."""
MASKS = frozenset({"native_dropout", "bernoulli", "keep_mask"})
"""Operators that draw bits, each from a number of 53 bits."""
MASK_NS, NUMBER_NS, MOVE_NS = 12.0, 3.0, 0.4
"""Nanoseconds of one core for a bit, for a number of `rand` or `randn`, and to move the generator on by one number
(PyTorch 2.13 on a Xeon of 2023; other cores of that year differ by less than 2)."""
ANGLES = frozenset({"sin", "cos"})
"""Functions that first reduce their argument to a range, which takes a microsecond at any size."""


def nest_kind(nest: Nest) -> str:
    """The kind of a nest's kernel, as `kind_name` writes it, followed by `, trigonometric` if it computes `ANGLES`."""
    kind = _plain_kind(nest)
    return f"{kind}, trigonometric" if any(step.name in ANGLES for step in nest.steps) else kind


def _plain_kind(nest: Nest) -> str:
    reductions = {step.name for step in nest.steps if step.name.startswith("reduce")}
    if not reductions and nest.gathers:
        return "gather"
    if not reductions and not nest.transposes and _has_narrow_blocks(nest):
        return "pointwise, narrow"
    return kind_name(
        passes=nest.stages if "reduce_cols" in reductions else 1,
        sums_columns="reduce_rows" in reductions,
        columns=nest.col_count,
        transposes=nest.transposes,
        writes_rows=any(any(nest.split(store.access.strides)[0]) for store in nest.stores),
    )


def _has_narrow_blocks(nest: Nest) -> bool:
    """Whether blocks have few columns of longer rows, or idle lanes: 96 columns in blocks of 32, or 40 in one of 64."""
    width = block_width(nest.col_count, ELEMENTS_PER_PROGRAM)
    return bool(nest.rows) and width <= NARROW_BLOCK and nest.col_count != width and nest.col_count % NARROW_BLOCK > 0


def kind_name(*, passes: int, sums_columns: bool, columns: int, transposes: bool, writes_rows: bool = True) -> str:
    """The kind of a generated kernel by its passes over each row, the columns of a row, and what it writes.

    >>> kind_name(passes=3, sums_columns=False, columns=32000, transposes=False)
    'long rows, three passes'
    >>> kind_name(passes=3, sums_columns=True, columns=768, transposes=False)
    'columns and rows, short'
    """
    kind = "pointwise"
    if sums_columns:
        kind = "columns and rows" if passes > 1 else "columns"
    elif passes > 1:
        long = "long " if columns > WHOLE_ROW else ""
        kind = f"{long}rows, {'two' if passes == 2 else 'three'} passes"
    if kind == "columns" and not (writes_rows or transposes):
        return "columns, sums alone"
    if transposes:
        return f"{kind}, transposed"
    return f"{kind}, short" if passes > 1 and columns <= SHORT_ROW else kind


def region_work(lowered: Lowered) -> Work:
    """The work of the kernel of a nest."""
    nest = lowered.nest
    flops, transcendentals = nest_arithmetic(nest)
    value = calls.outputs(lowered.outputs[-1])[0]
    reductions = sum(step.name == "reduce_cols" for step in nest.steps)
    return Work(
        nest_kind(nest),
        *nest_bytes(lowered),
        flops=flops + _shifted_loads(nest),
        transcendentals=transcendentals,
        dtype=_dtype(value),
        programs=_programs(nest, holds_rows=reductions > 0),
        doubles=sum(_doubles(nest, step) for step in nest.steps),
        draws=sum(_count(nest, step.level) for step in nest.steps if step.name == "draw"),
        combined=reductions + sum(_combined(nest, step) for step in nest.steps),
    )


def _programs(nest: Nest, *, holds_rows: bool) -> int:
    """The number of programs; with `holds_rows` each holds a whole row, or several short ones."""
    if holds_rows:
        return -(-nest.row_count // max(ELEMENTS_PER_PROGRAM // power_of_two(nest.col_count), 1))
    tile = ELEMENTS_PER_PROGRAM * (4 if any(step.name == "reduce_rows" for step in nest.steps) else 1)
    return -(-nest.row_count * nest.col_count // tile)


def _shifted_loads(nest: Nest) -> int:
    """The cost of loads under a condition in a kernel with reductions, as operations."""
    if not any(step.name.startswith("reduce") for step in nest.steps):
        return 0
    shifted = [step for step in nest.steps if step.access and not step.access.by and step.args]
    return SHIFTED_LOAD * sum(_count(nest, step.level) for step in shifted if step.level is Level.FULL)


def _combined(nest: Nest, step: Step) -> int:
    """Words that the threads of a program exchange for a column sum, once its strip of rows is done."""
    if step.name != "reduce_rows":
        return 0
    return block_width(nest.col_count, THREADS) * (2 if _doubles(nest, step) else 1)


def _doubles(nest: Nest, step: Step) -> int:
    """Operations in float64. Sums count, except those rounded to 16 bits and, beside `reduce_cols`, those over rows."""
    if step.name.startswith("reduce"):
        if step.name == "reduce_rows" and any(nest.reductions("reduce_cols")):
            return 0
        accumulates = step.kind == "sum" and step.dtype in ("float32", "float64") and not step.approximate
        return _count(nest, nest.steps[step.args[0]].level) if accumulates else 0
    return _count(nest, step.level) if step.dtype == "float64" else 0


def nest_arithmetic(nest: Nest) -> tuple[int, int]:
    """Simple operations, and those of special-function units, as often as the nest computes them: a value that varies
    with fewer axes than the operator that reads it may be computed again for each element of that operator."""
    simple = special = 0
    for step in nest.steps:
        if step.dtype == "float64" or step.name.startswith("reduce"):
            continue
        count = _count(nest, step.level)
        long = "int64" in (step.dtype, *(nest.steps[place].dtype for place in step.args))
        if step.name in SPECIAL or (step.name == "cast" and long):
            special += count
        else:
            flops, functions = cost_of(Op(step.name, (), step.dtype))
            simple += count * flops * (LONG if long else 1)
            special += count * functions
    return simple, special


def arithmetic_us(nest: Nest, profile: DeviceProfile) -> float:
    """Time of a nest's arithmetic alone, at the device's vector rate."""
    simple, special = nest_arithmetic(nest)
    return (simple + special * profile.flops_per_transcendental) / (profile.vector_TFLOPs * 1e6)


def instructions_us(nest: Nest, profile: DeviceProfile) -> float:
    """`arithmetic_us` plus the time of one instruction for each step: a load, a condition, an index."""
    return arithmetic_us(nest, profile) + sum(_count(nest, step.level) for step in nest.steps) / (
        profile.vector_TFLOPs / 2 * 1e6
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
        return attention_kind(calls.launched(node))
    if "convolution" in name:
        return convolution_kind(node) if name in ("convolution", "convolution_backward") else "convolution"
    if name == "_grouped_mm":
        return "product, grouped"
    return "product" if row is not None and row.operator_class == "compute" else name


def attention_kind(operator: object) -> str:
    """The kind of a fused attention.

    >>> import torch
    >>> attention_kind(torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default)
    'attention backward, cudnn'
    """
    name = calls.operator_name(operator)
    if name.startswith("tilewright."):
        return name
    library = next((f", {library}" for library in ("cudnn", "efficient", "flash") if library in name), "")
    return ("attention backward" if "backward" in name else "attention") + library


def call_work(node: Node, cost: Cost) -> Work:
    """The work of a call whose cost is known."""
    dtype = rate_dtype(node) or "float32"
    moved = cost.bytes_read, cost.bytes_written
    programs, combined = _sums_by_index(node)
    return Work(
        call_kind(node),
        *moved,
        cost.flops,
        cost.transcendentals,
        dtype,
        programs,
        products_of(node, cost),
        alignment_of(node),
        combined=combined,
        draws=cost.transcendentals if is_attention(node) and _drops(node) else 0,
        serial_ns=_drawing_ns(node),
    )


def _drawing_ns(node: Node) -> float:
    """Time in which a CPU's generator, which makes one number after another, makes those of a call; else 0."""
    name = calls.operator_name(node.target)
    if name == "tilewright.draw_stream":
        size = calls.arguments(node)["size"]
        assert isinstance(size, (list, tuple))
        return MOVE_NS * float(prod(size))
    row, value = row_of(node.target), next(iter(calls.outputs(node)), None)
    if row is None or row.operator_class != "random" or value is None or name == "tilewright.draw_philox":
        return 0.0
    return (MASK_NS if name in MASKS else NUMBER_NS) * prod(calls.shape_of(value))


def _sums_by_index(node: Node) -> tuple[int | None, int]:
    """Programs of an operator that sums by index, and the words that each combines; None and 0 for other operators.

    Sums of rows have one program for each row of the result, or for several short rows; it first looks up its
    positions between bounds. Sums within rows compare the places of all elements.
    """
    if calls.operator_name(node.target) == "tilewright.scatter_sums":
        *rows, columns = shape_of(node.args[0])
        return prod(rows), columns
    bounds = calls.arguments(node).get("bounds")
    if bounds is None:
        return None, 0
    entries, columns = shape_of(bounds)[0] - 1, shape_of(node.args[0])[-1]
    return -(-entries * power_of_two(columns) // ELEMENTS_SUMMED), 1


def _drops(node: Node) -> bool:
    """Whether an attention drops some of its weights."""
    arguments = calls.arguments(node)
    return bool(arguments.get("dropout_p", arguments.get("dropout")))


def attention_us(kind: str, cost: Cost, dtype: str, profile: DeviceProfile) -> float | None:
    """The predicted time of a fused attention of this kind (`attention_kind`); None where its cost is unknown."""
    if cost.provenance == "unknown":
        return None
    work = Work(kind, cost.bytes_read, cost.bytes_written, cost.flops, cost.transcendentals, dtype)
    return predicted_us(work, profile)


def _dtype(value: Tensor | None) -> str:
    return "float32" if value is None else calls.dtype_name(value.dtype)
