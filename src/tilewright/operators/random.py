"""Random draws that a kernel makes itself, from a saved state of PyTorch's generator.

    stream = draw_stream([N, M])             takes N·M numbers from the generator, and keeps where they began
    mask = keep(stream, [N, M], order, p)    True where the element's number is below p

The first moves the generator and is a call of its own; the second depends on nothing but the stream
and the element's place, so that any kernel can compute it, and backward again. `passes/draws.py` defines both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.operators.language import Value
from tilewright.operators.row import Call, Row, declare

STREAM = "tilewright.draw_stream.default"
KEEP = "tilewright.keep.default"


def threshold(p: float) -> int:
    """The least integer k for which the number k·2⁻⁵³ is not below `p`.

    >>> threshold(0.5) == 2**52, threshold(1.0) == 2**53
    (True, True)
    """
    return math.ceil(math.ldexp(p, 53))


def keep(c: Call, stream: Value, size: Sequence[int], order: Sequence[int], p: float) -> Value:
    return c.trace.draw(stream, c.shape, order, threshold(p))


declare(Row(STREAM, "random", pure=False), Row(KEEP, "pointwise", keep, promotion="none"))
