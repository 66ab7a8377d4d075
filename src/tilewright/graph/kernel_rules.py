"""How axes follow through tilewright's own operators, as the files of `kernels/` define them.

Of attention's, `shape_rules` has the rule: it is that of PyTorch's.
"""

from __future__ import annotations

from tilewright.graph.axis_names import Axes
from tilewright.graph.layout_rules import RULES
from tilewright.graph.shape_rules import Call, Result, broadcast, pointwise, rule

__all__ = ["RULES"]


def _rule_of(names: str) -> str:
    return " ".join(f"tilewright.{name}" for name in names.split())


ALIKE = """
activation activation_backward gated_activation gated_activation_backward
softmax softmax_backward
"""
RULES.update(dict.fromkeys(_rule_of(ALIKE).split(), pointwise))


@rule(_rule_of("dropout_add dropout_add_backward"))
def dropout_add(call: Call) -> Result:
    """The state of the draw is a mask of the result's shape, or two numbers."""
    operands = [axes for name in ("x", "residual", "dout") if (axes := call.axes(name)) is not None]
    return call.each(broadcast(call.names, operands, call.shape))


def _normalised(call: Call) -> tuple[Axes, Axes]:
    """The rows [..., columns] and the weight [columns]."""
    given = [axes for name in ("x", "residual", "dy", "dsum") if (axes := call.axes(name)) is not None]
    source = broadcast(call.names, given, [call.names.size_of(axis) for axis in given[0]])
    columns = source[-1]
    for name in ("weight", "bias"):
        if (axes := call.axes(name)) is not None:
            columns = call.names.unify(columns, axes[0])
    return (*source[:-1], columns), (columns,)


@rule(_rule_of("norm add_norm"))
def norm(call: Call) -> Result:
    """The statistics are one for each row, however many axes the rows have: [rows]."""
    source, _ = _normalised(call)
    rows = (tuple(factor for axis in source[:-1] for factor in axis),)
    return [*[source for _ in call.shapes[2:]], rows, rows]


@rule(_rule_of("norm_backward"))
def norm_backward(call: Call) -> Result:
    source, weight = _normalised(call)
    return [source, weight, weight]


@rule(_rule_of("cross_entropy"))
def cross_entropy(call: Call) -> Result:
    """The loss of each row or of all, the statistics [2, rows], and what one row counts for []."""
    row = call.names.unify(call.tensor("logits")[0], call.tensor("target")[0])
    return [(row,) if call.shape else (), (*call.names.unknown_shape([2]), row), ()]


@rule(_rule_of("cross_entropy_backward"))
def cross_entropy_backward(call: Call) -> Result:
    logits = call.tensor("logits")
    return (call.names.unify(logits[0], call.tensor("target")[0]), logits[1])


@rule(_rule_of("linear_gelu linear_dropout_add"))
def linear(call: Call) -> Result:
    """x[rows, in] · weight[out, in]ᵀ, then what is kept for backward: of the same shape, or less."""
    x, weight = call.tensor("x"), call.tensor("weight")
    call.names.unify(x[1], weight[1])
    added = [axes for name in ("bias", "residual") if (axes := call.axes(name)) is not None]
    return call.each(broadcast(call.names, [(x[0], weight[0]), *added], call.shape))


@rule(_rule_of("linear_cross_entropy linear_cross_entropy_backward"))
def linear_cross_entropy(call: Call) -> Result:
    """Gradients like x and weight, between two numbers where the loss is computed with them."""
    x, weight = call.tensor("x"), call.tensor("weight")
    call.names.unify(x[1], weight[1])
    call.names.unify(x[0], call.tensor("target")[0])
    return [x, weight] if len(call.shapes) == 2 else [(), x, weight, ()]


@rule(_rule_of("weighted_sum"))
def weighted_sum(call: Call) -> Result:
    x, w = call.tensor("x"), call.tensor("w")
    call.names.unify(x[1], w[0])
    return x[:1]


@rule(_rule_of("weighted_sum_backward"))
def weighted_sum_backward(call: Call) -> Result:
    x, w = call.tensor("x"), call.tensor("w")
    call.names.unify(x[1], w[0])
    call.names.unify(x[0], call.tensor("dy")[0])
    return [x, w]


@rule(_rule_of("embedding"))
def embedding(call: Call) -> Result:
    return call.tensor("indices") + call.tensor("weight")[1:]


@rule(_rule_of("embedding_backward"))
def embedding_backward(call: Call) -> Result:
    return call.names.unknown_shape(call.shape[:1], guess=True) + call.tensor("dout")[-1:]


@rule(_rule_of("rotary"))
def rotary(call: Call) -> Result:
    """q[B, H, S, D] and k[B, K, S, D], turned by the angles [S, D/2]."""
    names = call.names
    q, k = call.tensor("q"), call.tensor("k")
    for place in (0, 2, 3):
        names.unify(q[place], k[place])
    for name in ("cos", "sin"):
        angles = call.tensor(name)
        names.unify(q[2], angles[0])
        names.unify(angles[1], (names.product(names.resolved(q[3])) / 2,))
    return [q, k]
