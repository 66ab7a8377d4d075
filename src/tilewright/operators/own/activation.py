"""Activations, gated ones, and their gradients, generated; what a kernel that applies one on its way counts for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tilewright.operators.activations import gelu, gelu_backward, silu, silu_backward
from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Formula, of_argument
from tilewright.operators.language import Value
from tilewright.operators.row import Call, own
from tilewright.operators.shapes import like

ACTIVATION: dict[object, tuple[int, int]] = {"none": (0, 0), "gelu": (4, 1), "gelu_tanh": (8, 1), "silu": (4, 1)}
"""FLOPs and transcendentals of act(x), an element: those of `gelu` and `silu` in ATen's rows."""
SLOPE: dict[object, tuple[int, int]] = {"none": (0, 0), "gelu": (9, 2), "gelu_tanh": (17, 1), "silu": (8, 1)}
"""The same of dy · act'(x): those of `gelu_backward` and `silu_backward`."""
NAMES = {"none": "", "gelu": "GELU", "relu": "ReLU", "silu": "SiLU"}
DROPOUT = 2
"""A comparison with p and a scaling, as `native_dropout` counts them; the numbers drawn are integer work."""


def kind_of(sizes: CallSizes, untold: str = "gelu") -> object:
    """Which activation; a trace records no strings, and then the one with the fewest FLOPs."""
    tanh = sizes.argument("approximate") == "tanh"
    return sizes.argument("kind") or ("gelu_tanh" if tanh else untold)


def dropped(sizes: CallSizes) -> int:
    """FLOPs of the dropout, an element; none where nothing is dropped."""
    return DROPOUT if sizes.argument("p") != 0.0 else 0


def acting(
    where: Formula,
    flops: int = 0,
    *,
    acts: bool = False,
    slopes: bool = False,
    drops: bool = False,
    untold: str = "gelu",
) -> Arithmetic:
    """Counts for each element of `where`, with those of the activation, its derivative and the dropout."""

    def count(which: int) -> Formula:
        def counted(sizes: CallSizes) -> Count:
            total = flops if which == 0 else 0
            total += ACTIVATION[kind_of(sizes, untold)][which] if acts else 0
            total += SLOPE[kind_of(sizes, untold)][which] if slopes else 0
            return (total + (dropped(sizes) if drops and which == 0 else 0)) * where(sizes)

        return counted

    return Arithmetic(count(0), count(1))


def role(*words: str, backward: bool = False) -> Callable[[Mapping[str, Any]], str]:
    """`GELU + gate`, `GELU backward`: `act` stands for the activation that the call names, `norm` for the norm."""

    def said(arguments: Mapping[str, Any]) -> str:
        kind = str(arguments.get("kind", "gelu")).partition("_")[0]
        norm = "LN" if arguments.get("centered") else "RMS norm"
        spelled = {"act": NAMES.get(kind, kind), "norm": norm}
        return " + ".join(filter(None, (spelled.get(word, word) for word in words))) + (" backward" if backward else "")

    return said


def _value(c: Call, x: Value, kind: str) -> Value:
    return silu(c, x) if kind == "silu" else gelu(c, x, kind.removeprefix("gelu_"))


def _slope(c: Call, dy: Value, x: Value, kind: str) -> Value:
    return silu_backward(c, dy, x) if kind == "silu" else gelu_backward(c, dy, x, kind.removeprefix("gelu_"))


X, GATE = of_argument("x"), of_argument("gate")

own(
    "activation(Tensor x, str kind) -> Tensor",
    "pointwise",
    _value,
    arithmetic=acting(X, acts=True),
    dtypes=("x",),
    role=role("act"),
)
own(
    "activation_backward(Tensor dy, Tensor x, str kind) -> Tensor",
    "pointwise",
    _slope,
    arithmetic=acting(X, slopes=True),
    dtypes=("x",),
    role=role("act", backward=True),
)
own(
    "gated_activation(Tensor gate, Tensor up, str kind) -> Tensor",
    "pointwise",
    lambda c, gate, up, kind: _value(c, gate, kind) * up,
    arithmetic=acting(GATE, 1, acts=True),
    dtypes=("gate",),
    role=role("act", "gate"),
)
# dgate = (dy · up) · act'(gate), dup = dy · act(gate): each takes a product more than what it calls.
own(
    "gated_activation_backward(Tensor dy, Tensor gate, Tensor up, str kind) -> (Tensor, Tensor)",
    "pointwise",
    lambda c, dy, gate, up, kind: (_slope(c, dy * up, gate, kind), dy * _value(c, gate, kind)),
    arithmetic=acting(GATE, 2, acts=True, slopes=True),
    shapes=like("gate", "up"),
    dtypes=("gate", "up"),
    role=role("act", "gate", backward=True),
)
