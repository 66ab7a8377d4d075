"""On a device with Triton, an RMS norm that the program writes out becomes one operator, forward and backward.

    f = x.float(); v = f.pow(2).mean(-1, keepdim=True)                 before autograd
    y = w * (f * rsqrt(v + eps)).to(x.dtype)            →   y = rms_norm(x, w, eps)

Written out, autograd differentiates every step, with a pass over memory for most and sums over all rows that take 25
times as long as their traffic (318 µs for 50 MB on an H200). `norm_as_one` writes tilewright's operator, which has a
gradient; in the joint graph `as_aten` converts both to PyTorch's fused operators, for which `candidates` then chooses a
kernel.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.canonical import example, is_last
from tilewright.graph.insert import Writer, insert_known, insert_results, replace_results
from tilewright.kernels.device import DTYPES
from tilewright.passes.rule import Value, call, rule, triton

MARK = "tilewright_written_out"
SMALLEST = torch.finfo(torch.float32).eps
"""PyTorch's eps if the caller gives none."""
aten = torch.ops.aten

WIDE = call("cast", "x", ..., name="wide"), "x"
SQUARE = call("mul", WIDE, WIDE), call("pow", WIDE, exponent=lambda n: n == 2), call("square", WIDE)
MEAN = call("mean", SQUARE, ..., dim=Value("dim"), keepdim=True)
ROOT = call("rsqrt", call("add", MEAN, Value("eps", (int, float))), alone=True)
INSIDE: dict[str, Any] = {"alone": True, "through": ("cast",)}
SCALED, SCALED_INSIDE = (call("mul", ROOT, WIDE, **inside) for inside in ({}, INSIDE))
WEIGHTED, WEIGHTED_INSIDE = (call("mul", SCALED_INSIDE, "weight", **inside) for inside in ({}, INSIDE))
CALLED = call("rms_norm", input="x", normalized_shape=Value("shape"), weight=Value("weight"), eps=Value("eps"))


def _is_of_rows(
    node: Node, x: Node, wide: Node | None = None, weight: Node | None = None, dim: Any = -1, shape: Any = (0,)
) -> bool:
    """Whether the operator accepts x [..., columns] and a weight [columns], and gives what is replaced."""
    value, result, vector = example(x), example(node), example(weight)
    if value is None or result is None or value.dtype not in DTYPES or value.dim() < 1 or not value.is_contiguous():
        return False
    if result.dtype != value.dtype or (wide is not None and example(wide).dtype != torch.float32):  # type: ignore[union-attr]
        return False
    columns = value.shape[-1]
    if not isinstance(columns, int) or columns == 0 or len(shape) != 1 or not is_last(dim, value.dim()):
        return False
    return weight is None or (vector is not None and vector.dtype in DTYPES and tuple(vector.shape) == (columns,))


@rule(
    (CALLED, SCALED, WEIGHTED, call("cast", (SCALED_INSIDE, WEIGHTED_INSIDE), ...)),
    on=triton,
    where=_is_of_rows,
    reason="an RMS norm that is written out is one operator, forward and backward",
    by="rms_norm",
)
def norm_as_one(node: Node, x: Node, eps: float | None, weight: Node | None = None) -> Node:
    from tilewright.kernels import norm as _defines_the_operators  # noqa: F401

    write = Writer(node.graph, node)
    smallest = SMALLEST if eps is None else float(eps)
    call = write.call(torch.ops.tilewright.norm.default, x, weight, None, smallest, False)
    calls.mark(call, MARK)
    return write.call(operator.getitem, call, 0)


@rule(
    call("norm", "x", Value("weight"), None, Value("eps"), False),
    where=lambda node: calls.is_marked(node, MARK),
)
def as_aten(node: Node, x: Node, weight: Node | None, eps: float) -> list[Node | None]:
    value, wanted = calls.tensor(x), [True, weight is not None]
    shape = [value.shape[-1]]
    rstd_like = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32)
    new = insert_known(node, aten._fused_rms_norm.default, (node.meta["val"][0], rstd_like), x, shape, weight, eps)
    y, rstd = insert_results(node, new, 2)
    for backward in {user for result in node.users for user in result.users if result.args[1] == 2}:
        assert str(backward.target) == "tilewright.norm_backward.default"
        gradient = insert_known(
            backward, aten._fused_rms_norm_backward.default,
            tuple(dx if given else None for dx, given in zip(backward.meta["val"], wanted, strict=False)),
            backward.args[0], x, shape, rstd, weight, wanted,
        )  # fmt: skip
        replace_results(backward, insert_results(backward, gradient, sum(wanted)))
    return [y, None, None]
