"""Products of fp32 by 16-bit matrix instructions, in a compiled program.

y = mm(x, w)          →   y = product(x, w, None)
y = addmm(b, x, w)    →   y = product(x, w, b)          b [N]
y = bmm(x, w)         →   y = product(x, w, None)
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilewright.cost.products import FACTORS, in_parts
from tilewright.cost.work import Product, Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import Target
from tilewright.kernels.offer import OURS, THEIRS, Candidate, Offer
from tilewright.kernels.product.cuda import is_copied, size_refusal
from tilewright.launch.builder import Operand
from tilewright.launch.nvrtc import bindings_installed
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.pytorch.state import float32_precision
from tilewright.records.recipe import LINE

MADE_FROM = ("kernels/product",)
SECONDS = 0.02
"""Time of one race, beside the first calls: a model has tens of products."""
LEAST_FLOPS = 2**27
"""Smaller products are bounded by their launches."""
ROOTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default")


def offers(node: Node, target: Target, waiting: Container[Node]) -> list[Offer]:
    """An offer for the product `node`; empty where it is not of fp32, is small, or adds more than a bias."""
    left, right, bias = _operands(node)
    values = [calls.output(one) for one in (left, right, node)]
    if node.kwargs or any(value is None or value.dtype != torch.float32 for value in values):
        return []
    x, y, made = (value for value in values if value is not None)
    added = None if bias is None else calls.output(bias)
    if bias is not None and (added is None or calls.shape_of(added) != calls.shape_of(made)[-1:]):
        return []
    *batch, m, k, n = *calls.shape_of(x), calls.shape_of(y)[-1]
    product = prod(batch), m, n, k
    if 2 * prod(product) < LEAST_FLOPS or not target.is_gpu:
        return []
    ours, theirs = _work(node, product)
    refusal = _refusal(x, y, target)
    # Always raced: the prediction knows nothing of this kernel's tiles, which small results fill badly.
    races = (_race(x, y, added),) if refusal is None and target.is_present else ()
    return [
        Offer(
            "tilewright.product", "the library's product of fp32", node, partial(_apply, node, left, right, bias),
            refusal, (node,), ours, (theirs,), races=races, producer=left,
        )
    ]  # fmt: skip


def _operands(node: Node) -> tuple[Node, Node, Node | None]:
    """Left, right and bias."""
    places = FACTORS[calls.operator_name(node.target)]
    left, right = (node.args[place] for place in places)
    bias = node.args[0] if places[0] else None
    assert isinstance(left, Node) and isinstance(right, Node) and (bias is None or isinstance(bias, Node))
    return left, right, bias


def _refusal(x: torch.Tensor, y: torch.Tensor, target: Target) -> str | None:
    """Why the kernel does not support these operands on this target; None if it does."""
    if not target.has_wgmma:
        return "its kernel takes the matrix instructions of a warpgroup (wgmma)"
    if float32_precision() != "highest":
        return "the library may round to TF32, which is faster"
    if target.is_present and not bindings_installed():
        return "the package cuda-bindings, which builds it, is not installed"
    return size_refusal(x, y)


def _work(node: Node, product: Product) -> tuple[tuple[Work, ...], Work]:
    """This kernel's work, with copies of operands, and that of the library's."""
    left, right, _ = _operands(node)
    copied = [calls.nbytes(one) for one in (left, right) if is_copied(_planned(calls.tensor(one)))]
    moved = calls.nbytes(left) + calls.nbytes(right), calls.nbytes(node)
    parts = in_parts(product)
    ours = Work("tilewright.product", *moved, 2 * prod(parts), dtype="bfloat16", products=(parts,))
    copies = (Work("pointwise", nbytes, nbytes) for nbytes in copied)
    return (ours, *copies), Work("product", *moved, 2 * prod(product), products=(product,))


def _planned(x: torch.Tensor) -> Operand:
    """The operand of a tensor of the graph, whose memory begins at a multiple of `LINE`."""
    begins = calls.number(x.storage_offset()) * x.itemsize if calls.is_known(x.storage_offset()) else 0
    return Operand(0, calls.shape_of(x), calls.strides_of(x), x.dtype, x.device, begins % LINE)


def _race(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None) -> Race:
    """The library's product against this one, on operands that lie alike."""
    lie = tuple((calls.shape_of(one), calls.strides_of(one)) for one in (x, y, *(() if bias is None else (bias,))))
    return Race(("product", repr(lie)), x.device, MADE_FROM, partial(_alternatives, lie, x.device), SECONDS)


def _alternatives(lie: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Alternatives:
    from tilewright.kernels.product import by_library, product

    own = torch.Generator(device).manual_seed(0)
    left, right, *bias = (random_operand(*one, torch.float32, own) for one in lie)
    operands = left, right, next(iter(bias), None)
    return {THEIRS: partial(by_library, *operands), OURS: partial(product, *operands)}


def _apply(node: Node, left: Node, right: Node, bias: Node | None) -> Node:
    from tilewright.kernels import product as _defines_the_operator  # noqa: F401

    ours: Any = torch.ops.tilewright
    new = insert_call(node, ours.product.default, left, right, bias)
    node.replace_all_uses_with(new)
    return new


CANDIDATE = Candidate(frozenset(ROOTS), offers)
