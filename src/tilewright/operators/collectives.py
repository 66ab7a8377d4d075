"""Functional collectives, as DTensor, FSDP2 and tensor parallelism put them into graphs.

They keep their order, which must be the same on every rank: none is dropped, merged or moved past another. What they
move over links depends on the ranks of the group, which a call does not name; their cost is unknown. Operands are read
until the result is awaited.
"""

from __future__ import annotations

from tilewright.operators.arithmetic import NOTHING
from tilewright.operators.row import ALL, Row, Traffic, declare
from tilewright.operators.shapes import Rule, same

NAMESPACE = "_c10d_functional"
WAIT = f"{NAMESPACE}.wait_tensor.default"


def _collective(text: str, shapes: Rule | None = None) -> Row:
    return Row(f"{NAMESPACE}.{text}", "library", pure=False, shapes=shapes, priced=False)


declare(
    _collective("all_reduce.default(input, reduce_op, group_name)", same),
    _collective("all_reduce_coalesced.default(inputs, reduce_op, group_name)"),
    _collective("all_gather_into_tensor.default(input, group_size, group_name)"),
    _collective("all_gather_into_tensor_coalesced.default(inputs, group_size, group_name)"),
    _collective("reduce_scatter_tensor.default(input, reduce_op, group_size, group_name)"),
    _collective("reduce_scatter_tensor_coalesced.default(inputs, reduce_op, group_size, group_name)"),
    _collective("all_to_all_single.default(input, output_split_sizes, input_split_sizes, group_name)"),
    _collective("broadcast.default(input, src, group_name)", same),
    # The result is the operand itself, once the collective that writes it is done.
    Row(
        f"{WAIT}(tensor)",
        "library",
        pure=False,
        arithmetic=NOTHING,
        traffic=Traffic(unread=(ALL,), reserves=True),
        shapes=same,
        priced=False,
    ),
)
