"""A dropout that drops nothing is its operand, as in eager: what is written to its result, the operand has too.

    y = dropout(x, p, training=False); y += 1    →   x += 1
    y = dropout(x, 0.0); y += 1                  →   x += 1

PyTorch traces it as a copy.
"""

from __future__ import annotations

from torch.fx import Node

from tilewright.passes.attention.match import is_active
from tilewright.passes.rule import call, rule


@rule(
    call(("dropout", "dropout_"), ..., input="x"),
    where=lambda node: not is_active(node),
    # PyTorch would copy the operand, and writes to the result would not reach it.
    required=True,
)
def drop_identities(node: Node, x: Node) -> Node:
    return x
