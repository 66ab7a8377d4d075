"""Constants, positions, and single elements put in place: tensors made of little or nothing."""

from __future__ import annotations

from tilewright.operators.arithmetic import NOTHING
from tilewright.operators.language import FLOATS, Scalar, Unfusable, Value, compute_dtype, where
from tilewright.operators.row import ALL, Call, RowFields, Traffic, body
from tilewright.operators.shapes import CallAxes, Result, factory, same

UNREAD = Traffic(unread=(ALL,))


def _filled(call: CallAxes) -> Result:
    """Sizes from the call's arguments; a recorded `out=` call has them in its last operand."""
    return call.operands[-1] if call.known is None and call.operands else factory(call)


def over_self(call: CallAxes) -> Result:
    """The axes of `self`, to which `src` is broadcast."""
    return call.broadcast(call.tensor("self"), call.tensor("src"))


# Each is `empty` and a fill, which a profiler records instead of it.
MADE: RowFields = {"promotion": "none", "arithmetic": NOTHING, "shapes": factory, "traffic": UNREAD, "priced": False}
LIKE: RowFields = {**MADE, "shapes": same}
ZERO: RowFields = {"promotion": "none", "arithmetic": NOTHING, "shapes": same, "dtypes": ("self",), "traffic": UNREAD}
FILL: RowFields = {**ZERO, "traffic": Traffic(unread=("self",))}
COPY: RowFields = {**FILL, "shapes": over_self, "part": "copy"}

body("full.default(size, fill_value, ...)", **MADE)(lambda c, shape, value, **_: c.trace.full(value, c.dtype, shape))
body("zeros.default(size, ...)", **MADE)(lambda c, shape, **_: c.trace.full(0, c.dtype, shape))
body("ones.default(size, ...)", **MADE)(lambda c, shape, **_: c.trace.full(1, c.dtype, shape))
body("scalar_tensor.default(s, ...)", **MADE)(lambda c, value, **_: c.trace.full(value, c.dtype, ()))
body("new_zeros.default(self, size, ...)", **MADE)(lambda c, x, shape, **_: c.trace.full(0, c.dtype, shape))
body("new_ones.default(self, size, ...)", **MADE)(lambda c, x, shape, **_: c.trace.full(1, c.dtype, shape))
body("new_full.default(self, size, fill_value, ...)", **MADE)(
    lambda c, x, shape, value, **_: c.trace.full(value, c.dtype, shape)
)
body("full_like.default(self, fill_value, ...)", **LIKE)(lambda c, x, value, **_: c.trace.full(value, c.dtype, c.shape))
body("zeros_like.default(self, ...)", **LIKE)(lambda c, x, **_: c.trace.full(0, c.dtype, c.shape))
body("ones_like.default(self, ...)", **LIKE)(lambda c, x, **_: c.trace.full(1, c.dtype, c.shape))

body("zero.default(self)", **ZERO)(lambda c, x: c.trace.full(0, c.dtype, c.shape))
body("fill.Scalar(self, value)", **FILL)(lambda c, x, value: c.trace.full(value, c.dtype, c.shape))
body("fill.Tensor(self, value)", **FILL)(lambda c, x, value: value.to_compute(c.dtype).expand(c.shape))
body("copy.default(self, src, non_blocking)", **COPY)(
    lambda c, x, source, *_: source.to_compute(c.dtype).expand(c.shape)
)

RANGE: RowFields = {"promotion": "none", "arithmetic": NOTHING, "shapes": _filled, "traffic": UNREAD}


@body("arange.start_step(start, end, step, ...)", **RANGE)
def arange(c: Call, start: Scalar, end: Scalar, step: Scalar = 1, **_: object) -> Value:
    position = c.trace.arange(c.shape[0]).to_compute(c.dtype)
    return position * step + start


body("arange.default(end, ...)", **RANGE)(lambda c, end, **_: arange(c, 0, end))
body("arange.start(start, end, ...)", **RANGE)(lambda c, start, end, **_: arange(c, start, end))


@body("linspace.default(start, end, steps, ...)", **RANGE)
def linspace(c: Call, start: Scalar, end: Scalar, steps: int, **_: object) -> Value:
    """Counted from the nearer end, as PyTorch does."""
    if c.dtype not in FLOATS:
        raise Unfusable("it counts in integers")
    step = (end - start) / max(steps - 1, 1)
    place = c.trace.arange(c.shape[0])
    ahead, behind = (number.to_compute(c.dtype) * step for number in (place, (steps - 1) - place))
    return where(place < max(steps // 2, 1), ahead + start, end - behind)


@body("eye.m(n, m, ...)", **MADE)
def eye(c: Call, rows: int, columns: int, **_: object) -> Value:
    diagonal = c.trace.arange(rows).unsqueeze(1).eq(c.trace.arange(columns))
    return where(diagonal, c.trace.const(1, compute_dtype(c.dtype)), 0)


body("eye.default(n, ...)", **MADE)(lambda c, rows, **_: eye(c, rows, rows))


@body(
    "scatter.src(self, dim, index, src)",
    "scatter.value(self, dim, index, value)",
    promotion="none",
    arithmetic=NOTHING,
    shapes=same,
    priced=False,
)
def scatter(c: Call, x: Value, dim: int, index: Value, source: Value | Scalar) -> Value:
    """One element along `dim` replaced, as the gradient of a maximum is put where the maximum was."""
    shape = list(c.shape)
    if shape:
        shape[dim] = 1
    one = index.shape == tuple(shape) and (not isinstance(source, Value) or source.shape == index.shape)
    if not one:
        raise Unfusable("it scatters more than one element along the axis")
    if isinstance(source, Value):
        source = source.to_compute(c.dtype)
    place = index.checked(x.shape[dim]) if shape else index
    return where(x.index(dim).eq(place), source, x)
