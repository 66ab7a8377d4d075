"""Random draws that a kernel makes itself, from a saved state of PyTorch's generator.

    stream = draw_stream([N, M])             takes N·M numbers from the CPU's generator, and keeps where they began
    mask = keep(stream, [N, M], order, p)    True where the element's number is below p

The first moves the generator and is a call of its own; the second depends on nothing but the stream
and the element's place, so that any kernel can compute it, and backward again (`kernels/dropout_add/stream.py`).
On a GPU the state is seed and offset (`kernels/dropout_add/philox.py`):

    state = draw_philox(like, advance)       the offset moves on by `advance`
    mask = keep_philox(state, [N, M], order, p, …)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from tilewright.operators.arithmetic import NOTHING, per_result
from tilewright.operators.language import Philox, Value
from tilewright.operators.row import ALL, Call, Row, Traffic, calls, declare
from tilewright.operators.shapes import factory, like, same

STREAM = "tilewright.draw_stream.default"
KEEP = "tilewright.keep.default"
DRAW_PHILOX = "tilewright.draw_philox.default"
KEEP_PHILOX = "tilewright.keep_philox.default"


def threshold(p: float) -> int:
    """The least integer k for which the number k·2⁻⁵³ is not below `p`.

    >>> threshold(0.5) == 2**52, threshold(1.0) == 2**53
    (True, True)
    """
    return math.ceil(math.ldexp(p, 53))


def keep(c: Call, stream: Value, size: Sequence[int], order: Sequence[int], p: float) -> Value:
    return c.trace.draw(stream, c.shape, order, threshold(p))


def word_threshold(p: float) -> int:
    """The least 32-bit word x of PyTorch's GPU generator whose number fp32(x·2⁻³² + 2⁻³³) is not below fp32(`p`).

    >>> word_threshold(0.5) == 2**31 - 64
    True
    """
    keep = np.float32(p)
    low, high = 0, 2**32
    while low < high:
        middle = (low + high) // 2
        uniform = np.float32(middle) * np.float32(2.0**-32) + np.float32(2.0**-33)
        low, high = (middle + 1, high) if uniform < keep else (low, middle)
    return low


def keep_philox(
    c: Call, state: Value, size: Sequence[int], order: Sequence[int], p: float, vector: int, threads: int, skip: int
) -> Value:
    return c.trace.draw(state, c.shape, order, word_threshold(p), Philox(vector, threads), skip)


UNREAD = Traffic(unread=(ALL,))

draws = partial(calls, operator_class="random", pure=False)
draws(
    "native_dropout.default(input, p, train)",
    arithmetic=per_result(2),
    shapes=same,
    dtypes=("input", "bool"),
    role="dropout",
)
draws(
    """
    bernoulli.default(self, generator)
    bernoulli.Tensor(self, p, generator)
    poisson.default(self, generator)
    """,
    shapes=same,
    arithmetic=NOTHING,
    discontinuous=True,
)
draws(
    """
    normal.Tensor_Tensor(mean, std, generator)
    normal.Tensor_float(mean, std, generator)
    normal.float_Tensor(mean, std, generator)
    """,
    arithmetic=per_result(2),
    priced=False,
)
draws(
    "rrelu_with_noise_functional.default(self, noise, lower, upper, training, generator)",
    shapes=like("self", "noise"),
    dtypes=("self", "self"),
    arithmetic=per_result(2),
)
calls(
    "rrelu_with_noise_backward.default(grad_output, self, noise, lower, upper, training, self_is_result)",
    "library",
    arithmetic=per_result(2),
)
draws("bernoulli.p(self, p, generator)", shapes=same, traffic=UNREAD, arithmetic=NOTHING)
draws(
    """
    rand_like.default(self, ...)
    randn_like.default(self, ...)
    randint_like.default(self, high, ...)
    randint_like.low_dtype(self, low, high, ...)
    exponential.default(self, lambd, generator)
    geometric.default(self, p, generator)
    cauchy.default(self, median, sigma, generator)
    log_normal.default(self, mean, std, generator)
    normal_functional.default(self, mean, std, generator)
    uniform.default(self, from, to, generator)
    """,
    shapes=same,
    traffic=UNREAD,
    priced=False,
    arithmetic=NOTHING,
)
draws(
    """
    rand.default(size, ...)
    randn.default(size, ...)
    randint.default(high, size, ...)
    randint.low(low, high, size, ...)
    randperm.default(n, ...)
    """,
    shapes=factory,
    priced=False,
    arithmetic=NOTHING,
)
draws("multinomial.default(self, num_samples, replacement, generator)", shapes=None)
# In place, as traces have them.
draws(
    """
    random_.default(self, generator)
    random_.from(self, from, to, generator)
    uniform_.default(self, from, to, generator)
    normal_.default(self, mean, std, generator)
    bernoulli_.float(self, p, generator)
    """,
    shapes=same,
    traffic=UNREAD,
    arithmetic=NOTHING,
)
declare(
    # The mask of a dropout, drawn as PyTorch would draw it now (`kernels/dropout_add/stream.py`).
    Row("keep_mask(like, p)", "random", shapes=None, arithmetic=NOTHING, pure=False),
    Row(f"{STREAM}(SymInt[] size) -> Tensor", "random", shapes=None, arithmetic=NOTHING, pure=False),
    Row(
        f"{KEEP}(Tensor stream, SymInt[] size, int[] order, float p) -> Tensor",
        "pointwise",
        keep,
        promotion="none",
        arithmetic=NOTHING,
    ),
    Row(
        f"{DRAW_PHILOX}(Tensor like, int advance) -> Tensor",
        "random", shapes=None, traffic=UNREAD, arithmetic=NOTHING, pure=False,
    ),
    Row(
        f"{KEEP_PHILOX}(Tensor state, int[] size, int[] order, float p, int vector, int threads, int skip) -> Tensor",
        "pointwise", keep_philox, promotion="none", arithmetic=NOTHING,
    ),
)  # fmt: skip
