"""FLOPs and exponentials of tilewright's own operators, one row each, counted as `cost/arithmetic` counts.

A fused operator counts what the steps that it stands for count when they are written out, and a backward also what
it computes again. One that is a kernel or two, by what was measured to be faster (`linear_gelu`), counts as the one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.cost.arithmetic import (
    Arithmetic,
    Count,
    Launch,
    attention,
    attention_backward,
    attention_exponentials,
    elements,
)

ACTIVATION: dict[object, tuple[int, int]] = {"none": (0, 0), "gelu": (4, 1), "gelu_tanh": (8, 1), "silu": (4, 1)}
"""FLOPs and transcendentals of act(x), an element: those of `gelu` and `silu` in ATen's table."""
SLOPE: dict[object, tuple[int, int]] = {"none": (0, 0), "gelu": (9, 2), "gelu_tanh": (17, 1), "silu": (8, 1)}
"""Of dy · act'(x): those of `gelu_backward` and `silu_backward`."""
DROPOUT = 2
"""A comparison with p and a scaling, as `native_dropout` counts them; the numbers drawn are integer work."""


def _nothing(_: Launch) -> Count:
    return 0


def _shaped(launch: Launch, *names: str) -> Count:
    """Elements of these arguments together; of an absent one none."""
    count: Count = 0
    for name in names:
        count = count + elements(launch.shape(name))
    return count


def _kind(launch: Launch) -> object:
    """Which activation: named by the operator's `kind`, or a GELU of which `approximate` says which."""
    tanh = launch.argument("approximate") == "tanh"
    return launch.argument("kind") or ("gelu_tanh" if tanh else "gelu")


def _dropped(launch: Launch) -> int:
    """FLOPs of the dropout, an element; none where nothing is dropped."""
    return DROPOUT if launch.argument("p") != 0.0 else 0


def _each(
    name: str, flops: int = 0, special: int = 0, *, acts: bool = False, slopes: bool = False, drops: bool = False
) -> Arithmetic:
    """So much for each element of the argument `name`, and the activation, its derivative and the dropout."""

    def each(launch: Launch, which: int) -> int:
        count = (flops, special)[which]
        count += ACTIVATION[_kind(launch)][which] if acts else 0
        count += SLOPE[_kind(launch)][which] if slopes else 0
        return count + (_dropped(launch) if drops and which == 0 else 0)

    return Arithmetic(
        lambda launch: each(launch, 0) * _shaped(launch, name), lambda launch: each(launch, 1) * _shaped(launch, name)
    )


# Norms: those of `native_layer_norm` and `_fused_rms_norm`, and the sums of `add_norm`.


def _norm(launch: Launch) -> Count:
    affine = sum(launch.shape(name) is not None for name in ("weight", "bias"))
    added = launch.shape("residual") is not None
    return _shaped(launch, "x") * ((5 if launch.argument("centered") else 3) + affine + added)


def _roots(launch: Launch) -> Count:
    """One for each row."""
    shape = launch.shape("x")
    return elements(shape[:-1]) if shape else 0


def _norm_backward(launch: Launch) -> Count:
    # x̂ takes 2 and dx 7 (two sums, a product, the combination); without a mean 1 and 5. Each with a weight one more.
    weight = launch.shape("weight") is not None
    per_element = (9 if launch.argument("centered") else 6) + weight * (1 + 2)
    added = launch.shape("dsum") is not None
    return _shaped(launch, "x") * (per_element + bool(launch.argument("has_bias")) + added)


# Cross entropy of rows of logits.


@dataclass(frozen=True)
class _Rows:
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


def _rows_of_logits(launch: Launch) -> _Rows:
    smoothed, squared = (bool(launch.argument(name)) for name in ("smoothing", "z_loss"))
    return _Rows(_shaped(launch, "target"), _shaped(launch, "logits"), smoothed, squared)


def _rows_of_product(launch: Launch) -> _Rows:
    smoothed, squared = (bool(launch.argument(name)) for name in ("label_smoothing", "z_loss"))
    return _Rows(_shaped(launch, "target"), logits_of_product(launch), smoothed, squared)


def logits_of_product(launch: Launch) -> Count:
    """Elements of x · weightᵀ."""
    weight = launch.shape("weight")
    return _shaped(launch, "target") * weight[0] if weight else 0


def wanted_gradients(launch: Launch) -> tuple[int, int]:
    """1 for each of the gradients of x and of weight that is wanted, else 0."""
    needs = launch.argument("needs")
    assert isinstance(needs, list | tuple)
    return int(bool(needs[0])), int(bool(needs[1]))


def _linear_cross_entropy(launch: Launch) -> Count:
    loss, needs = _rows_of_product(launch), wanted_gradients(launch)
    products = 2 * loss.logits * _columns(launch) * (1 + sum(needs))
    return products + loss.loss() + (loss.slope() if any(needs) else 0)


def _linear_cross_entropy_exponentials(launch: Launch) -> Count:
    return _rows_of_product(launch).logits * (1 + any(wanted_gradients(launch)))


def _linear_cross_entropy_backward(launch: Launch) -> Count:
    # All of it again, and the incoming gradient times the results.
    return _linear_cross_entropy(launch) + elements(launch.result(0)) + elements(launch.result(1))


def _columns(launch: Launch) -> Count:
    shape = launch.shape("x")
    return shape[-1] if shape else 0


# Products and sums.


# x · weightᵀ, where a bias is what the accumulator starts from, and what follows for each element of it.


def _linear_gelu(launch: Launch) -> Count:
    return elements(launch.result()) * (2 * _columns(launch) + ACTIVATION[_kind(launch)][0])


def _linear_gelu_transcendentals(launch: Launch) -> Count:
    return elements(launch.result()) * ACTIVATION[_kind(launch)][1]


def _linear_dropout_add(launch: Launch) -> Count:
    return elements(launch.result()) * (2 * _columns(launch) + _dropped(launch) + 1)


def _softmax_backward(launch: Launch) -> Count:
    return _shaped(launch, "y") * (3 if launch.argument("log") else 4)


def _softmax_backward_exponentials(launch: Launch) -> Count:
    return _shaped(launch, "y") if launch.argument("log") else 0


def _cross_entropy(launch: Launch) -> Count:
    return _rows_of_logits(launch).loss()


def _cross_entropy_backward(launch: Launch) -> Count:
    return _rows_of_logits(launch).slope()


def _cross_entropy_exponentials(launch: Launch) -> Count:
    return _shaped(launch, "logits")


def _rotary(launch: Launch) -> Count:
    # A pair takes four products and two sums.
    return 3 * _shaped(launch, "q", "k")


def _weighted_sum_backward(launch: Launch) -> Count:
    wanted = int(bool(launch.argument("want_dx"))) + 2 * int(bool(launch.argument("want_dw")))
    return _shaped(launch, "x") * wanted


_TABLE = {
    "activation": _each("x", acts=True),
    "activation_backward": _each("x", slopes=True),
    "gated_activation": _each("gate", 1, acts=True),
    # dgate = (dy · up) · act'(gate), dup = dy · act(gate): each takes a product more than what it calls.
    "gated_activation_backward": _each("gate", 2, acts=True, slopes=True),
    "dropout_add": _each("x", 1, acts=True, drops=True),
    "dropout_add_backward": _each("dout", slopes=True, drops=True),
    "softmax": _each("x", 4, 1),
    "softmax_backward": Arithmetic(_softmax_backward, _softmax_backward_exponentials),
    "norm": Arithmetic(_norm, _roots),
    "add_norm": Arithmetic(_norm, _roots),
    "norm_backward": Arithmetic(_norm_backward, _nothing),
    "cross_entropy": Arithmetic(_cross_entropy, _cross_entropy_exponentials),
    "cross_entropy_backward": Arithmetic(_cross_entropy_backward, _cross_entropy_exponentials),
    "linear_cross_entropy": Arithmetic(_linear_cross_entropy, _linear_cross_entropy_exponentials),
    "linear_cross_entropy_backward": Arithmetic(_linear_cross_entropy_backward, _linear_cross_entropy_exponentials),
    # Nothing where the factor is 1, which is not known before the program runs.
    "scale_gradient_": _each("gradient", 1),
    "linear_gelu": Arithmetic(_linear_gelu, _linear_gelu_transcendentals),
    "linear_dropout_add": Arithmetic(_linear_dropout_add, _nothing),
    "weighted_sum": _each("x", 2),
    "weighted_sum_backward": Arithmetic(_weighted_sum_backward, _nothing),
    "embedding": _each("indices"),
    "embedding_backward": _each("dout", 1),
    "rotary": Arithmetic(_rotary, _nothing),
    "attention": Arithmetic(attention, attention_exponentials),
    "attention_backward": Arithmetic(attention_backward, attention_exponentials),
}
ARITHMETIC: dict[str, Arithmetic] = {f"tilewright.{name}": arithmetic for name, arithmetic in _TABLE.items()}
"""By `calls.operator_name`."""
