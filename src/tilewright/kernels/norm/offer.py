"""Layer norm and RMS norm in a compiled program, forward and backward, with the residual additions beside them.

    h = add(x, r)                                                →   y, h, mean, rstd = add_norm(x, r, w, b, …)
    y, mean, rstd = native_layer_norm(h, …)

    dh, dw, db = native_layer_norm_backward(dy, h, …)            →   ds, dw, db = norm_backward(dy, h, g, w, …)
    ds = add(g, dh)

If backward reads y, it computes y again from h, which it needs anyway: y is not kept.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.norm import cuda
from tilewright.kernels.offer import Candidate, Offer, hand_late, is_late
from tilewright.kernels.row import ELEMENTS

LONGEST_ROW = 64 * 1024
"""The most bytes of a row that the kernels take."""
MOST_STEPS = 4
"""The most calls that compute a weight from a parameter; `1 + w.float()` is two."""
FORWARD = frozenset({"aten.native_layer_norm.default", "aten._fused_rms_norm.default"})
BACKWARD = {"native_layer_norm_backward", "_fused_rms_norm_backward"}
SMALLEST = torch.finfo(torch.float32).eps
"""The eps of PyTorch's RMS norm, unless the caller gives one."""


@dataclass(frozen=True)
class _Match:
    """One norm, and in training its gradient."""

    node: Node
    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    centered: bool
    backward: Node | None
    summed: bool
    """Whether x is a residual addition that the kernel can make."""
    passed_on: Node | None
    """The addition of another gradient to that of x, if the kernel can make it."""

    @property
    def tensor(self) -> torch.Tensor:
        value = calls.output(self.x)
        assert value is not None
        return value

    def nodes(self, with_sum: bool) -> tuple[Node, ...]:
        found = (self.node, self.backward, self.passed_on, self.x if with_sum else None)
        return tuple(node for node in found if node is not None)


def offers(node: Node, target: Target, waiting: Container[Node]) -> Sequence[Offer]:
    """Offers of the norm alone, and of the norm with the addition before it."""
    named = calls.arguments(node)
    x, weight, bias = (named.get(name) for name in ("input", "weight", "bias"))
    value = calls.output(x) if isinstance(x, Node) else None
    if not isinstance(x, Node) or value is None or not isinstance(shape := named["normalized_shape"], (list, tuple)):
        return []
    backward, refusal = _backward(node, x)
    eps = named["eps"]
    match = _Match(
        node, x, weight if isinstance(weight, Node) else None, bias if isinstance(bias, Node) else None,
        SMALLEST if eps is None else float(eps), "native_layer_norm" in str(node.target), backward,  # type: ignore[arg-type]
        _is_summed(x, (weight, bias)), None if backward is None else _passed_on(backward, value),
    )  # fmt: skip
    refusal = refusal or _refusal(match, len(shape), target)
    spared = _spared(match, waiting)

    def offer(with_sum: bool) -> Offer:
        return Offer(
            "tilewright.norm", "the norm", node, lambda: _apply(match, with_sum, waiting), refusal,
            match.nodes(with_sum), _work(match, with_sum, waiting), spared=spared,
        )  # fmt: skip

    return [offer(with_sum) for with_sum in (False, True)[: 1 + match.summed]]


def _results(node: Node) -> Iterator[tuple[int, Node]]:
    for user in node.users:
        index = user.args[1]
        assert isinstance(index, int)
        yield index, user


def _backward(node: Node, x: Node) -> tuple[Node | None, str | None]:
    """The gradient of a norm; and why the pattern is not whole."""
    readers = {reader for index, result in _results(node) if index for reader in result.users}
    if not readers:
        return None, None
    found = readers.pop()
    if readers or calls.operator_name(found.target) not in BACKWARD:
        return None, "something else reads its mean or its root"
    # A CPU's graph lays rows that lie across out for the gradient, as PyTorch's kernel does.
    read = calls.arguments(found)["input"]
    assert isinstance(read, Node)
    if calls.through(read, lambda node: node.target is torch.ops.aten.clone.default) is not x:
        return None, "its gradient reads another tensor"
    return found, None


def _refusal(match: _Match, axes: int, target: Target) -> str | None:
    """Why the kernels do not take these rows here; None where they do."""
    x = match.tensor
    vectors = [
        value for node in (match.weight, match.bias) if node is not None and (value := calls.output(node)) is not None
    ]
    if target.language != "triton":
        return FOR_GPUS
    if target.is_gpu and not target.has_clusters:
        return "its kernels take thread-block clusters"
    if x.dtype not in ELEMENTS or any(vector.dtype not in ELEMENTS for vector in vectors):
        return f"its kernels take {', '.join(str(dtype) for dtype in ELEMENTS)}"
    if axes != 1 or (match.bias is not None and match.weight is None):
        return "it does not run over the last axis with a weight"
    if len({vector.dtype for vector in vectors}) > 1:
        return "weight and bias differ in dtype"
    sizes = calls.shape_of(x)
    if 0 in sizes or sizes[-1] * x.element_size() > LONGEST_ROW:
        return f"its rows are empty or longer than {LONGEST_ROW // 1024} KiB"
    if sizes[-1] * x.element_size() <= cuda.LONGEST_GENERATED and not _lies_across(x):
        return "a generated kernel is as fast on short rows"
    made = [calls.outputs(match.node)[0], None if match.backward is None else calls.outputs(match.backward)[0]]
    if any(value is not None and (not value.is_contiguous() or value.dtype != x.dtype) for value in made):
        return "its results lie otherwise in memory"
    return None


def _is_summed(x: Node, vectors: Iterable[object]) -> bool:
    """Whether `x` is a plain addition before which weight and bias can be computed: from parameters, in a few steps."""
    if not _is_plain_sum(x, calls.output(x)) or _lies_across(calls.output(x)):
        return False
    return all(_steps(vector, x) is not None for vector in vectors if isinstance(vector, Node))


def _steps(vector: Node, x: Node) -> list[Node] | None:
    """The calls that compute a weight from inputs, in order; None where they are many, or need `x`."""
    found: list[Node] = []
    todo = [vector]
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            continue
        if node is x or node.op != "call_function" or len(found) > MOST_STEPS:
            return None
        found.append(node)
        todo += node.all_input_nodes
    return list(dict.fromkeys(reversed(found)))


def _compute_before(x: Node, vectors: Iterable[Node]) -> None:
    """Move what computes weight and bias in front of `x`."""
    order = {other: place for place, other in enumerate(x.graph.nodes)}
    for step in (step for vector in vectors for step in _steps(vector, x) or ()):
        if order[step] > order[x]:
            x.prepend(step)


def _lies_across(x: torch.Tensor | None) -> bool:
    """Whether the elements of a row are not side by side, as behind a convolution over time: the kernels would copy."""
    return x is not None and calls.shape_of(x)[-1] > 1 and calls.strides_of(x)[-1] != 1


def _passed_on(backward: Node, x: torch.Tensor) -> Node | None:
    """The addition that is the only reader of the gradient of x, if the other gradients are read after it."""
    results = dict(_results(backward))
    readers = list(results[0].users) if 0 in results else []
    if len(readers) != 1 or not _is_plain_sum(readers[0], x) or readers[0].args[0] is readers[0].args[1]:
        return None
    order = {other: place for place, other in enumerate(backward.graph.nodes)}
    others = [reader for index, result in results.items() if index for reader in result.users]
    return readers[0] if all(order[reader] > order[readers[0]] for reader in others) else None


def _is_plain_sum(node: Node, like: torch.Tensor | None) -> bool:
    """Whether `node` adds two tensors of its own shape, dtype and layout."""
    if str(node.target) != "aten.add.Tensor" or node.kwargs or like is None:
        return False
    values = [calls.output(operand) if isinstance(operand, Node) else None for operand in (*node.args, node)]
    return all(value is not None and _alike(value, like) for value in values)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, calls.shape_of(a), a.is_contiguous()) == (b.dtype, calls.shape_of(b), b.is_contiguous())


def _work(match: _Match, with_sum: bool, waiting: Container[Node]) -> tuple[Work, ...]:
    x = match.tensor
    count = prod(calls.shape_of(x))
    rows = count // max(calls.shape_of(x)[-1], 1)
    nbytes, statistics = count * x.element_size(), 4 * rows * (1 + match.centered)
    kind = "tilewright.add_norm" if with_sum else "tilewright.norm"
    forward = Work(kind, nbytes * (1 + with_sum), nbytes * (1 + with_sum) + statistics, 6 * count, rows)
    copied = [Work("pointwise, transposed", nbytes, nbytes)] if _lies_across(x) else []
    if match.backward is None:
        return forward, *copied
    read = nbytes * (2 + (match.passed_on is not None)) + statistics
    backward = Work("tilewright.norm_backward", read, nbytes, 12 * count)
    again = [Work("tilewright.norm", nbytes + statistics, nbytes)] if _is_needed_late(match, waiting) else []
    return forward, backward, *again, *copied


def _spared(match: _Match, waiting: Container[Node]) -> tuple[Work, ...]:
    """The work saved if backward needs y: a generated kernel would write y again beside its gradients."""
    x = match.tensor
    nbytes = prod(calls.shape_of(x)) * x.element_size()
    return (Work("columns and rows", 0, nbytes),) if match.backward and _is_needed_late(match, waiting) else ()


def _is_needed_late(match: _Match, waiting: Container[Node]) -> bool:
    """Whether a node that waits for gradients reads y."""
    results = [result for index, result in _results(match.node) if not index]
    return any(is_late(reader, waiting) for result in results for reader in readers(result))


def _apply(match: _Match, with_sum: bool, waiting: Container[Node]) -> Node:
    ours: Any = torch.ops.tilewright
    options = (match.weight, match.bias, match.eps, match.centered)
    if with_sum:
        _compute_before(match.x, [vector for vector in (match.weight, match.bias) if vector is not None])
        new = insert_call(match.x, ours.add_norm.default, *match.x.args, *options)
        y, x, mean, rstd = (insert_call(match.x, operator.getitem, new, i) for i in range(4))
        match.x.replace_all_uses_with(x)
    else:
        x = match.x
        if _lies_across(match.tensor):
            dense: Any = torch.ops.aten.clone.default
            x = insert_call(match.node, dense, x, memory_format=torch.contiguous_format)
        new = insert_call(match.node, ours.norm.default, x, *options)
        y, mean, rstd = (insert_call(match.node, operator.getitem, new, i) for i in range(3))
    _replace_result(match, y, x, waiting)
    if match.backward is not None:
        _replace_backward(match, x, mean, rstd)
    return new


def _replace_result(match: _Match, y: Node, x: Node, waiting: Container[Node]) -> None:
    """Let forward read y, and the nodes that wait for gradients read a second computation of it."""
    for index, result in list(_results(match.node)):
        if index:
            continue
        if any(is_late(reader, waiting) for reader in readers(result)):
            options = (match.weight, match.bias, match.eps, match.centered)
            new = insert_call(match.node, torch.ops.tilewright.norm.default, x, *options)
            hand_late(result, insert_call(match.node, operator.getitem, new, 0), waiting)
        result.replace_all_uses_with(y)


def _replace_backward(match: _Match, x: Node, mean: Node, rstd: Node) -> None:
    backward, passed_on = match.backward, match.passed_on
    assert backward is not None
    gradient = backward.args[0]
    results = dict(_results(backward))
    added = None
    if passed_on is not None:
        added = next(operand for operand in passed_on.args if operand is not results[0])
    before = backward if passed_on is None else passed_on
    operands = (gradient, x, added, match.weight, match.bias is not None, mean, rstd, match.centered)
    new = insert_call(before, torch.ops.tilewright.norm_backward.default, *operands)
    for index, result in results.items():
        place = passed_on if index == 0 and passed_on is not None else result
        place.replace_all_uses_with(insert_call(before, operator.getitem, new, index))


CANDIDATE = Candidate(FORWARD, offers)
