"""Calls of PyTorch's `flex_attention`, which Inductor alone compiles: elsewhere they compute every score in fp32.

    def cap(s, b, h, i, j): return 50 * tanh(s / 50)
    def near(b, h, i, j): return (i >= j) & (i - j < 64)
    y = flex_attention(q, k, v, cap, create_block_mask(near, …))

On a GPU, where the functions say no more than a band and a soft cap, `attention(q, k, v, 63, 0, softcap=50)`; others
stay such calls. On a CPU each call finds the keys that its mask shows to each block of queries (`find_shown_keys`):

    →   y = attend_to_shown_keys(q, k, v, cap, …)                              (`kernels/attention/shown_keys.py`)

Only for inference: PyTorch has no gradient of such calls on a CPU. Both read the functions, as PyTorch does, not the
blocks of a mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from tilewright.graph import calls
from tilewright.graph.canonical import argument, canonical_name, example, static, tensor_of
from tilewright.graph.constants import MOST_BYTES, UNIFORM, computed
from tilewright.graph.insert import Writer
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.kernels.attention.shown_keys import attend_to_shown_keys
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.form import in_old_layout
from tilewright.passes.attention.mask_parts import band_of
from tilewright.passes.attention.own import WIDEST, call_attention
from tilewright.passes.attention.spelling import scaled_by
from tilewright.passes.rule import call, cpu, rule
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.errors import Refusal, warn_once

MARK = "tilewright_shown_keys"
OF_PYTHON = frozenset(
    {"floordiv", "mod", "cast", "getitem", "pow", "and_", "or_", "xor", "rsub", "long", "int", "bool"}
)
"""Functions of single elements that PyTorch does not tag so; of `getitem`, a tensor with an index for each axis."""


def function_of(function: object) -> GraphModule:
    """The graph of a score or mask function, which computes each element from elements."""
    body = getattr(function.graph.owning_module, str(function.target), None) if isinstance(function, Node) else None
    if not isinstance(body, GraphModule):
        raise Refusal("a function that cannot be traced as a graph")
    _check_elementwise(body)
    return body


@in_real_tensors()
def shown_by(mask: GraphModule, lead: Sequence[int], queries: int, keys: int) -> Tensor:
    """The bool [B or 1, H or 1, queries, keys] that a mask function gives. Refusal if it reads tensors or is large."""
    batch, head, i, j = given = mask.graph.find_nodes(op="placeholder")[:4]
    differs = [any(canonical_name(user) not in UNIFORM for user in x.users) for x in (batch, head)]
    sizes = [size if differ else 1 for size, differ in zip(lead, differs, strict=True)] + [queries, keys]
    if math.prod(sizes) > MOST_BYTES:
        raise Refusal("a mask too large to compute while compiling")
    places = torch.meshgrid(*(torch.arange(size, dtype=torch.int32) for size in sizes), indexing="ij")
    values: dict[Node, Tensor] = dict(zip((batch, head, i, j), places, strict=True))
    for node in mask.graph.nodes:
        if node.op == "output":
            (result,) = node.args if isinstance(node.args[0], Node) else node.args[0]
            return values[result].expand(sizes)
        if node.op in ("call_function", "call_method") and node not in given:
            value = computed(node, values) if all(x in values for x in node.all_input_nodes) else None
            if value is None:
                raise Refusal(f"a mask that reads {node.name}")
            values[node] = value
    raise Refusal("a mask without a result")


def _by_shown_keys(node: Node) -> Node:
    """Marks a call on a CPU whose functions compute each element by itself."""
    if any(str(size) == "0" for x in node.args[:3] for size in tensor_of(x).shape):
        raise Refusal("operands without elements")
    if not {user.args[1] for user in node.users if user.users} <= {0, 1}:
        raise Refusal("the program reads the largest score of each row")
    score, blocks = node.args[3:5]
    function_of(score)
    function_of(blocks[-1])  # type: ignore[index]
    calls.mark(node, MARK)
    return node


def _check_elementwise(function: GraphModule) -> None:
    """Refusal if a score or mask function does more than compute an element from elements."""
    for node in function.graph.nodes:
        name = canonical_name(node) if node.op != "call_module" else None
        if node.op in ("placeholder", "output"):
            continue
        packet = getattr(torch.ops.aten, name or "", None)
        tagged = packet is not None and any(
            torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads()
        )
        if not tagged and name not in OF_PYTHON and name not in UNIFORM:
            raise Refusal(f"a function that calls {name or node.target}")
        if name == "getitem" and (value := example(node)) is not None and value.dim():
            raise Refusal("a function that reads more than one element of a tensor at once")


def _how(node: Node, target: Target) -> dict[str, Any]:
    """What computes the call on its device, and what it is called."""
    if target.language_of(tensor_of(node.args[0]).device) == "triton":
        return {"compute": _in_a_band, "way": "in a band, in tilewright's kernels"}
    return {"compute": _by_shown_keys, "way": "of the keys that its mask shows to each block of queries"}


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


@rule(call("flex_attention", ...), on=cpu, where=lambda node: calls.is_marked(node, MARK))
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
