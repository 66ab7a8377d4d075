"""Computes cross entropy from two numbers per row; log_softmax is neither written nor saved for backward.

    y = _log_softmax(x, 1)                      [N, C]   →   top = amax(x, 1); total = log(sum(exp(x - top), 1))  [N, 1]
    loss, count = nll_loss_forward(y, t, …)                  loss = mean(-((gather(x, t) - top) - total))
    dy = nll_loss_backward(g, y, t, …, count)   [N, C]
    dx = _log_softmax_backward_data(dy, y, 1)            →   dx = (exp((x - top) - total) - (arange == t)) · g / count

Runs on the joint graph, so that the cut saves the logits, mostly a result anyway, and the two numbers. On a GPU rows
have a kernel (`kernels/cross_entropy`), and this pass is for images, whose classes are not contiguous: there
`nll_loss2d_backward` first fills a tensor like the logits with zeros, and `nll_loss2d_forward` took 71 µs for two
volumes of 64 × 64 × 64 positions and four classes, 4 MB (H200).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import REFUSED_VIEW, insert_call, insert_formula, replace, replace_results, retrace_views
from tilewright.graph.layouts import before_widening
from tilewright.hardware.target import Target
from tilewright.kernels.cross_entropy.offer import Match, lies_across, matched
from tilewright.kernels.device import NARROW, at_least_fp32
from tilewright.passes.simplify import drop_unread

aten = torch.ops.aten
NONE, MEAN = 0, 1
"""Reductions by ATen's numbers; 2 is the sum."""
DTYPES = (torch.float32, torch.float64)


def compute_from_rows(graph: fx.Graph, target: Target) -> None:
    """Rewrite the losses of rows in `graph`, a joint or inference graph of ATen operators, in place, on a CPU."""
    if target.language == "triton":
        return
    for match in _losses_of_rows(graph, ()):
        _replace(match)


def compute_across(graph: fx.Graph, target: Target) -> None:
    """Rewrite the losses whose classes are not contiguous (images, transposed logits), on a GPU."""
    if target.language != "triton":
        return
    for match in [match for match in _losses_of_rows(graph, NARROW) if lies_across(match.softmax)]:
        _replace(match)
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss2d_forward.default):
        _view_logits_first(loss)
        match, refusal = matched(loss, loss.args[0])
        if refusal is None and _is_taken(match, 4, NARROW):
            _replace(match)


def _losses_of_rows(graph: fx.Graph, narrow: Sequence[torch.dtype]) -> list[Match]:
    losses = graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default)
    matches = [matched(loss, loss.args[0]) for loss in losses]
    return [match for match, refusal in matches if refusal is None and _is_taken(match, 2, narrow)]


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


def _is_taken(match: Match, dims: int, narrow: Sequence[torch.dtype]) -> bool:
    """Whether the classes are the second of `dims` dimensions, without class weights."""
    softmax, loss = match.softmax, match.loss
    if calls.operator_name(softmax.target) != "_log_softmax" or loss.args[2] is not None:
        return False
    logits = calls.output(softmax.all_input_nodes[0])
    if logits is None or logits.dim() != dims or softmax.args[1] not in (1, 1 - dims):
        return False
    return logits.dtype in (*DTYPES, *narrow) and softmax.meta["val"].dtype == logits.dtype


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


def _loss(
    x: torch.Tensor, narrow: torch.Tensor, target: torch.Tensor, reduction: int, ignored: int
) -> tuple[torch.Tensor, ...]:
    """The loss, the two numbers of each row, and how many rows count; `narrow` holds the values of `x`."""
    x = at_least_fp32(x)
    top = x.amax(1, keepdim=True)
    total = (x - top).exp().sum(1, keepdim=True).log()
    counts = target != ignored
    picked = narrow.gather(1, torch.where(counts, target, 0).unsqueeze(1)).to(x.dtype)
    each = torch.where(counts, -((picked - top) - total).squeeze(1), 0)
    count = counts.sum().to(x.dtype)
    if reduction == NONE:
        return each, top, total, count
    return (each.sum() / count if reduction == MEAN else each.sum()), top, total, count


def _gradient(
    g: torch.Tensor, x: torch.Tensor, target: torch.Tensor, top: torch.Tensor, total: torch.Tensor,
    count: torch.Tensor, reduction: int, ignored: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the logits, 0 for ignored rows."""
    dtype, x = x.dtype, at_least_fp32(x)
    share = torch.where(target != ignored, g / count if reduction == MEAN else g, 0).unsqueeze(1)
    classes = torch.arange(x.shape[1], device=x.device).view(-1, *[1] * (x.dim() - 2))
    here = classes == target.unsqueeze(1)
    return ((((x - top) - total).exp() - here.to(x.dtype)) * share).to(dtype)
