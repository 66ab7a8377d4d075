"""Calls of PyTorch's `flex_attention`, which Inductor alone compiles: elsewhere they compute every score in fp32.

    def cap(s, b, h, i, j): return 50 * tanh(s / 50)
    def near(b, h, i, j): return (i >= j) & (i - j < 64)
    y = flex_attention(q, k, v, cap, create_block_mask(near, …))

On a GPU, where the functions say no more than a band and a soft cap, `attention(q, k, v, 63, 0, softcap=50)`; others
stay such calls. On a CPU, products of blocks of queries with the keys that the mask shows them:

    →   for each run of blocks of queries:   s = cap(q[run] @ k[keys].mT · scale, b, h, i, j)
                                             y[run] = softmax(where(near(b, h, i, j), s, -inf)) @ v[keys]

Consecutive blocks whose keys move on with them, as those of a window do, are one run: one product of many windows.
Where a mask reads tensors, or sizes differ from call to call, each call finds the keys (`find_shown_keys`). Only for
inference: PyTorch has no gradient of such calls on a CPU. Both read the functions, as PyTorch does, not the blocks of a
mask.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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
BLOCK = 128
"""The fewest queries of a block."""
MOST_RUNS = 8
"""Blocks grow until there are no more runs: each is kernels of its own, which take time to compile."""
ALIGNED = 16
"""Keys of a block begin and end at multiples of this, so that rows of scores are whole vectors."""
OF_PYTHON = frozenset(
    {"floordiv", "mod", "cast", "getitem", "pow", "and_", "or_", "xor", "rsub", "long", "int", "bool"}
)
"""Functions of single elements that PyTorch does not tag so; of `getitem`, a tensor with an index for each axis."""


@dataclass(frozen=True)
class Run:
    """`count` blocks of `size` queries from `first` on; the first one sees keys `low` to `high`, the next ones move."""

    first: int
    size: int
    count: int
    low: int
    high: int


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


def in_blocks(node: Node) -> Node:
    """Writes the blocks before the results of the call `node` on a CPU, and puts them in their place."""
    q, k, v = (x for x in node.args[:3] if isinstance(x, Node))
    given: Any = (*node.args[3:9], (), ())
    score, blocks, scale, _, of_score, of_mask = given[:6]
    shapes = [size for x in (q, k, v) for size in tensor_of(x).shape]
    if 0 in shapes:
        raise Refusal("operands without elements")
    functions = [(function_of(score), list(of_score)), (function_of(blocks[-1]), list(of_mask))]
    results: dict[Any, Node] = {x.args[1]: x for x in node.users if x.target is operator.getitem and x.users}
    if not set(results) <= {0, 1} or not results:
        raise Refusal("the program reads the largest score of each row")
    try:
        if not static(shapes) or not isinstance(scale, (int, float)):
            raise Refusal("sizes that differ from call to call")
        batch, heads, queries, _ = map(int, tensor_of(q).shape)
        shown = shown_by(functions[1][0], [batch, heads], queries, int(tensor_of(k).shape[2])).any(0).any(0)
    except Refusal:
        calls.mark(node, MARK)
        return node
    write = Writer(node.graph, min(node.users))
    parts = [_written(write, run, (q, k, v), functions, float(scale)) for run in runs_of(shown)]
    for index, old in results.items():
        new = write.call(torch.cat, [part[index] for part in parts], 2) if len(parts) > 1 else parts[0][index]
        old.replace_all_uses_with(new)
    for unused in list(node.users):
        node.graph.erase_node(unused)
    return new


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


def runs_of(shown: Tensor) -> list[Run]:
    """The runs of a mask [queries, keys], of the smallest blocks that make few."""
    queries, keys = shown.shape
    size = min(BLOCK, queries)
    while len(found := list(_runs(shown, queries, keys, size))) > MOST_RUNS:
        size *= 2
    return found


def _runs(shown: Tensor, queries: int, keys: int, size: int) -> Iterator[Run]:
    blocks = []
    for first in range(0, queries, size):
        seen = shown[first : first + size].any(0).nonzero()
        low, high = (int(seen[0]) // ALIGNED * ALIGNED, int(seen[-1]) + 1) if len(seen) else (0, 0)
        blocks.append(Run(first, min(size, queries - first), 1, low, min(-(-high // ALIGNED) * ALIGNED, keys)))
    for (length, *_), alike in groupby(blocks, lambda run: (run.high - run.low, run.low - run.first, run.size)):
        run, *more = alike
        yield Run(run.first, run.size, 1 + len(more), run.low, run.low + length)


def _written(
    write: Writer, run: Run, operands: tuple[Node, Node, Node], functions: list[tuple[GraphModule, list[Any]]],
    scale: float,
) -> tuple[Node, Node]:  # fmt: skip
    """The result [B, H, queries of the run, dv], and the log-sum-exp of base 2."""
    q, k, v = operands
    batch, heads = tensor_of(q).shape[:2]
    shared = int(tensor_of(k).shape[1])
    device = tensor_of(q).device

    def places(start: int, step: int, count: int, *shape: int) -> Node:
        found = write.call(torch.arange, start, start + step * count, step, device=device)
        return write.method("view", found, *shape)

    if run.high == run.low:
        empty = write.method("new_zeros", q, (batch, heads, run.size * run.count, tensor_of(v).shape[3]))
        return empty, write.method("new_full", q, tensor_of(empty).shape[:3], -math.inf, dtype=_working(q))
    # Scores: batch, key heads, blocks, query heads of one key head, queries of a block, keys.
    indices = [
        places(0, 1, int(batch), -1, 1, 1, 1, 1, 1),
        places(0, 1, int(heads), shared, 1, -1, 1, 1),
        places(run.first, 1, run.size * run.count, run.count, 1, run.size, 1),
        write.call(torch.add, places(run.low, run.size, run.count, -1, 1, 1, 1), places(0, 1, run.high - run.low, -1)),
    ]
    return _formula(write, run, operands, functions, scale, indices)


def _working(q: Node) -> torch.dtype:
    """The dtype of scores, as PyTorch has it."""
    return torch.float64 if tensor_of(q).dtype == torch.float64 else torch.float32


def _formula(
    write: Writer, run: Run, operands: tuple[Node, Node, Node], functions: list[tuple[GraphModule, list[Any]]],
    scale: float, indices: list[Node],
) -> tuple[Node, Node]:  # fmt: skip
    batch, heads, _, d = (int(x) for x in tensor_of(operands[0]).shape)
    shared, width = int(tensor_of(operands[1]).shape[1]), int(tensor_of(operands[2]).shape[3])
    rows, group, dtype = run.size * run.count, heads // shared, _working(operands[0])
    (score, of_score), (mask, of_mask) = functions

    def of_blocks(x: Any) -> Any:
        """[B, key heads, blocks, keys of a block, d]."""
        x = x.narrow(2, run.low, run.high - run.low + run.size * (run.count - 1))
        if run.count == 1:
            return x.unsqueeze(2)
        return x.unfold(2, run.high - run.low, run.size).transpose(-1, -2).contiguous()

    def scores(q: Any, k: Any, b: Any, h: Any, i: Any, j: Any, of_score: Any, of_mask: Any) -> Any:
        q = q.narrow(2, run.first, rows).view(batch, shared, group, run.count, run.size, d)
        q = q.permute(0, 1, 3, 2, 4, 5).reshape(batch, shared, run.count, group * run.size, d)
        s = torch.matmul(q.to(dtype), of_blocks(k).to(dtype).transpose(-1, -2)) * scale
        s = s.view(batch, shared, run.count, group, run.size, run.high - run.low)
        return torch.where(mask(b, h, i, j, *of_mask), score(s, b, h, i, j, *of_score).to(dtype), -math.inf)

    def result(weights: Any, q: Any, v: Any) -> Any:
        weights = weights.to(q.dtype).view(batch, shared, run.count, group * run.size, run.high - run.low)
        y = torch.matmul(weights, of_blocks(v).to(q.dtype))
        y = y.view(batch, shared, run.count, group, run.size, width).permute(0, 1, 3, 2, 4, 5)
        return y.reshape(batch, heads, rows, width)

    def sums(s: Any) -> Any:
        lse = torch.logsumexp(s, -1) / math.log(2)
        return lse.permute(0, 1, 3, 2, 4).reshape(batch, heads, rows)

    q, k, v = operands
    s = write.formula(scores, q, k, *indices, of_score, of_mask)
    # Zeros where no key is shown.
    weights = write.call(torch.ops.aten._safe_softmax.default, s, -1)
    return write.formula(result, weights, q, v), write.formula(sums, s)


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
