"""Calls of PyTorch's `flex_attention` whose functions say no more than a band and a soft cap, on a GPU.

    def cap(s, b, h, i, j): return 50 * tanh(s / 50)
    def near(b, h, i, j): return (i >= j) & (i - j < 64)
    y = flex_attention(q, k, v, cap, create_block_mask(near, …))   →   y = attention(q, k, v, 63, 0, softcap=50)[0]

PyTorch compiles such calls in Inductor alone; elsewhere they compute every score in fp32 and read the functions, not
the blocks of a mask. Functions that read tensors, or of other kinds, stay such calls.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.graph.canonical import argument, canonical_name, static
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.constants import MOST_BYTES, computed
from tilewright.passes.attention.form import in_old_layout
from tilewright.passes.attention.mask_parts import Band, band_of
from tilewright.passes.attention.own import WIDEST, call_attention
from tilewright.passes.attention.spelling import scaled_by, tensor_of
from tilewright.passes.attention.writer import Writer
from tilewright.passes.rule import Refusal, call, rule
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.errors import warn_once


@rule(
    call("flex_attention", ...),
    reason="flex_attention in a band, in tilewright's kernels",
    refused="flex_attention computes every score: ",
    by="attention",
)
def call_for_bands(node: Node, target: Target) -> Node:
    try:
        if target.language_of(tensor_of(node.args[0]).device) != "triton":
            raise Refusal("on a CPU the blocks of a mask are not read")
        return _in_a_band(node)
    except Refusal as refusal:
        warn_once(f"{source_line(node) or node.name}: flex_attention computes every score: {refusal}")
        raise


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
    cap, factor = _softcap(_graph(score))
    band = _band(_graph(blocks[-1]), int(values[0].shape[2]), int(values[1].shape[2]))
    write = Writer(node.graph, results[0])
    out, _ = call_attention(write, (q, k, v), None, band, scale * factor, cap)
    out = in_old_layout(write, results[0], out)
    results[0].replace_all_uses_with(out)
    for unused in list(node.users):
        node.graph.erase_node(unused)
    return out


def _graph(function: object) -> GraphModule:
    body = getattr(function.graph.owning_module, str(function.target), None) if isinstance(function, Node) else None
    if not isinstance(body, GraphModule):
        raise Refusal("a function that cannot be traced as a graph")
    return body


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


@in_real_tensors()
def _band(shown: GraphModule, queries: int, keys: int) -> Band:
    """The band that a function of places shows, the same in each batch entry and head."""
    if queries * keys > MOST_BYTES:
        raise Refusal("a mask too large to compare with a band")
    batch, head, i, j = shown.graph.find_nodes(op="placeholder")[:4]
    if any(canonical_name(user) != "new_ones" for x in (batch, head) for user in x.users):
        raise Refusal("a mask that differs from entry to entry, or from head to head")
    values = {batch: torch.tensor(0), head: torch.tensor(0)}
    values |= {i: torch.arange(queries, dtype=torch.int32)[:, None], j: torch.arange(keys, dtype=torch.int32)}
    for node in shown.graph.nodes:
        if node.op == "output":
            (result,) = node.args if isinstance(node.args[0], Node) else node.args[0]
            band = band_of(values[result].expand(queries, keys), queries, keys)
            if band is None:
                raise Refusal("a mask other than a band (causal, or a window)")
            return band
        if node.op in ("call_function", "call_method") and node not in values:
            value = computed(node, values) if all(x in values for x in node.all_input_nodes) else None
            if value is None:
                raise Refusal(f"a mask that reads {node.name}")
            values[node] = value
    raise Refusal("a mask without a result")
