"""Cross entropy of rows of logits, and what a loss of rows counts."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, of_argument
from tilewright.operators.row import own
from tilewright.operators.shapes import CallAxes, Result


@dataclass(frozen=True)
class Rows:
    """Rows of logits, their elements, and the options of the loss."""

    rows: Count
    logits: Count
    smoothed: bool
    squared: bool

    def loss(self) -> Count:
        # log softmax takes 4 and an exponential, the choice of the class 1 a row; smoothing sums up the row and
        # mixes (3), and the squared log-sum-exp takes 4.
        return self.logits * (4 + self.smoothed) + self.rows * (1 + 3 * self.smoothed + 4 * self.squared)

    def slope(self) -> Count:
        # scale · (exp(x - lse) - [target]): the scale, lse and the target's share are one a row; then the even
        # share of the others, and 1 + 2·z·lse times the probability.
        return self.logits * (2 + self.smoothed + self.squared) + self.rows * (3 + 3 * self.squared)


def _rows(sizes: CallSizes) -> Rows:
    smoothed, squared = (bool(sizes.argument(name)) for name in ("smoothing", "z_loss"))
    return Rows(elements(sizes.shape("target")), elements(sizes.shape("logits")), smoothed, squared)


def _forward(call: CallAxes) -> Result:
    """The loss of each row or of all, the statistics [2, rows], and what one row counts for []."""
    row = call.names.unify(call.tensor("logits")[0], call.tensor("target")[0])
    loss = (row,) if call.arguments.get("reduction") == "none" else ()
    return [loss, (*call.names.unknown_shape([2]), row), ()]


def _backward(call: CallAxes) -> Result:
    """The gradient of the logits, with columns of zeros behind them."""
    logits = call.tensor("logits")
    rows, columns = call.names.unify(logits[0], call.tensor("target")[0]), logits[1]
    if padding := call.arguments.get("padding"):
        columns = call.names.unknown(call.names.size_of(columns) + padding)
    return (rows, columns)


LOGITS = of_argument("logits")
own(
    "cross_entropy(Tensor logits, Tensor target, int ignored, float smoothing, float z_loss, str reduction, bool wide,"
    " str impl) -> (Tensor, Tensor, Tensor)",
    "reduction",
    arithmetic=Arithmetic(lambda sizes: _rows(sizes).loss(), LOGITS),
    shapes=_forward,
    dtypes=("logits", "statistic", "statistic"),
)
own(
    "cross_entropy_backward(Tensor gradient, Tensor logits, Tensor target, Tensor statistics, Tensor weight, "
    "int ignored, float smoothing, float z_loss, int padding, str impl) -> Tensor",
    "pointwise",
    arithmetic=Arithmetic(lambda sizes: _rows(sizes).slope(), LOGITS),
    shapes=_backward,
    dtypes=("logits",),
)
