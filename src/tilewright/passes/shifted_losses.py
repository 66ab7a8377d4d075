"""The loss of all positions but the last reads all of them, and ignores the last: on a GPU logits are not copied.

    x = view(clone(slice(y, 1, 0, -1)))     [B·(T-1), V]   →   x = view(y)                       [B·T, V]
    loss = cross entropy of x and t         [B·(T-1)]          loss = cross entropy of x and pad(t, ignored)
    dy = slice_backward(view(dx), 1, 0, -1) [B, T, V]      →   dy = view(dx)

A causal language model predicts the next token: its logits' last position has no target. A copy of 4 × 1023 rows of
32,000 took 124 µs on an H200 and as much memory as the logits, their gradient's 125. In the joint graph, before kernels
are offered.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula, insert_results, replace, replace_results
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.cross_entropy.candidate import Match, matched
from tilewright.passes.simplify import drop_unread

aten: Any = torch.ops.aten
NONE = 0
"""The reduction to single rows, by ATen's number."""
FEW = 16
"""At most one row of so many is computed in vain."""
MOVES = (aten.view.default, aten._unsafe_view.default, aten.clone.default, aten._to_copy.default)


def read_all_positions(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a joint or inference graph of ATen operators, in place."""
    if target.language != "triton":
        return
    for loss in graph.find_nodes(op="call_function", target=aten.nll_loss_forward.default):
        match, refusal = matched(loss, loss.args[0])
        if refusal is not None or not _is_plain(match) or (taken := _slice(match)) is None:
            continue
        gradient = _gradient(match.backward[1], taken) if match.backward else None
        if gradient is not None or match.backward is None:
            _replace(match, taken, gradient)
            drop_unread(graph)


def _is_plain(match: Match) -> bool:
    """Whether one number is the loss of rows of logits whose classes weigh the same."""
    softmax, loss = match.softmax, match.loss
    if softmax.target is not aten._log_softmax.default or loss.args[2] is not None or loss.args[3] == NONE:
        return False
    return softmax.meta["val"].dim() == 2 and not has_symbols(softmax.meta["val"])


def _slice(match: Match) -> fx.Node | None:
    """The first positions of contiguous logits, if the loss's rows are these, moved."""
    node: Any = match.softmax.args[0]
    while node.target in MOVES and len(node.users) == 1:
        node = node.args[0]
    if node.target is not aten.slice.Tensor or len(node.users) != 1:
        return None
    given: Any = calls.arguments(node)
    whole, part = given["self"].meta["val"], node.meta["val"]
    dim = given["dim"] % whole.dim()
    left_out = whole.shape[dim] - part.shape[dim]
    begins = given.get("start") in (None, 0) and given.get("step", 1) == 1
    fits = whole.is_contiguous() and whole.shape[-1] == match.softmax.meta["val"].shape[1]
    fits = fits and dim < whole.dim() - 1 and 0 < left_out * FEW <= whole.shape[dim]
    return node if begins and fits else None


def _gradient(of_softmax: fx.Node, taken: fx.Node) -> fx.Node | None:
    """The `slice_backward` that alone reads the gradient of the rows, moved."""
    node = of_softmax
    while node.target is not aten.slice_backward.default:
        if len(node.users) != 1 or (node is not of_softmax and node.target not in MOVES):
            return None
        node = next(iter(node.users))
    given: Any = calls.arguments(node)
    whole: Any = taken.args[0]
    alike = list(given["input_sizes"]) == list(whole.meta["val"].shape)
    return node if alike and given["dim"] == calls.arguments(taken)["dim"] and given["start"] == 0 else None


def _replace(match: Match, taken: fx.Node, gradient: fx.Node | None) -> None:
    softmax, loss = match.softmax, match.loss
    whole: Any = taken.args[0]
    shape, part = whole.meta["val"].shape, taken.meta["val"].shape
    dim: Any = calls.arguments(taken)["dim"]
    targets, reduction, ignored = loss.args[1], loss.args[3], loss.args[4]

    def padded(targets: Tensor) -> Tensor:
        behind = len(shape) - 2 - dim % len(shape)
        sides = [0, 0] * behind + [0, shape[dim] - part[dim]]
        found: Tensor = aten.constant_pad_nd(targets.view(part[:-1]), sides, ignored).view(-1)
        return found

    padded_targets = insert_formula(loss, padded, targets)
    rows = insert_call(loss, aten.view.default, whole, [-1, shape[-1]])
    if (dtype := softmax.meta["val"].dtype) != rows.meta["val"].dtype:
        rows = insert_call(loss, aten._to_copy.default, rows, dtype=dtype)
    all_rows = insert_call(loss, aten._log_softmax.default, rows, 1, False)
    new = insert_call(loss, aten.nll_loss_forward.default, all_rows, padded_targets, None, reduction, ignored)
    results = insert_results(loss, new, 2)
    if gradient is not None and match.backward is not None:
        of_loss, of_softmax = match.backward
        given = (of_loss.args[0], all_rows, padded_targets, None, reduction, ignored, results[1])
        dy = insert_call(of_softmax, aten.nll_loss_backward.default, *given)
        dx = insert_call(of_softmax, of_softmax.target, dy, all_rows, 1, of_softmax.args[3])  # type: ignore[arg-type]
        if (wanted := gradient.meta["val"].dtype) != dx.meta["val"].dtype:
            dx = insert_call(of_softmax, aten._to_copy.default, dx, dtype=wanted)
        replace(gradient, insert_call(gradient, aten.view.default, dx, list(shape)))
    replace_results(loss, results)
