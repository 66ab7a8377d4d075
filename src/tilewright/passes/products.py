"""Products of matrices, sums of products, and what is added to products. Figures: an H200.

    s = sum(unsqueeze(a, 2) · unsqueeze(b, 1), -1)      →   s = bmm(a, bᵀ)      a: [B, M, K], b: [B, N, K]

A kernel of the sum reads each operand again for every element of the other: 5.9 ms in Mamba-2's state-space layer,
written in PyTorch's operators, whose tensors have 60 MB.

    y = bmm(a, b)       a: [B, M, 3], b: [B, 3, N]      →   y = a₀·b₀ + a₁·b₁ + a₂·b₂      in fp32, then rounded

On a GPU, over an axis of a few elements: bound by memory in a library too, which cannot share reads or writes with a
neighbour, and whose kernel is slow for rows of 16-bit elements that do not begin at 16 bytes (16384 times 3 × 3 ·
3 × 1024 in bf16: 566 µs, the bytes 45).

    y = view(mm(x, w), …) + b      →   y = view(addmm(b, x, w), …)      b: [N], on a GPU
    y = addmm(b, x, w)             →   y = mm(x, w) + b                 b: [N], in fp32 and fp64, and on a CPU

PyTorch's `linear` calls `mm` if its input is not contiguous. In `addmm` the library adds b in the same kernel, before
it rounds, and a GELU after it can become part of tilewright's own product. In full precision cuBLAS has slower kernels
for `addmm` (`FEW_ROWS`), and on a CPU `addmm` copies b to every row of its result; there the kernel that reads the
product adds b, if nothing else reads it.

    a = mm(g₁ᵀ, x₁); b = mm(g₂ᵀ, x₂); return a + b     →     a = mm(g₁ᵀ, x₁); addmm_(a, g₂ᵀ, x₂); return a

The gradient of a weight that is used several times: otherwise all products are in memory until a kernel adds them (32
steps of an LSTM of width 512 took five times the memory). Runs on graphs with in-place operators.
"""

from __future__ import annotations

from functools import partial
from math import prod
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_again, insert_call, insert_formula
from tilewright.graph.layouts import laid_by, memory_order
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.rule import call, gpu, rule
from tilewright.passes.units import is_fusible
from tilewright.pytorch.state import float32_precision

aten: Any = torch.ops.aten
FEW_ROWS = 16
"""Of a product for which cuBLAS takes `addmm` in less time than `mm`."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LEAST_REUSE = 8
"""Multiplications per element of operands and sum below which the sum is as fast as a matrix product."""


def _contracted(
    first: Tensor, second: Tensor, own: tuple[frozenset[int], frozenset[int]], rank: int, summed: frozenset[int],
    keeps: bool, strides: tuple[int, ...],
) -> Tensor:  # fmt: skip
    """Σ first · second over `summed`, laid out by `strides`, on which later views depend.

    `own` are the axes that each operand varies with: along others it has one element or a stride of 0.
    """
    letters = ascii_letters[:rank]
    kept = [axis for axis in range(rank) if axis not in summed]
    terms = [_without_constant_axes(x, rank, axes) for x, axes in zip((first, second), own, strict=True)]
    sides = ["".join(letters[axis] for axis in sorted(axes)) for axes in own]
    there = [axis for axis in kept if axis in own[0] | own[1]]
    result = torch.einsum(f"{','.join(sides)}->{''.join(letters[axis] for axis in there)}", *terms)
    for axis in range(rank) if keeps else kept:
        if axis not in there:
            result = result.unsqueeze(axis if keeps else kept.index(axis))
    return laid_by(result, memory_order(strides))


def _without_constant_axes(x: Tensor, rank: int, own: frozenset[int]) -> Tensor:
    """`x` without the axes along which it is constant. `x` may have fewer leading axes than `rank`."""
    lacking = rank - x.dim()
    for axis in reversed(range(lacking, rank)):
        if axis not in own:
            x = x.select(axis - lacking, 0)
    return x


def _contraction(node: fx.Node, product: fx.Node, first: fx.Node, second: fx.Node) -> dict[str, Any] | None:
    result = node.meta["val"]
    values = [operand.meta["val"] for operand in (first, second, product)] + [result]
    if any(x.dtype != result.dtype or x.device != result.device or has_symbols(x) for x in values):
        return None
    if result.dtype not in DTYPES or (result.dtype == torch.float32 and float32_precision() != "highest"):
        return None
    shape = tuple(values[2].shape)
    rank = len(shape)
    if not rank:
        return None
    own = _varying_axes(values[0], shape), _varying_axes(values[1], shape)
    given = calls.arguments(node)
    dims: Any = given["dim"] or list(range(rank))
    summed, keeps = frozenset(axis % rank for axis in dims), bool(given.get("keepdim", False))
    both, either = own[0] & own[1], own[0] | own[1]
    sizes = [prod(shape[axis] for axis in axes) for axes in (own[0] - both, own[1] - both, summed)]
    if not summed <= both | {a for a in range(rank) if shape[a] == 1} or min(sizes) < 2:
        return None
    if any(shape[axis] > 1 for axis in range(rank) if axis not in either):
        return None
    moved = prod(shape[axis] for axis in own[0]) + prod(shape[axis] for axis in own[1]) + result.numel()
    if prod(shape) < LEAST_REUSE * moved:
        return None
    return {"how": {"own": own, "rank": rank, "summed": summed, "keeps": keeps, "strides": result.stride()}}


def _varying_axes(x: Tensor, shape: tuple[int, ...]) -> frozenset[int]:
    """The axes of a product of this shape along which `x` has more than one element."""
    lacking = len(shape) - x.dim()
    strides = x.stride()
    return frozenset(lacking + axis for axis, size in enumerate(x.shape) if size > 1 and strides[axis] != 0)


@rule(
    call(aten.sum.dim_IntList, call(aten.mul.Tensor, "first", "second", name="product", alone=True), ...),
    where=_contraction,
    reason="a sum of broadcast products is a matrix product",
    by="contractions",
)
def contract(node: fx.Node, first: fx.Node, second: fx.Node, how: dict[str, Any]) -> Any:
    return insert_formula(node, partial(_contracted, **how), first, second)


FEW = 4
"""The longest axis that is summed so: each element of the result loads as many of each operand."""
SUMMED = (torch.float32, torch.bfloat16, torch.float16)


@rule(
    call((aten.mm.default, aten.bmm.default, aten.addmm.default), ...),
    reason="a sum of few products is bound by memory, and shares a kernel with its neighbours",
    by="few_terms",
)
def sum_few_terms(node: fx.Node, target: Target) -> Any:
    values = [calls.output(operand) for operand in node.all_input_nodes]
    if target.language != "triton" or node.kwargs or any(x is None or has_symbols(x) for x in values):
        return None
    *added, left, right = node.args
    result = calls.tensor(node)
    if result.dtype not in SUMMED or not 1 <= calls.shape_of(calls.tensor(right))[-2] <= FEW or not result.numel():
        return None
    return insert_formula(node, _sum_of_terms, left, right, *added)


def _sum_of_terms(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    wide, across = left.float(), right.float()
    terms = [wide[..., k : k + 1] * across[..., k : k + 1, :] for k in range(wide.shape[-1])]
    total = terms[0] if added is None else terms[0] + added
    for term in terms[1:]:
        total = total + term
    return total.to(left.dtype).contiguous()


def _is_bias(node: Node, product: Node, bias: Node) -> bool:
    """Whether `bias` has an element for each column of the product, and the columns are the sum's last axis."""
    added, columns, result = (calls.tensor(x) for x in (bias, product, node))
    alike = added.dtype == columns.dtype == result.dtype and added.device == columns.device
    in_rows = str(result.shape[-1]) == str(columns.shape[1]) and result.is_contiguous()
    return alike and in_rows and added.dim() == 1 and str(added.shape[0]) == str(columns.shape[1])


PRODUCT = call(aten.mm.default, "x", "w", name="product", alone=True, through=("view",))


@rule(call(aten.add.Tensor, PRODUCT, "bias"), on=gpu, where=_is_bias)
def add_biases_in_products(node: Node, product_seen: list[Node], bias: Node, x: Node, w: Node) -> Node:
    added = insert_call(node, aten.addmm.default, bias, x, w)
    for view in reversed(product_seen):
        added = insert_again(node, view, added)
    return added


def _is_read_in_kernels(node: Node, bias: Node, target: Target) -> bool:
    in_full = calls.tensor(bias).dim() == 1 and calls.tensor(node).dtype not in NARROW
    has_rows = not target.is_gpu or calls.shape_of(calls.tensor(node))[0] > FEW_ROWS
    return in_full and has_rows and all(is_fusible(reader) is None for reader in readers(node))


@rule(call(aten.addmm.default, "bias", "x", "w"), where=_is_read_in_kernels)
def add_biases_in_kernels(node: Node, bias: Node, x: Node, w: Node) -> Node:
    return insert_call(node, aten.add.Tensor, insert_call(node, aten.mm.default, x, w), bias)


def _may_accumulate(node: Node, producer: Node, into: Node) -> bool:
    """Whether a returned sum is of contiguous products; only the sum and `addmm_` into the first may read that."""
    total, product, own = (calls.tensor(x) for x in (node, producer, into))
    # Nothing is broadcast or converted.
    alike = all((x.dtype, x.shape) == (total.dtype, total.shape) for x in (product, own))
    is_product = into.target in (aten.mm.default, aten.addmm.default)
    others = [user for user in into.users if user is not node]
    alone = all(user.target is aten.addmm_.default for user in others)
    return alike and is_product and alone and own.is_contiguous() and _is_returned_sum(node)


def _is_returned_sum(total: Node) -> bool:
    """Whether this is a sum of two tensors that only the output reads, possibly through further sums."""
    if total.target is not aten.add.Tensor or total.kwargs or len(total.users) != 1:
        return False
    (user,) = total.users
    return user.op == "output" or _is_returned_sum(user)


@rule(
    call(aten.add.Tensor, "into", call(aten.mm.default, "x", "w", name="producer", alone=True)),
    where=_may_accumulate,
    reason="the library adds the product to the other in place",
    saved=lambda node: 2 * calls.nbytes(node),
    by="products",
)
def accumulate_products(node: Node, into: Node, x: Node, w: Node) -> Node:
    insert_call(node, aten.addmm_.default, into, x, w)
    return into
