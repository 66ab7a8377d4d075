"""On a GPU, products over an axis of a few elements are sums of broadcast products, in the kernels of their neighbours.

    y = bmm(a, b)       a: [B, M, 3], b: [B, 3, N]      →   y = a₀·b₀ + a₁·b₁ + a₂·b₂      in fp32, then rounded

They are bound by memory: a library reads the operands and writes the result as such a kernel does, but cannot share
either with a neighbour, and takes a slow kernel for rows of 16-bit elements that do not begin at 16 bytes. In a
Mamba-2's recurrence over three chunks, 16384 times 3 × 3 · 3 × 1024 in bf16, that took 566 µs on an H200 (bytes: 45).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_formula
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.passes.rule import call, rule

aten = torch.ops.aten
FEW = 4
"""The longest axis that is summed so: each element of the result loads as many of each operand."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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
    if result.dtype not in DTYPES or not 1 <= calls.shape_of(calls.tensor(right))[-2] <= FEW or not result.numel():
        return None
    return insert_formula(node, _sum_of_terms, left, right, *added)


def _sum_of_terms(left: Tensor, right: Tensor, added: Tensor | None = None) -> Tensor:
    wide, across = left.float(), right.float()
    terms = [wide[..., k : k + 1] * across[..., k : k + 1, :] for k in range(wide.shape[-1])]
    total = terms[0] if added is None else terms[0] + added
    for term in terms[1:]:
        total = total + term
    return total.to(left.dtype).contiguous()
