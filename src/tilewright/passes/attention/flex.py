"""Calls of PyTorch's `flex_attention`, which Inductor alone compiles: elsewhere they compute every score in fp32.

    def cap(s, b, h, i, j): return 50 * tanh(s / 50)
    def near(b, h, i, j): return (i >= j) & (i - j < 64)
    y = flex_attention(q, k, v, cap, create_block_mask(near, …))

On a GPU, where the functions say no more than a band and a soft cap, `attention(q, k, v, 63, 0, softcap=50)`; others
stay such calls. On a CPU, products of blocks of queries with the keys that the mask shows them (`flex_blocks.py`). Both
read the functions, as PyTorch does, not the blocks of a mask.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from tilewright.graph.canonical import argument, canonical_name, static
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.kernels.attention.shown_keys import attend_to_shown_keys
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.flex_blocks import MARK, function_of, in_blocks, shown_by
from tilewright.passes.attention.form import in_old_layout
from tilewright.passes.attention.mask_parts import band_of
from tilewright.passes.attention.own import WIDEST, call_attention
from tilewright.passes.attention.spelling import scaled_by, tensor_of
from tilewright.passes.attention.writer import Writer
from tilewright.passes.rule import Refusal, call, cpu, rule
from tilewright.records.errors import warn_once


def _how(node: Node, target: Target) -> dict[str, Any]:
    """What computes the call on its device, and what it is called."""
    if target.language_of(tensor_of(node.args[0]).device) == "triton":
        return {"compute": _in_a_band, "way": "in a band, in tilewright's kernels"}
    return {"compute": in_blocks, "way": "of the keys that its mask shows to each block of queries"}


@rule(
    call("flex_attention", ...),
    where=_how,
    reason=lambda way: f"flex_attention {way}",
    refused="flex_attention computes every score: ",
    by="attention",
)
def lower_flex_attention(node: Node, compute: Callable[[Node], Node]) -> Node:
    try:
        return compute(node)
    except Refusal as refusal:
        warn_once(f"{source_line(node) or node.name}: flex_attention computes every score: {refusal}")
        raise


@rule(call("flex_attention", ...), on=cpu, where=lambda node: MARK in node.meta.get("custom", {}))
def find_shown_keys(node: Node) -> Node:
    """Let each call find the keys: the operator stands for functions that AOTAutograd has traced."""
    node.target = attend_to_shown_keys
    return node


def _in_a_band(node: Node) -> Node:
    q, k, v = (x for x in node.args[:3] if isinstance(x, Node))
    score, blocks, scale = node.args[3:6]
    others = [x for x in node.args[7:] if x]
    values = [tensor_of(x) for x in (q, k, v)]
    shapes = [size for x in values for size in x.shape]
    if others or not static(shapes) or not isinstance(scale, (int, float)) or not isinstance(blocks, (tuple, list)):
        raise Refusal("a function that reads tensors, or sizes that differ from call to call")
    if values[0].dtype not in NARROW or max(values[0].shape[3], values[2].shape[3]) > WIDEST or 0 in shapes:
        raise Refusal(f"{values[0].dtype} in heads of {values[0].shape[3]}: the kernels were measured in 16 bits")
    if len({x.shape[0] for x in values}) > 1 or {x.dtype for x in values} != {values[0].dtype}:
        raise Refusal("operands of several batches or dtypes")
    results = [user for user in node.users if user.users]
    if [user.args[1] for user in results if user.target is operator.getitem] != [0]:
        raise Refusal("its log-sum-exp is read")
    cap, factor = _softcap(function_of(score))
    shown = shown_by(function_of(blocks[-1]), shapes[:2], int(values[0].shape[2]), int(values[1].shape[2]))
    if shown.shape[:2].numel() > 1:
        raise Refusal("a mask that differs from entry to entry, or from head to head")
    band = band_of(shown, *shown.shape[2:])
    if band is None:
        raise Refusal("a mask other than a band (causal, or a window)")
    write = Writer(node.graph, results[0])
    out, _ = call_attention(write, (q, k, v), None, band, scale * factor, cap)
    out = in_old_layout(write, results[0], out)
    results[0].replace_all_uses_with(out)
    for unused in list(node.users):
        node.graph.erase_node(unused)
    return out


def _softcap(score: GraphModule) -> tuple[float, float]:
    """c and f of `c · tanh(f / c · s)`; 0 and 1 where scores stay as they are."""
    (result,) = score.graph.find_nodes(op="output")
    (node,) = result.args if isinstance(result.args[0], Node) else result.args[0]
    given = score.graph.find_nodes(op="placeholder")[0]
    if node is given:
        return 0.0, 1.0
    tanh, cap = _times(node)
    x, inside = _times(argument(tanh, 0, "input")) if canonical_name(tanh) == "tanh" else (None, 0.0)
    if x is not given or cap <= 0 or inside <= 0:
        raise Refusal("a function of the scores other than a soft cap")
    return cap, cap * inside


def _times(node: Any) -> tuple[Any, float]:
    """What is multiplied by a number, and the number."""
    return scaled_by(node, lambda x: x if isinstance(x, (int, float)) else None) or (node, 1.0)
