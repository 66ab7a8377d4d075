"""Softmax and log softmax of rows."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, elements, per_operand
from tilewright.operators.row import own
from tilewright.operators.shapes import pointwise, same

own("softmax(Tensor x, bool log) -> Tensor", "reduction", arithmetic=per_operand(4, 1), shapes=same, dtypes=("x",))
own(
    "softmax_backward(Tensor y, Tensor dy, bool log) -> Tensor",
    "reduction",
    arithmetic=Arithmetic(
        lambda sizes: elements(sizes.shape("y")) * (3 if sizes.argument("log") else 4),
        lambda sizes: elements(sizes.shape("y")) if sizes.argument("log") else 0,
    ),
    shapes=pointwise,
    dtypes=("y",),
)
