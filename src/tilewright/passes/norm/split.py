"""Splits norms of channels-last tensors, and of few long rows on a GPU, into kernels of sums and pointwise kernels.

    y, mean, rstd, … = batch_norm(x, w, b, …)      →   s = x.double(); Σ = sum(s); Σ² = sum(s · s)
                                                       mean = Σ / n; rstd = rsqrt(Σ² / n - mean² + eps)
                                                       y = (x - mean) · (rstd · w) + b

One nest would read each channel of such a tensor with a stride: 83 ms for a norm that takes 0.5. Split, the sums are
column sums, and the rest is pointwise with one value per column. One pass gives both moments: squares of numbers of at
most 24 bits are exact in double, so Σ² / n - mean² is accurate until mean² is 10⁸ times the variance. float64 has no
wider type and keeps one nest. The gradient's sums, Σ g and Σ g·(x - mean), are split off in the same way.

Few rows of a volume or of a large image's groups would be one program each, which reads its row three times (64 rows of
262,144 in bf16: 246 µs on an H200), as would any rows that do not stay in the last-level cache. Sums read them once.

Splits run on the partitioned graphs. Before the cut the result of a batch or group norm is computed from its moments
(`compute_from_moments`), which backward reads anyway, so that it recomputes y and forward need not save it:

    y, mean, rstd = batch_norm(x, w, b)       →    _, mean, rstd = batch_norm(x, w, b)
    g = silu_backward(dy, y)                       y = (x - mean) · (rstd · w) + b
                                                   g = silu_backward(dy, y)

On a GPU, `sum_samples_last` splits a sum over samples and pixels of values normalised per sample:

    dx = (g - level[n, c] - (x - mean[n, c]) · tilt[n, c]) · scale[n, c]     [N, C, …], channels-last
    db = Σ_(n, places) dx          →          db = Σ_n (Σ_places dx)

In one nest each element would load the moments again, and all programs prefetch the same lines of L2: 900 µs for an
instance norm's gradient, 2 × 32 × 64³ in bf16, whose traffic takes 32 (H200).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.graph import calls
from tilewright.graph.calls import arguments, class_of, nbytes, through
from tilewright.graph.canonical import static
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.layouts import laid_channels_last, lies_channels_last
from tilewright.hardware.target import Target
from tilewright.kernels.norm.group import FORMULAS
from tilewright.kernels.norm.group import normalised as group_normalised
from tilewright.loops.lower import LONG_ROW
from tilewright.passes.bodies import write_body
from tilewright.passes.rule import call, rule, triton
from tilewright.passes.strided import STRIDED_BYTES
from tilewright.schedule.places import WHOLE_ROW

aten = torch.ops.aten
FORWARD, BACKWARD = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
WITHOUT_RUNNING, GROUP = aten._native_batch_norm_legit.no_stats, aten.native_group_norm.default
WEIGHT, WEIGHT_BACKWARD = aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default
LAYER, LAYER_BACKWARD = aten.native_layer_norm.default, aten.native_layer_norm_backward.default
SPREADS = {aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction}


def _by_channel(x: int, training: int) -> Callable[[Any, Target], bool]:
    return lambda args, target: args[training] is True and _is_split(args[x], target)


SPLIT: dict[Any, Callable[[Any, Target], bool]] = {
    FORWARD: _by_channel(0, 5),
    WITHOUT_RUNNING: _by_channel(0, 3),
    BACKWARD: _by_channel(1, 7),
    GROUP: lambda args, target: _is_long(args[0], args[3] * args[6], target),
    LAYER: lambda args, target: _is_long(args[0], _rows_of(*args[:2]), target),
    LAYER_BACKWARD: lambda args, target: _starves(args[1], _rows_of(*args[1:3]), target),
    WEIGHT: lambda args, target: _is_of_columns(args[0], args[2], target),
    WEIGHT_BACKWARD: lambda args, target: _is_of_columns(args[0], args[4], target),
}
"""By operator, whether its arguments are those of a call that is split."""


def _pays(node: fx.Node, target: Target) -> bool:
    # PyTorch leaves out arguments that have their default: a weight norm's `dim` of 0.
    args: Any = list(arguments(node).values())
    if node.target in SPREADS:
        return _starves(args[0], calls.results(node)[0].numel(), target)
    return SPLIT[node.target](args, target)


@rule(call((*SPLIT, *SPREADS), ...), worth=_pays)
def split_norms(node: fx.Node) -> Any:
    operands: Any = node.args[:2]
    if node.target is BACKWARD and [lies_channels_last(calls.tensor(x)) for x in operands] == [False, True]:
        # The producer's kernel can write this copy.
        node.update_arg(0, insert_formula(node, laid_channels_last, operands[0]))
    return write_body(node)


@rule(call(tuple(FORMULAS), ...))
def split_group_norms(node: fx.Node) -> Any:
    return insert_formula(node, FORMULAS[node.target], *node.args)


def _rows_of(operand: fx.Node, shape: list[int]) -> int:
    """The number of rows of `shape` elements."""
    return calls.tensor(operand).numel() // max(prod(shape), 1)


def _is_of_columns(operand: fx.Node, dim: int, target: Target) -> bool:
    """Whether a weight norm on a GPU is over all axes but the last."""
    rank = calls.tensor(operand).dim()
    return target.language == "triton" and rank > 1 and dim in (-1, rank - 1)


def _is_split(operand: Any, target: Target) -> bool:
    return is_by_columns(operand) or _is_long(operand, operand.meta["val"].shape[1], target)


def _is_long(operand: Any, rows: int, target: Target) -> bool:
    """Whether the rows of a GPU's programs are so few, or so long, that one pass over each should find both moments."""
    if _starves(operand, rows, target):
        return True
    x = operand.meta["val"]
    if not _is_generated_for_gpu(x, target) or not x.is_contiguous() or not rows:
        return False
    columns: int = x.numel() // rows
    return columns > WHOLE_ROW


def _starves(operand: Any, rows: int, target: Target) -> bool:
    """Whether a GPU would run one program for each of few long rows."""
    x = operand.meta["val"]
    if not _is_generated_for_gpu(x, target):
        return False
    return 0 < rows <= target.profile.sms and x.numel() >= rows * LONG_ROW and x.is_contiguous()


def _is_generated_for_gpu(x: Tensor, target: Target) -> bool:
    """Whether a Triton kernel of known sizes may accumulate over `x` in a wider dtype."""
    return target.language == "triton" and x.dtype != torch.float64 and static(x.shape)


def is_by_columns(operand: Any) -> bool:
    """Whether a tensor is channels-last, of fewer than 64 bits an element, and too large for a strided nest."""
    x = operand.meta["val"]
    if not isinstance(x, Tensor) or x.dtype == torch.float64 or not static(x.shape):
        return False
    if x.dim() < 2 or x.shape[1] == 1 or x.numel() * x.itemsize < STRIDED_BYTES or x.numel() == x.shape[1]:
        return False
    return x.movedim(1, -1).is_contiguous()


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """[C] → [C, 1, …], which broadcasts along the second dimension of x [N, C, …]."""
    return vector.view(x.shape[1], *[1] * (x.dim() - 2))


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """(x - mean) · (rstd · weight) + bias in the dtype of x [N, C, …]; the others are [C]."""
    scale = rstd if weight is None else rstd * weight
    y = (x - _along(mean, x)) * _along(scale, x)
    return (y if bias is None else y + _along(bias, x)).to(x.dtype)


BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
GROUP_NORM = torch.ops.tilewright.group_norm.default


def _keeps_its_moments(norm: Node, x: Node, target: Target) -> bool:
    """Whether the moments are wider than 16 bits, as they always are on a GPU, and stand for the result."""
    is_split = norm.target is GROUP_NORM or (norm.args[5] is True and is_by_columns(x))
    return is_split and (norm.meta["val"][1].dtype.itemsize > 2 or target.is_planned_gpu)


@rule(call(BATCH_NORM, ...), on=lambda target: target.is_planned_gpu)
def widen_moments(node: Node) -> Node:
    """Moments of 16 bits become fp32: a GPU computes them so, and the graph was traced on a CPU."""
    y, *moments = node.meta["val"][:3]
    node.meta["val"] = (y, *(x.float() if x.itemsize == 2 else x for x in moments), *node.meta["val"][3:])
    for user in node.users:
        user.meta["val"] = node.meta["val"][user.args[1]]
    return node


@rule(call(operator.getitem, call((BATCH_NORM, GROUP_NORM), "x", ..., name="norm"), 0), where=_keeps_its_moments)
def compute_from_moments(node: Node, norm: Node, x: Node) -> Any:
    results, after = {user.args[1]: user for user in norm.users}, norm.next
    mean, rstd = (results.get(place) or insert_call(after, operator.getitem, norm, place) for place in (1, 2))
    weight, bias = norm.args[1:3] if norm.target is BATCH_NORM else norm.args[2:4]
    formula = normalised if norm.target is BATCH_NORM else group_normalised
    # After the moments, wherever they are in the graph.
    return insert_formula(max(mean, rstd).next, formula, x, weight, bias, mean, rstd)


LEAST_BYTES = 2**20
"""Bytes; smaller operands take hardly longer than the launch of the second sum."""
MOST_OPERATORS = 48
"""How many operators of the producing kernel are examined at most."""


def _by_sample(x: Tensor, dtype: torch.dtype) -> Tensor:
    wide = dtype if dtype == torch.float64 else torch.float32
    return x.sum(list(range(2, x.dim())), dtype=wide).sum(0).to(dtype)


def _is_by_channel(node: fx.Node, x: fx.Node) -> bool:
    """Whether this sums several samples of a large channels-last tensor of floats, one result a channel."""
    value: Any = x.meta["val"]
    if not static(value.shape) or not value.is_floating_point() or value.dim() <= 2:
        return False
    given: Any = arguments(node)
    dims = {dim % value.dim() for dim in given["dim"] or range(value.dim())}
    by_channel = dims == set(range(value.dim())) - {1} and not given["keepdim"]
    several = value.shape[0] > 1 and value.shape[2:].numel() > 1
    laid = lies_channels_last(through(x, lambda copy: copy.target is aten.clone.default).meta["val"])
    return by_channel and several and nbytes(x) >= LEAST_BYTES and laid and _reads_moments_of_samples(x)


def _reads_moments_of_samples(x: fx.Node) -> bool:
    """Whether the pointwise operators that compute `x` read a tensor with values per sample but not per pixel."""
    samples, channels = x.meta["val"].shape[:2]
    todo, known = [x], {x}
    while todo and len(known) <= MOST_OPERATORS:
        node = todo.pop()
        if class_of(node) not in ("pointwise", "layout"):
            continue
        for operand in node.all_input_nodes:
            value = operand.meta["val"]
            if operand in known or not isinstance(value, Tensor):
                continue
            todo.append(operand)
            known.add(operand)
            # An operand with fewer axes broadcasts along the samples.
            of_samples = value.dim() > 1 and value.dim() == node.meta["val"].dim() and value.shape[0] == samples
            if of_samples and value.numel() <= samples * channels:
                return True
    return False


@rule(call(aten.sum.dim_IntList, "x", ...), on=triton, worth=_is_by_channel)
def sum_samples_last(node: fx.Node, x: fx.Node) -> Any:
    return insert_formula(node, _by_sample, x, node.meta["val"].dtype)
