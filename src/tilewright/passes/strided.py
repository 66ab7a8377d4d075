"""Nests that reduce with a stride, or in few programs: merges do not make them (`strides`, `starves`).

On a CPU, `split_strided_rows` splits softmax, variance, argmax and argmin along other axes than the last into column
reductions and pointwise kernels.

    y = _softmax(x, 1)      [N, C, H, W]   →   top = amax(x, 1); total = sum(exp(x - top), 1)
                                               y = exp(x - top) / total

One nest would read each row with a stride: 27 ms for the softmax of 1024 × 1024 along its first axis; eager takes 1.8
and the three kernels 1.4 (one core). Column sums read whole cache lines into a vector of totals.

Runs after the cut into forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph.calls import arguments, class_of, tensor
from tilewright.graph.insert import insert_formula
from tilewright.kernels.device import at_least_fp32
from tilewright.loops.lower import FEW_ROWS, LONG_ROW, Lowered
from tilewright.loops.nest import Level
from tilewright.passes.rule import call, cplusplus, rule

STRIDED_BYTES = 64 * 1024
"""A nest may read a smaller tensor with a stride, since it stays in a cache."""
SECTOR_COLUMNS = 4096
"""With longer rows a program cannot hold the 16 rows whose 16-bit elements share a 32-byte sector."""
TILE_COLUMNS = 256
MANY_ROWS = 2**16
"""A program of a GPU holds so few columns of the rows of a sector, and so many rows make enough programs. An RMS norm
over the second axis of 112 x 64 x 512 x 512 in fp32 takes 3,970 µs on an H200 in one kernel, 5,800 in two."""


def strides(lowered: Lowered) -> bool:
    """Whether a nest that reduces accesses the columns of a large tensor with a stride, its rows being contiguous.

    On a GPU this concerns sums over columns, and stores of long rows: a batch norm of 128 channels fused with the copy
    that makes them the last axis took 56 µs for 16 × 32 × 32 in bf16 (H200), since 32 programs each wrote four elements
    of a sector.
    """
    nest = lowered.nest
    reductions = ("reduce_cols", "reduce_rows") if lowered.language == "c++" else ("reduce_cols",)
    if not nest.rows or not any(step.name in reductions for step in nest.steps):
        return False
    if lowered.language == "triton" and nest.col_count <= TILE_COLUMNS and nest.row_count >= MANY_ROWS:
        return False
    accesses = [step.access for step in nest.steps if step.access and step.level is Level.FULL]
    if lowered.language == "triton" and nest.col_count > SECTOR_COLUMNS:
        accesses += [store.access for store in nest.stores if any(nest.split(store.access.strides)[1])]
    for access in accesses:
        buffer = nest.buffers[access.buffer]
        rows, cols = nest.split(access.strides)
        small = buffer.elements * getattr(torch, buffer.dtype).itemsize < STRIDED_BYTES
        if 1 in rows and 1 not in cols and not small:
            return True
    return False


def starves(lowered: Lowered) -> bool:
    """Whether a GPU would run few programs that each reduce a long row."""
    nest = lowered.nest
    long = lowered.language == "triton" and nest.row_count <= FEW_ROWS and nest.col_count >= LONG_ROW
    return long and any(step.name == "reduce_cols" for step in nest.steps)


aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Not float64: its column sums would differ from eager's by more than the contract's four ulp."""
LEAST_BESIDE = 16
"""The least number of contiguous elements across the rows; fewer do not fill a vector."""


def _is_strided(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the operand is large and contiguous, with enough contiguous elements after the reduced axes."""
    # Two kernels that recompute an operand may round it differently, but the second must find the first's extreme.
    if node.target in PLACES and class_of(operand) in ("pointwise", "reduction", "random"):
        return False
    given: Any = arguments(node).get("dim")
    x = tensor(operand)
    if x.dtype not in DTYPES or not all(isinstance(n, int) for n in x.shape):
        return False
    if not x.dim() or x.numel() * x.itemsize < STRIDED_BYTES or not x.is_contiguous():
        return False
    axes = [given] if isinstance(given, int) else given
    if not axes:
        return False
    return prod(x.shape[max(axis % x.dim() for axis in axes) + 1 :]) >= LEAST_BESIDE


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = at_least_fp32(x)
    e = (wide - wide.amax(dim, True)).exp()
    return (e / e.sum(dim, True)).to(torch.float32 if half_to_float else x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    wide = at_least_fp32(x)
    top = wide.amax(dim, True)
    e = (wide - top).exp()
    return torch.where(top == -torch.inf, 0, e / e.sum(dim, True)).to(dtype or x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = at_least_fp32(x) - at_least_fp32(x).amax(dim, True)
    return (shifted - shifted.exp().sum(dim, True).log()).to(torch.float32 if half_to_float else x.dtype)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    wide = at_least_fp32(x)
    top = wide.amax(dim, True)
    shift = torch.where(top.isinf(), 0, top)
    total = (wide - shift).exp().sum(dim, True).log() + shift
    return (total if keepdim else total.squeeze(dim)).to(x.dtype)


def _softmax_backward(g: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    wide = at_least_fp32(y)
    return (wide * (at_least_fp32(g) - (at_least_fp32(g) * wide).sum(dim, True))).to(dtype)


def _log_softmax_backward(g: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return (at_least_fp32(g) - at_least_fp32(y).exp() * at_least_fp32(g).sum(dim, True)).to(dtype)


def _moments(
    x: Tensor, dim: list[int], *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean."""
    wide = at_least_fp32(x)
    count = prod(x.shape[axis] for axis in dim)
    centred = wide - wide.sum(dim, True) / count
    freedom = max(count - (1 if correction is None else correction), 0)
    return ((centred * centred).sum(dim, keepdim) / freedom).to(x.dtype), (wide.sum(dim, keepdim) / count).to(x.dtype)


def _place(x: Tensor, extreme: Tensor, dim: int, keepdim: bool) -> Tensor:
    """The first index of the extreme [kept axes] along `dim`, or of NaN if there is one."""
    count = x.shape[dim]
    places = torch.arange(count, dtype=torch.int32, device=x.device).view(count, *[1] * (x.dim() - dim % x.dim() - 1))
    return torch.where((x == extreme) | x.isnan(), places, count).amin(dim, keepdim).long()


def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amax(dim, keepdim), _place(x, x.amax(dim, True), dim, keepdim)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return x.amin(dim, keepdim), _place(x, x.amin(dim, True), dim, keepdim)


PLACES: dict[Any, Callable[..., Any]] = {
    aten.argmax.default: lambda *args: _max(*args)[1],
    aten.argmin.default: lambda *args: _min(*args)[1],
    aten.max.dim: _max,
    aten.min.dim: _min,
}
FORMULAS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._log_softmax.default: _log_softmax,
    aten.logsumexp.default: _logsumexp,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.var.correction: lambda *args, **options: _moments(*args, **options)[0],
    aten.std.correction: lambda x, *args, **o: at_least_fp32(_moments(x, *args, **o)[0]).sqrt().to(x.dtype),
    aten.var_mean.correction: _moments,
    **PLACES,
}


@rule(call(tuple(FORMULAS), "operand", ...), on=cplusplus, where=_is_strided)
def split_strided_rows(node: fx.Node) -> Any:
    return insert_formula(node, partial(FORMULAS[node.target], **node.kwargs), *node.args)
