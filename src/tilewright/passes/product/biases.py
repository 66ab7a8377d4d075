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
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, replace
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.simplify import drop_unread
from tilewright.passes.units import is_fusible, readers

aten: Any = torch.ops.aten
RESHAPES = ("view", "_unsafe_view")


def place_biases(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place."""
    if target.is_gpu:
        _add_in_products(graph)
    elif target.language == "c++":
        _add_in_kernels(graph)
    drop_unread(graph)


def _add_in_kernels(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.addmm.default)):
        bias, *operands = node.args
        result, added = calls.output(node), calls.output(bias)
        if node.kwargs or result is None or added is None or added.dim() != 1 or result.dtype in NARROW:
            continue
        if all(is_fusible(reader) is None for reader in readers(node)):
            product = insert_call(node, aten.mm.default, *operands)
            replace(node, insert_call(node, aten.add.Tensor, product, bias))


def _add_in_products(graph: fx.Graph) -> None:
    for node in list(graph.find_nodes(op="call_function", target=aten.add.Tensor)):
        first, second = node.args[:2]
        for seen, bias in ((first, second), (second, first)):
            if not isinstance(seen, fx.Node) or not isinstance(bias, fx.Node) or node.kwargs:
                continue
            product = _product(seen)
            if product is not None and _is_bias(bias, product, node):
                added = insert_call(node, aten.addmm.default, bias, *product.args)
                if seen is not product:
                    target_view: Any = seen.target
                    added = insert_call(node, target_view, added, *seen.args[1:], **seen.kwargs)
                replace(node, added)
                break


def _product(seen: fx.Node) -> fx.Node | None:
    """The product that `seen` is or shows; None if it has other readers."""
    product = seen
    if calls.operator_name(seen.target) in RESHAPES and len(seen.users) == 1:
        product = seen.all_input_nodes[0]
    return product if product.target is aten.mm.default and len(product.users) == 1 else None


def _is_bias(bias: fx.Node, product: fx.Node, node: fx.Node) -> bool:
    """Whether `bias` has an element for each column of the product, and the columns are the sum's last axis."""
    added, columns, result = (calls.output(x) for x in (bias, product, node))
    if added is None or columns is None or result is None:
        return False
    alike = added.dtype == columns.dtype == result.dtype and added.device == columns.device
    in_rows = str(result.shape[-1]) == str(columns.shape[1]) and result.is_contiguous()
    return alike and in_rows and added.dim() == 1 and str(added.shape[0]) == str(columns.shape[1])
