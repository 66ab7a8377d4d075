"""What is added to a matrix product: a bias, or another product.

On a GPU a bias is an operand of the product, on a CPU of the kernel that reads the product:

    y = view(mm(x, w), …) + b      →   y = view(addmm(b, x, w), …)      b: [N], on a GPU
    y = addmm(b, x, w)             →   y = mm(x, w) + b                 b: [N], on a CPU

PyTorch's `linear` calls `mm` and then adds b if its input is not contiguous, as in ResMLP's layers. For `addmm` the
library adds b in the same kernel, before it rounds, and a GELU after it can become part of tilewright's own product:
ResMLP's inference, 64 images on an H200, is predicted to take 2.2 ms instead of 2.6.

On a CPU `addmm` copies b to every row of its result, and the product then reads and writes that. The addition costs
nothing in a generated kernel, so it moves there, if nothing else reads the result. Only fp32 and fp64: in 16 bits
`addmm` adds b before it rounds.

If a weight is used several times, each further product is accumulated into its gradient in place.

    a = mm(g₁ᵀ, x₁); b = mm(g₂ᵀ, x₂); return a + b     →     a = mm(g₁ᵀ, x₁); addmm_(a, g₂ᵀ, x₂); return a

The library's product adds to its output as it writes. Otherwise all products are in memory until a kernel adds them:
32 steps of an LSTM of width 512 took five times the memory. Runs on graphs with in-place operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.kernels.device import NARROW
from tilewright.passes.rule import call, cplusplus, gpu, rule
from tilewright.passes.units import is_fusible, readers

aten: Any = torch.ops.aten


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
        target: Any = view.target
        added = insert_call(node, target, added, *view.args[1:], **view.kwargs)
    return added


def _is_read_in_kernels(node: Node, bias: Node) -> bool:
    in_full = calls.tensor(bias).dim() == 1 and calls.tensor(node).dtype not in NARROW
    return in_full and all(is_fusible(reader) is None for reader in readers(node))


@rule(call(aten.addmm.default, "bias", "x", "w"), on=cplusplus, where=_is_read_in_kernels)
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
