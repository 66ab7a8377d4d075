"""Cross entropy in a compiled program: saves the logits and two numbers per row instead of log_softmax.

y = _log_softmax(x.float(), 1)                      [N, C] fp32 →   loss, statistics, weight = cross_entropy(x, t)
loss, count = nll_loss_forward(y, t, …)
dy = nll_loss_backward(g, y, t, …, count)           [N, C] fp32 →   dx = cross_entropy_backward(g, x, t, …)
dx = _log_softmax_backward_data(dy, y, 1)           [N, C]

The loss of all positions but the last reads the uncopied logits of all positions and ignores the last:

    x = view(clone(slice(y, 1, 0, -1)))     [B·(T-1), V]   →   x = view(y)                       [B·T, V]
    loss, s, w = cross_entropy(x, t)        s [2, B·(T-1)]     loss, s, w = cross_entropy(x, pad(t, ignored))
    dx = cross_entropy_backward(x, t, s, w)                    dx = cross_entropy_backward(x, pad(t, ignored), z, w)
    dy = slice_backward(view(dx), 1, 0, -1) [B, T, V]      →   dy = view(dx)

z is s with zeros for the last positions. The gradient of an ignored row is log Σ exp(x - maximum) minus itself, NaN if
the row's logits are not finite; the zeros in z make it 0 for the last positions.

A causal language model predicts the next token, so the last position has no target. A copy of 4 × 1023 rows of 32,000
logits took 124 µs on an H200 and as much memory as the logits; that of their gradient 125 µs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula, insert_results, insert_value, replace
from tilewright.graph.layouts import before_widening, readers_through_moves, widened, widening_below
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.offer import Candidate, Offer
from tilewright.kernels.row import ELEMENTS

aten: Any = torch.ops.aten
FEW = 16
"""At most one in this many rows is computed in vain."""
MOVES = ("view", "_unsafe_view", "clone")


@dataclass(frozen=True)
class Shift:
    """The rows of a loss are the first positions of these logits."""

    logits: Node
    """[…, T, …, V], contiguous."""
    dim: int
    """The axis of the positions."""
    read: int
    """How many positions are read."""
    replaced: tuple[Node, ...]
    """The moves and casts between the logits and the loss's rows, and between the gradients of both."""
    gradient: Node | None
    """The `slice_backward`, in training."""

    def rows(self, before: Node) -> Node:
        """The logits of all positions, [B·T, V]."""
        rows = insert_call(before, aten.view.default, self.logits, [-1, self.logits.meta["val"].shape[-1]])
        return before_widening(rows)

    def targets(self, before: Node, targets: Node, ignored: int) -> Node:
        """The targets of all positions [B·T]; those that are left out are ignored."""

        def padded(targets: Tensor) -> Tensor:
            shape = list(self.logits.meta["val"].shape[:-1])
            shape[self.dim] = self.read
            return self._padded(targets.view(shape), ignored).view(-1)

        return insert_value(before, padded, targets)

    def statistics(self, before: Node, statistics: Node) -> Node:
        """The statistics of all positions, [2, B·T], with zeros for positions that are left out."""

        def with_zeros(all_rows: Tensor) -> Tensor:
            positions = all_rows.view(2, *self.logits.meta["val"].shape[:-1])
            return self._padded(positions.narrow(1 + self.dim, 0, self.read), 0).view(2, -1)

        return insert_value(before, with_zeros, statistics)

    def _padded(self, positions: Tensor, value: int) -> Tensor:
        shape = self.logits.meta["val"].shape
        behind = [0, 0] * (len(shape) - 2 - self.dim)
        found: Tensor = aten.constant_pad_nd(positions, [*behind, 0, shape[self.dim] - self.read], value)
        return found

    def replace_gradient(self, gradient: Node) -> None:
        """Replace the `slice_backward` by the gradient of all rows, [B·T, V]."""
        old = self.gradient
        assert old is not None
        new = insert_call(old, aten.view.default, gradient, list(self.logits.meta["val"].shape))
        if (dtype := old.meta["val"].dtype) != new.meta["val"].dtype:
            new = insert_call(old, aten._to_copy.default, new, dtype=dtype)
        replace(old, new)


def shift_of(rows: Node, gradient: Node | None) -> Shift | None:
    """The shift, if `rows`, the logits of a loss [N, V], are the first positions of other logits; else None.

    `gradient` is the gradient of `rows`."""
    moves = [rows]
    while (node := moves[-1]).target is not aten.slice.Tensor:
        if calls.operator_name(node.target) not in MOVES and widened(node) is None:
            return None
        moves.append(node.all_input_nodes[0])
    given: Any = calls.arguments(node)
    logits, part = given["self"].meta["val"], node.meta["val"]
    if has_symbols(logits) or not logits.is_contiguous() or logits.shape[-1] != rows.meta["val"].shape[1]:
        return None
    dim = given["dim"] % logits.dim()
    left_out = logits.shape[dim] - part.shape[dim]
    if given.get("start") not in (None, 0) or given.get("step", 1) != 1 or not 0 < left_out * FEW <= logits.shape[dim]:
        return None
    back = [] if gradient is None else _to_slice_backward(gradient, list(logits.shape), given["dim"])
    if dim == logits.dim() - 1 or back is None:
        return None
    return Shift(given["self"], dim, part.shape[dim], (*moves, *back), back[-1] if back else None)


def _to_slice_backward(gradient: Node, sizes: list[int], dim: int) -> list[Node] | None:
    """The chain of moves and casts from the gradient of the rows to the `slice_backward`; None if there is no such."""
    found = []
    while gradient.target is not aten.slice_backward.default:
        if len(gradient.users) != 1:
            return None
        gradient = next(iter(gradient.users))
        found.append(gradient)
        if calls.operator_name(gradient.target) not in (*MOVES, "_to_copy", "slice_backward"):
            return None
    given: Any = calls.arguments(gradient)
    alike = list(given["input_sizes"]) == sizes and given["dim"] == dim and given["start"] == 0
    return found if alike else None


REDUCTIONS = ("none", "mean", "sum")
"""By ATen's number for them."""
SOFTMAXES = (aten._log_softmax.default, aten._softmax.default, aten.logsumexp.default, aten.amax.default)
"""Operators with which softmaxes begin, also softmaxes that passes have reduced to their sums."""


@dataclass(frozen=True)
class Match:
    """log_softmax and its loss, and in training their gradients."""

    softmax: Node
    loss: Node
    backward: tuple[Node, Node] | None
    """nll_loss_backward and _log_softmax_backward_data."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.softmax, self.loss, *(self.backward or ()))


def offers(node: Node, target: Target, _: Container[Node]) -> list[Offer]:
    """Cross entropy in place of the `nll_loss_forward` that `node` is, if a log_softmax over rows is below it."""
    softmax = node.args[0]
    if not isinstance(softmax, Node) or calls.operator_name(softmax.target) != "_log_softmax":
        return []
    logits = calls.output(softmax.all_input_nodes[0])
    if logits is None or logits.dim() != 2 or softmax.args[1] not in (1, -1):
        return []
    match, refusal = matched(node, softmax)
    refusal = refusal or _refusal(node, logits, target)
    shift = None
    if REDUCTIONS[_reduction(node)] != "none":
        shift = shift_of(softmax.all_input_nodes[0], match.backward and match.backward[1])
    replaced = dict.fromkeys((*_with_casts(match), *(shift.replaced if shift else ())))
    return [
        Offer(
            "tilewright.cross_entropy", "log_softmax and nll_loss", node, lambda: _apply(match, shift), refusal,
            tuple(replaced), _work(match, logits),
        )
    ]  # fmt: skip


def matched(node: Node, softmax: Node) -> tuple[Match, str | None]:
    """The pattern around a loss, and the reason if other nodes read parts of it."""
    readers = [user for user in softmax.users if user is not node]
    gradient = calls.operator_name(node.target).replace("forward", "backward")
    of_loss = [user for user in readers if calls.operator_name(user.target) == gradient]
    of_softmax = [user for user in readers if calls.operator_name(user.target) == "_log_softmax_backward_data"]
    match = Match(softmax, node, None)
    if len(of_loss) == len(of_softmax) == 1 and of_softmax[0].args[0] is of_loss[0] and len(of_loss[0].users) == 1:
        match = dataclasses.replace(match, backward=(of_loss[0], of_softmax[0]))
    counts = [user for result in node.users if result.args[1] == 1 for user in result.users]
    if any(reader not in match.nodes for reader in (*readers, *counts)):
        return match, "something else reads log_softmax, or the count of rows"
    return match, None


def _refusal(node: Node, logits: torch.Tensor, target: Target) -> str | None:
    """Why the kernels do not support these logits on this target; None if they do."""
    if target.language != "triton":
        return FOR_GPUS
    if logits.dtype not in ELEMENTS:
        return f"its kernels take {', '.join(str(dtype) for dtype in ELEMENTS)}, not {logits.dtype}"
    if 0 in calls.shape_of(logits):
        return "there are no logits"
    if lies_across(node.all_input_nodes[0]):
        return "rows lie across the logits' memory, its own or those of another loss of them"
    if REDUCTIONS[_reduction(node)] == "none" and widening_below(node.all_input_nodes[0].all_input_nodes[0]):
        return "it gives the losses of single rows in the dtype of the logits"
    if calls.arguments(node).get("weight") is not None:
        return "classes have weights"
    return None


def lies_across(softmax: Node) -> bool:
    """Whether the classes are not contiguous, here or for another log_softmax of the same logits.

    One kernel computes the gradients of both losses as one tensor, so both must have one layout.
    """
    logits = _logits(softmax)
    others = softmax.graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    return any(_is_transposed(other) for other in others if _logits(other) is logits)


def _logits(softmax: Node) -> Node:
    """The tensor in memory that has the logits, before views and a widening cast."""
    wide = softmax.all_input_nodes[0]
    cast = widening_below(wide)
    return calls.through(wide if cast is None else cast.all_input_nodes[0], calls.is_view)


def _is_transposed(softmax: Node) -> bool:
    logits = calls.output(softmax.all_input_nodes[0])
    if logits is None or logits.dim() != 2 or not all(isinstance(size, int) for size in logits.shape):
        return False
    return logits.stride(0) == 1 and logits.stride(1) >= logits.shape[0] > 1


def _reduction(loss: Node) -> int:
    number = calls.arguments(loss)["reduction"]
    assert isinstance(number, int)
    return number


def _work(match: Match, logits: torch.Tensor) -> tuple[Work, ...]:
    rows, columns = calls.shape_of(logits)
    cast = widening_below(match.softmax.all_input_nodes[0])
    source = calls.tensor(cast.all_input_nodes[0]) if cast is not None else logits
    nbytes = rows * columns * source.element_size()
    count = rows * columns
    forward = Work("tilewright.cross_entropy", nbytes + 8 * rows, 8 * rows, 4 * count, count)
    backward = Work("tilewright.cross_entropy_backward", nbytes + 16 * rows, nbytes, 3 * count, count)
    return (forward, backward) if match.backward else (forward,)


def _with_casts(match: Match) -> Iterator[Node]:
    """The operators that the kernels replace: the match, the widening cast of its logits, the gradient's cast back."""
    yield from match.nodes
    cast = widening_below(match.softmax.all_input_nodes[0])
    if cast is None or any(reader is not match.softmax for reader in readers_through_moves(cast)):
        return
    yield cast
    if match.backward is not None:
        narrow = [user for user in readers_through_moves(match.backward[1]) if widening_below(user) is None]
        yield from (user for user in narrow if calls.operator_name(user.target) == "_to_copy")


def _apply(match: Match, shift: Shift | None) -> Node:
    from tilewright.kernels import cross_entropy as _defines_the_operators  # noqa: F401

    ours: Any = torch.ops.tilewright
    wide: Any = match.softmax.all_input_nodes[0]
    dtype = wide.meta["val"].dtype
    named: Any = calls.arguments(match.loss)
    classes, ignored = named["target"], named["ignore_index"]
    if shift is None:
        logits = before_widening(wide)
    else:
        logits, classes = shift.rows(match.loss), shift.targets(match.loss, classes, ignored)
    options = (ignored, 0.0, 0.0)
    reduction = REDUCTIONS[_reduction(match.loss)]
    is_wide = logits.meta["val"].dtype != dtype
    new = insert_call(match.loss, ours.cross_entropy.default, logits, classes, *options, reduction, is_wide, "auto")
    loss, statistics, weight = insert_results(match.loss, new, 3)
    for result in list(match.loss.users):
        if result.args[1] == 0:
            result.replace_all_uses_with(loss)
    if match.backward is not None:
        of_loss, of_softmax = match.backward
        if shift is not None:
            statistics = shift.statistics(of_softmax, statistics)
        saved = (of_loss.args[0], logits, classes, statistics, weight)
        if shift is None and _others_read(match.softmax):
            gradient = insert_formula(of_softmax, _gradient, *saved, ignored)
        else:
            gradient = insert_call(of_softmax, ours.cross_entropy_backward.default, *saved, *options, 0, "auto")
        if is_wide:
            gradient = insert_call(of_softmax, aten._to_copy.default, gradient, dtype=dtype)
        if shift is None:
            of_softmax.replace_all_uses_with(gradient)
        else:
            shift.replace_gradient(gradient)
    return new


def _others_read(softmax: Node) -> bool:
    """Whether another softmax reads these logits, scaled or shifted.

    The gradients of both are then added; one generated kernel computes both and writes only the sum.
    """
    source, count = _pointwise_source(softmax), softmax.meta["val"].numel()
    others = (node for target in SOFTMAXES for node in softmax.graph.find_nodes(op="call_function", target=target))
    alike = (
        other for other in others if other is not softmax and other.all_input_nodes[0].meta["val"].numel() == count
    )
    return any(_pointwise_source(other) is source for other in alike)


def _pointwise_source(softmax: Node) -> Node:
    return calls.through(softmax.all_input_nodes[0], lambda x: calls.is_view(x) or calls.class_of(x) == "pointwise")


def _gradient(
    g: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, statistics: torch.Tensor, weight: torch.Tensor,
    ignored: int,
) -> torch.Tensor:  # fmt: skip
    """The formula of `cross_entropy_backward`."""
    maximum, log_sum = statistics.unsqueeze(2).unbind()
    share = torch.where(target != ignored, g * weight, 0).unsqueeze(1)
    here = torch.arange(logits.shape[1], device=logits.device) == target.unsqueeze(1)
    return ((((logits.float() - maximum) - log_sum).exp() - here.float()) * share).to(logits.dtype)


CANDIDATE = Candidate(frozenset({"aten.nll_loss_forward.default"}), offers)
