"""A bias that is added to a matrix product: on a GPU an operand of the product, on a CPU of the kernel that reads it.

    y = view(mm(x, w), …) + b      →   y = view(addmm(b, x, w), …)      b: [N], on a GPU
    y = addmm(b, x, w)             →   y = mm(x, w) + b                 b: [N], on a CPU

PyTorch's `linear` calls `mm` and then adds b if its input is not contiguous, as in ResMLP's layers. For `addmm` the
library adds b in the same kernel, before it rounds, and a GELU after it can become part of tilewright's own product:
ResMLP's inference, 64 images on an H200, is predicted to take 2.2 ms instead of 2.6.

On a CPU `addmm` copies b to every row of its result, and the product then reads and writes that. The addition costs
nothing in a generated kernel, so it moves there, if nothing else reads the result. Only fp32 and fp64: in 16 bits
`addmm` adds b before it rounds.
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
