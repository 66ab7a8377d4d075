"""Tilewright's own operators: what `kernels/` defines, each a hand-written kernel that no loop nest takes in.

They are named by text, since the kernels stand above this room; a test there holds that none is missing.
"""

from __future__ import annotations

from tilewright.operators.row import Row, declare


def _named(names: str) -> list[str]:
    return [f"tilewright.{name}.default" for name in names.split()]


COMPUTE = _named("attention_backward linear_cross_entropy linear_cross_entropy_backward linear_gelu")
# Attention may drop weights, and then it draws.
COMPUTE_AND_DRAW = _named("attention linear_dropout_add")
POINTWISE = _named("""
activation activation_backward cross_entropy_backward dropout_add_backward gated_activation
gated_activation_backward rotary
""")
DRAW_OR_WRITE = _named("dropout_add scale_gradient_")
REDUCTION = _named("cross_entropy softmax softmax_backward weighted_sum weighted_sum_backward")
NORM = _named("add_norm norm norm_backward")
LIBRARY = _named("embedding embedding_backward")
OWN = frozenset((*COMPUTE, *COMPUTE_AND_DRAW, *POINTWISE, *DRAW_OR_WRITE, *REDUCTION, *NORM, *LIBRARY))

declare(*(Row(name, "compute") for name in COMPUTE))
declare(*(Row(name, "compute", pure=False) for name in COMPUTE_AND_DRAW))
declare(*(Row(name, "pointwise") for name in POINTWISE))
declare(*(Row(name, "pointwise", pure=False) for name in DRAW_OR_WRITE))
declare(*(Row(name, "reduction") for name in REDUCTION))
# What is left of x - mean hangs on the rounding of x, as in PyTorch's own norms.
declare(*(Row(name, "reduction", discontinuous=True) for name in NORM))
declare(*(Row(name, "library") for name in LIBRARY))
