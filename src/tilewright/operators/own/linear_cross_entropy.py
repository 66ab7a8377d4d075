"""A linear layer into a cross entropy, whose logits exist in chunks only. Its products are PyTorch's."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, each, elements, of_argument
from tilewright.operators.own.activation import role
from tilewright.operators.own.cross_entropy import Rows
from tilewright.operators.row import Traffic, own
from tilewright.operators.shapes import CallAxes, Result, no_result

LOGITS_BYTES = 768 * 2**20
"""The most that the logits of a chunk take."""
ROWS = 1024
"""Chunks are multiples of this where they can be: 3072 rows by 4096 columns are 2.9 waves of tiles on 132
multiprocessors, 2816 rows 2.7."""


def chunk_rows(tokens: int, vocabulary: int, itemsize: int) -> int:
    """Rows of logits at once.

    >>> chunk_rows(8192, 131072, 2), chunk_rows(8192, 1000, 2), chunk_rows(8192, 2**30, 2)
    (3072, 8192, 1)
    """
    rows = max(LOGITS_BYTES // max(vocabulary * itemsize, 1), 1)
    return min(rows // ROWS * ROWS or rows, max(tokens, 1))


def _chunk(sizes: CallSizes, itemsize: int) -> Count:
    """Bytes of the logits of one chunk."""
    tokens, weight = sizes.number(elements(sizes.shape("target"))), sizes.shape("weight")
    vocabulary = sizes.number(weight[0]) if weight else 0
    return chunk_rows(tokens, vocabulary, itemsize) * vocabulary * itemsize


def _logits(sizes: CallSizes) -> Count:
    """Elements of x · weightᵀ."""
    weight = sizes.shape("weight")
    return elements(sizes.shape("target")) * weight[0] if weight else 0


def _wanted(sizes: CallSizes) -> tuple[int, int]:
    """1 for each of the gradients of x and of weight that is wanted, else 0."""
    needs = sizes.argument("needs")
    assert isinstance(needs, list | tuple)
    return int(bool(needs[0])), int(bool(needs[1]))


def _rows(sizes: CallSizes) -> Rows:
    smoothed, squared = (bool(sizes.argument(name)) for name in ("label_smoothing", "z_loss"))
    return Rows(elements(sizes.shape("target")), _logits(sizes), smoothed, squared)


def _flops(sizes: CallSizes) -> Count:
    loss, needs, x = _rows(sizes), _wanted(sizes), sizes.shape("x")
    products = 2 * loss.logits * (x[-1] if x else 0) * (1 + sum(needs))
    return products + loss.loss() + (loss.slope() if any(needs) else 0)


def _exponentials(sizes: CallSizes) -> Count:
    return _logits(sizes) * (1 + any(_wanted(sizes)))


def _scaled(sizes: CallSizes) -> Count:
    """The gradients, which the incoming one is multiplied with."""
    return elements(sizes.result(0)) + elements(sizes.result(1))


def _read_between(sizes: CallSizes) -> Count:
    # The loss reads the logits; the gradient of x reads theirs and the weight, that of the weight theirs and x.
    of_x, of_weight = _wanted(sizes)
    again = of_x * elements(sizes.shape("weight")) + of_weight * elements(sizes.shape("x"))
    return _logits(sizes) * (1 + of_x + of_weight) + again


def _written_between(sizes: CallSizes) -> Count:
    return _logits(sizes) * (1 + any(_wanted(sizes)))


def _meet(call: CallAxes) -> Result:
    x, weight = call.tensor("x"), call.tensor("weight")
    call.names.unify(x[1], weight[1])
    call.names.unify(x[0], call.tensor("target")[0])
    return [x, weight]


own(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor target, int ignore_index, float label_smoothing, "
    "float z_loss, bool mean, bool[2] needs) -> (Tensor, Tensor, Tensor, Tensor)",
    "compute",
    arithmetic=Arithmetic(_flops, _exponentials),
    shapes=lambda call: [(), *_meet(call), ()],
    traffic=Traffic(between=(_read_between, _written_between), scratch=_chunk),
    priced=False,
    role=role("linear", "cross entropy"),
)
# All of it again, and the incoming gradient times the results.
own(
    "linear_cross_entropy_backward(Tensor upstream, Tensor x, Tensor weight, Tensor target, int ignore_index, "
    "float label_smoothing, float z_loss, bool mean, bool[2] needs) -> (Tensor, Tensor)",
    "compute",
    arithmetic=Arithmetic(lambda sizes: _flops(sizes) + _scaled(sizes), _exponentials),
    shapes=_meet,
    traffic=Traffic(
        between=(
            lambda sizes: _read_between(sizes) + _scaled(sizes),
            lambda sizes: _written_between(sizes) + _scaled(sizes),
        ),
        scratch=_chunk,
    ),
    priced=False,
    role=role("linear", "cross entropy", backward=True),
)
# Nothing where the factor is 1, which is not known before the program runs.
own(
    "scale_gradient_(Tensor(a!) gradient, Tensor factor) -> ()",
    "pointwise",
    arithmetic=each(of_argument("gradient"), 1),
    shapes=no_result,
    priced=False,
)
