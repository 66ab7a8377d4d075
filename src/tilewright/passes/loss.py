"""Log-softmax from two numbers per row: it is neither written nor saved for backward.

On a GPU, each reader of a log-softmax of long rows, as of log-probabilities of tokens, computes it:

    y = _log_softmax(x, -1)     [*, C]   →   top = amax(x, -1); total = log(sum(exp(x - top), -1))       [*, 1]
    p = gather(y, -1, i)        [*, K]   →   p = (gather(x, -1, i) - top) - total
    others of y                          →   y = (x - top) - total, in the kernel of each reader

Cross entropy is computed from the two numbers (`split_losses`):

    y = _log_softmax(x, 1)                      [N, C]   →   top = amax(x, 1); total = log(sum(exp(x - top), 1))  [N, 1]
    loss, count = nll_loss_forward(y, t, …)                  loss = mean(-((gather(x, t) - top) - total))
    dy = nll_loss_backward(g, y, t, …, count)   [N, C]
    dx = _log_softmax_backward_data(dy, y, 1)            →   dx = (exp((x - top) - total) - (arange == t)) · g / count

On the joint graph, so that the cut saves the logits, mostly a result anyway, and the two numbers. On a GPU rows have a
kernel (`kernels/cross_entropy`), and this is for images, whose classes are not contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import REFUSED_VIEW, insert_call, insert_formula, replace, replace_results, retrace_views
from tilewright.graph.layouts import before_widening
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.cross_entropy.offer import Match, lies_across, matched
from tilewright.kernels.device import DTYPES, NARROW, at_least_fp32
from tilewright.passes.rule import Value, call, rule, triton
from tilewright.passes.simplify import drop_unread
from tilewright.passes.units import is_fusible, is_view

aten: Any = torch.ops.aten
LEAST_COLUMNS, LEAST_ELEMENTS = 1024, 2**22
"""Smaller log-softmaxes stay in caches, where one kernel is faster than two."""


def _is_long(node: fx.Node, logits: fx.Node, dim: int) -> bool:
    """Whether the rows are long, and all readers are gathers of few elements or can be fused."""
    x, y = calls.tensor(logits), calls.tensor(node)
    if has_symbols(y) or y.dtype not in DTYPES or dim not in (-1, y.dim() - 1):
        return False
    if not x.dim() or x.shape[-1] < LEAST_COLUMNS or x.numel() < LEAST_ELEMENTS or not x.is_contiguous():
        return False
    others = [reader for reader in readers(node) if not _picks(reader, node)]
    return all(is_fusible(x) is None and not calls.operator_name(x.target).startswith("nll_loss") for x in others)


def _picks(reader: fx.Node, softmax: fx.Node) -> bool:
    """Whether `reader` gathers few elements of each row of `softmax`."""
    if reader.target is not aten.gather.default or reader.args[0] is not softmax:
        return False
    y, picked = softmax.meta["val"], reader.meta["val"]
    along = reader.args[1] in (-1, y.dim() - 1)
    return along and y.shape[:-1] == picked.shape[:-1] and picked.shape[-1] * LEAST_COLUMNS <= y.shape[-1] * 64


@rule(call(aten._log_softmax.default, "logits", Value("dim"), ...), on=triton, where=_is_long)
def compute_where_read(node: fx.Node, logits: fx.Node) -> fx.Node:
    dtype = node.meta["val"].dtype
    top, total = insert_formula(node, _numbers, logits, -1)
    for reader in [user for user in node.users if _picks(user, node)]:
        operands = before_widening(logits), reader.args[2], top, total
        replace(reader, insert_formula(reader, lambda *x: _picked(x[0], x[1], x[2], x[3], -1).to(dtype), *operands))
    # Insert one for each reader: the cut could save a shared one for backward.
    for reader in list(node.users):
        before = reader if not is_view(reader) else node
        new = insert_formula(before, lambda *given: _shifted(*given).to(dtype), logits, top, total)
        reader.replace_input_with(node, new)
    return node


def _numbers(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The maximum of each row, and log(sum(exp(x - maximum)))."""
    x = at_least_fp32(x)
    top = x.amax(dim, keepdim=True)
    return top, (x - top).exp().sum(dim, keepdim=True).log()


def _picked(x: Tensor, index: Tensor, top: Tensor, total: Tensor, dim: int) -> Tensor:
    return (x.gather(dim, index).to(top.dtype) - top) - total


def _shifted(x: Tensor, top: Tensor, total: Tensor) -> Tensor:
    return (at_least_fp32(x) - top) - total


NONE, MEAN = 0, 1
"""Reductions by ATen's numbers; 2 is the sum."""
WIDE = (torch.float32, torch.float64)


def split_losses(graph: fx.Graph, target: Target) -> None:
    """Rewrite losses in `graph`, a joint or inference graph of ATen operators, in place: on a CPU those of rows, on a
    GPU those whose classes are not contiguous (images, transposed logits)."""
    on_gpu = target.language == "triton"
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        match = _match(loss, 2, NARROW if on_gpu else ())
        if match is not None and (not on_gpu or lies_across(match.softmax)):
            _replace(match)
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss2d_forward.default) if on_gpu else ():
        _view_logits_first(loss)
        if (match := _match(loss, 4, NARROW)) is not None:
            _replace(match)


def _view_logits_first(loss: fx.Node) -> None:
    """`view(_log_softmax(x, 1))` → `_log_softmax(view(x), 1)`, and its gradient: PyTorch views [N, C, …] as images.

    Before the view PyTorch makes channels-last logits contiguous; that copy is dropped, too.
    """
    view: Any = loss.args[0]
    shown: Any = view.args[0] if view.target is aten.view.default else view
    softmax = shown.args[0] if shown.target is aten.clone.default and len(shown.users) == 1 else shown
    if view is shown or softmax.target is not aten._log_softmax.default:
        return
    x, shape = softmax.args[0], view.meta["val"].shape
    before = x.meta["val"].shape
    of_softmax = [user for user in softmax.users if user not in (view, shown)]
    if softmax.args[1] not in (1, 1 - len(before)) or before[:2] != shape[:2] or not _can_view(x, shape):
        return
    if any(
        user.target is not aten._log_softmax_backward_data.default
        or user.args[0].target is not aten.view.default
        or user.args[0].args[0].meta["val"].shape != shape
        for user in of_softmax
    ):
        return
    image = insert_call(softmax, aten.view.default, x, list(shape))
    seen = insert_call(softmax, softmax.target, image, 1, softmax.args[2])
    replace(view, seen)
    for gradient in of_softmax:
        dx = insert_call(gradient, gradient.target, gradient.args[0].args[0], seen, 1, gradient.args[3])
        replace(gradient, insert_call(gradient, aten.view.default, dx, list(before)))
    drop_unread(loss.graph)


def _can_view(x: fx.Node, shape: torch.Size) -> bool:
    value = x.meta["val"]
    try:
        with value.fake_mode, torch.no_grad():
            value.view(shape)
    except REFUSED_VIEW:
        return False
    return True


def _match(loss: fx.Node, dims: int, narrow: Sequence[torch.dtype]) -> Match | None:
    """The pattern around a loss without class weights, whose classes are the second of `dims` dimensions."""
    softmax: Any = loss.args[0]
    if softmax.target is not aten._log_softmax.default or loss.args[2] is not None:
        return None
    match, refusal = matched(loss, softmax)
    logits = calls.tensor(softmax.args[0])
    fits = logits.dim() == dims and softmax.args[1] in (1, 1 - dims) and logits.dtype in (*WIDE, *narrow)
    return match if refusal is None and fits and softmax.meta["val"].dtype == logits.dtype else None


def _replace(match: Match) -> None:
    loss = match.loss
    logits, targets, (reduction, ignored) = match.softmax.args[0], loss.args[1], loss.args[3:5]
    assert isinstance(logits, fx.Node)
    made, top, total, count = insert_formula(loss, _loss, logits, before_widening(logits), targets, reduction, ignored)
    if match.backward:
        of_loss, of_softmax = match.backward
        given: Any = of_loss.args[0]
        dx = insert_formula(of_softmax, _gradient, given, logits, targets, top, total, count, reduction, ignored)
        replace(of_softmax, dx)
        retrace_views(dx)
        of_loss.graph.erase_node(of_loss)
    replace_results(loss, [made, count])
    match.softmax.graph.erase_node(match.softmax)


def _loss(x: Tensor, narrow: Tensor, target: Tensor, reduction: int, ignored: int) -> tuple[Tensor, ...]:
    """The loss, the two numbers of each row, and how many rows count; `narrow` holds the values of `x`."""
    top, total = _numbers(x, 1)
    counts = target != ignored
    picked = _picked(narrow, torch.where(counts, target, 0).unsqueeze(1), top, total, 1)
    each = torch.where(counts, -picked.squeeze(1), 0)
    count = counts.sum().to(top.dtype)
    if reduction == NONE:
        return each, top, total, count
    return (each.sum() / count if reduction == MEAN else each.sum()), top, total, count


def _gradient(
    g: Tensor, x: Tensor, target: Tensor, top: Tensor, total: Tensor, count: Tensor, reduction: int, ignored: int
) -> Tensor:
    """The gradient of the logits, 0 for ignored rows."""
    share = torch.where(target != ignored, g / count if reduction == MEAN else g, 0).unsqueeze(1)
    classes = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.dim() - 2))
    here = classes == target.unsqueeze(1)
    return ((_shifted(x, top, total).exp() - here.to(top.dtype)) * share).to(x.dtype)
