"""The loop language: what the body of an operator is written in.

A body is a function over `Value`s that reads like the formula of the operator:

    def softmax(x, dim):
        e = exp(x - x.max(dim))
        return e / e.sum(dim)

Running a body records scalar operations (`Op`) in a `Trace`; broadcasting, views and reductions
are bookkeeping on axes (`axes.py`). `loops/` turns a trace into a nest, `emit/` prints the nest.
Nothing here knows a target.

Sums are carried in at least fp32 whatever the dtype of the operands; 16-bit floats compute in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tilewright.operators.axes import Group, group, regroup, size, unify
from tilewright.operators.axes import Unfusable as Unfusable

Scalar = bool | int | float
ReduceKind = Literal["sum", "prod", "max", "min", "any", "all"]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
COMPUTE_DTYPE = dict.fromkeys(("bfloat16", "float16", *FLOAT8), "float32")
"""Dtypes that compute wider than they are stored."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64", *FLOAT8})


def compute_dtype(dtype: str) -> str:
    return COMPUTE_DTYPE.get(dtype, dtype)


@dataclass(eq=False)
class Op:
    """One scalar operation, done at every point of the axes its value depends on.

    `name` is `load`, `draw`, `const`, `index`, `check`, `cast`, `round`, `reduce`, `scan` or a scalar function; `args`
    are positions in `Trace.ops`, of a load its indices and then where it reads, of a check its index and then where it
    counts; `detail` is what the name needs: the constant, the source of a load or of a draw, the kind and axes of a
    reduction or scan, the dtype a value is rounded to, the axes of an index, the extent that a checked index stays
    below.
    """

    name: str
    args: tuple[int, ...]
    dtype: str
    detail: Any = None
    approximate: bool = False
    """Whether 16 bits are enough: eager rounds the result of the operator that it belongs to to 16 bits."""
    exact: bool = False
    """Whether it belongs to an operator on which a discontinuous one depends, in this kernel or another."""


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor in memory that a trace loads: element strides per dimension."""

    key: object
    dtype: str
    dims: tuple[Group, ...]
    strides: tuple[int, ...]
    offset: int = 0
    """Elements before the first one."""
    by: tuple[int, ...] = ()
    """Element strides of the load's first operands, which are indices computed in the nest."""


@dataclass(frozen=True)
class Philox:
    """How PyTorch's GPU generator numbers the elements of a draw: `kernels/dropout_add/generator.py` says it."""

    vector: int
    """Neighbouring elements that a thread takes at once."""
    threads: int
    """Threads of PyTorch's kernel."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Random numbers, one for each position along `axes`, drawn in row-major order from the stream at `key`."""

    key: object
    axes: Group
    below: int
    """True where the number, a whole one of 53 bits, or of 32 from a GPU's generator, is below this."""
    philox: Philox | None = None
    """How a GPU's generator numbers elements, its state being seed and offset; None for the CPU's generator."""
    skip: int = 0
    """Advance of the generator's offset before the draw."""


@dataclass
class Trace:
    """Everything recorded while the bodies of one region run, in execution order."""

    ops: list[Op] = field(default_factory=list)
    approximate: bool = False
    """Whether the operations recorded from now on may be approximate (`Op.approximate`)."""
    exact: bool = False
    """Whether a discontinuous operator depends on them (`Op.exact`)."""
    of_any_size: bool = False
    """Whether the kernel is to have one form at all sizes, with checks that some of them need."""
    dims: set[tuple[Group, ...]] = field(default_factory=set)
    """Those of all values; no axis may run along two of one (`refuse_diagonal`), also not once more are unified."""

    def emit(self, name: str, args: Sequence[Value], dtype: str, dims: tuple[Group, ...], detail: Any = None) -> Value:
        self.ops.append(Op(name, tuple(a.id for a in args), dtype, detail, self.approximate, self.exact))
        return Value(self, len(self.ops) - 1, dtype, dims)

    def load(self, key: object, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> Value:
        """The elements of a tensor in memory; a stride counts elements, an expanded axis has stride 0."""
        dims = tuple(group(extent) for extent in shape)
        source = Source(key, dtype, dims, tuple(strides))
        return self.emit("load", (), compute_dtype(dtype), dims, source)

    def const(self, value: Scalar, dtype: str, dims: tuple[Group, ...] = ()) -> Value:
        return self.emit("const", (), dtype, dims, value)

    def full(self, value: Scalar, dtype: str, shape: Sequence[int]) -> Value:
        return self.const(value, compute_dtype(dtype), tuple(group(extent) for extent in shape))

    def draw(
        self,
        stream: Value,
        shape: Sequence[int],
        order: Sequence[int],
        below: int,
        philox: Philox | None = None,
        skip: int = 0,
    ) -> Value:
        """Whether each element's random number is below `below`; numbers go to elements along the
        dimensions in `order`, the last one fastest. `stream` is the state that the draw begins with."""
        source = self.ops[stream.id].detail
        if not isinstance(source, Source):
            raise Unfusable("a draw begins with a state in memory")
        dims = tuple(group(extent) for extent in shape)
        axes = tuple(axis for d in order for axis in dims[d])
        return self.emit("draw", (), "bool", dims, Drawn(source.key, axes, below, philox, skip))

    def arange(self, extent: int) -> Value:
        """0, 1, …, extent - 1 as int64."""
        dims = (group(extent),)
        return self.emit("index", (), "int64", dims, dims[0])


def broadcast(*shapes: tuple[Group, ...]) -> tuple[Group, ...]:
    """Right-aligned broadcasting; dimensions that meet are unified."""
    rank = max((len(s) for s in shapes), default=0)
    out: list[Group] = []
    for position in range(-rank, 0):
        met: Group = ()
        for dims in shapes:
            if -position > len(dims) or size(dims[position]) == 1:
                continue
            if met:
                unify(met, dims[position])
            else:
                met = dims[position]
        out.append(met)
    return tuple(out)


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor inside a nest: `dtype` is what it computes in, `dims` the axes it runs over."""

    trace: Trace
    id: int
    dtype: str
    dims: tuple[Group, ...]

    def __post_init__(self) -> None:
        self.trace.dims.add(self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size(g) for g in self.dims)

    def lift(self, other: Value | Scalar) -> Value:
        """A Python scalar as a constant of this value's dtype."""
        return other if isinstance(other, Value) else self.trace.const(other, self.dtype)

    def _call(self, name: str, *others: Value | Scalar, dtype: str | None = None) -> Value:
        args = [self, *(self.lift(other) for other in others)]
        return self.trace.emit(name, args, dtype or self.dtype, broadcast(*(a.dims for a in args)))

    def __add__(self, other: Value | Scalar) -> Value:
        return self._call("add", other)

    def __sub__(self, other: Value | Scalar) -> Value:
        return self._call("sub", other)

    def __mul__(self, other: Value | Scalar) -> Value:
        return self._call("mul", other)

    def __truediv__(self, other: Value | Scalar) -> Value:
        return self._call("div", other)

    def __radd__(self, other: Scalar) -> Value:
        return self.lift(other) + self

    def __rsub__(self, other: Scalar) -> Value:
        return self.lift(other) - self

    def __rmul__(self, other: Scalar) -> Value:
        return self.lift(other) * self

    def __rtruediv__(self, other: Scalar) -> Value:
        return self.lift(other) / self

    def __neg__(self) -> Value:
        return self._call("neg")

    def __lt__(self, other: Value | Scalar) -> Value:
        return self._call("lt", other, dtype="bool")

    def __le__(self, other: Value | Scalar) -> Value:
        return self._call("le", other, dtype="bool")

    def __gt__(self, other: Value | Scalar) -> Value:
        return self._call("gt", other, dtype="bool")

    def __ge__(self, other: Value | Scalar) -> Value:
        return self._call("ge", other, dtype="bool")

    def eq(self, other: Value | Scalar) -> Value:
        return self._call("eq", other, dtype="bool")

    def ne(self, other: Value | Scalar) -> Value:
        return self._call("ne", other, dtype="bool")

    def __and__(self, other: Value) -> Value:
        return self._call("and", other)

    def __or__(self, other: Value) -> Value:
        return self._call("or", other)

    def __xor__(self, other: Value) -> Value:
        return self._call("xor", other)

    def cast(self, dtype: str) -> Value:
        """Converted to a storage dtype, with the rounding that storing there would do."""
        to = compute_dtype(dtype)
        value = self if self.dtype == to else self.trace.emit("cast", (self,), to, self.dims)
        return value.rounded(dtype)

    def to_compute(self, dtype: str) -> Value:
        """Converted to the dtype that `dtype` computes in, without rounding to storage."""
        to = compute_dtype(dtype)
        return self if self.dtype == to else self.trace.emit("cast", (self,), to, self.dims)

    def rounded(self, dtype: str) -> Value:
        """Rounded to a float of 8 or 16 bits as eager would between two operators; else unchanged."""
        if dtype not in COMPUTE_DTYPE:
            return self
        return self.trace.emit("round", (self,), self.dtype, self.dims, dtype)

    # Reductions. `dims` None means all; the reduced dimensions stay with size 1 unless dropped.

    def reduce(self, kind: ReduceKind, dims: Sequence[int] | int | None, keepdim: bool = True) -> Value:
        rank = len(self.dims)
        wanted = range(rank) if dims is None else ([dims] if isinstance(dims, int) else dims)
        chosen = {d % rank for d in wanted} if rank else set()
        axes = tuple(axis for d in sorted(chosen) for axis in self.dims[d])
        kept = tuple(() if d in chosen else g for d, g in enumerate(self.dims) if keepdim or d not in chosen)
        if not axes:
            return Value(self.trace, self.id, self.dtype, kept)
        return self.trace.emit("reduce", (self,), self.dtype, kept, (kind, axes))

    def scan(self, kind: ReduceKind, dim: int) -> Value:
        """For each place along `dim`, the reduction of all elements up to it; a 0-d value stays."""
        axes = self.dims[dim] if self.dims else ()
        return self.trace.emit("scan", (self,), self.dtype, self.dims, (kind, axes)) if axes else self

    def sum(self, dims: Sequence[int] | int | None = None, keepdim: bool = True) -> Value:
        return self.reduce("sum", dims, keepdim)

    def max(self, dims: Sequence[int] | int | None = None, keepdim: bool = True) -> Value:
        return self.reduce("max", dims, keepdim)

    def min(self, dims: Sequence[int] | int | None = None, keepdim: bool = True) -> Value:
        return self.reduce("min", dims, keepdim)

    def index(self, dim: int) -> Value:
        """The position along `dim`, int64; a 0-d value has the one position 0."""
        if not self.dims:
            return self.trace.const(0, "int64")
        return self.trace.emit("index", (), "int64", self.dims, self.dims[dim])

    def checked(self, extent: int) -> Value:
        """This index, which must be at least 0 and below `extent`: a kernel that meets another one fails."""
        return self.trace.emit("check", (self,), self.dtype, self.dims, extent)

    # Views: index arithmetic only, nothing is computed.

    def _as(self, dims: tuple[Group, ...]) -> Value:
        return Value(self.trace, self.id, self.dtype, dims)

    def view(self, shape: Sequence[int]) -> Value:
        return self._as(regroup(self.dims, shape))

    def permute(self, order: Sequence[int]) -> Value:
        return self._as(tuple(self.dims[d] for d in order))

    def expand(self, shape: Sequence[int]) -> Value:
        missing = len(shape) - len(self.dims)
        old = ((),) * missing + self.dims
        return self._as(tuple(group(want) if size(g) == 1 else g for want, g in zip(shape, old, strict=True)))

    def unsqueeze(self, dim: int) -> Value:
        at = dim % (len(self.dims) + 1)
        return self._as((*self.dims[:at], (), *self.dims[at:]))

    def squeeze(self, dims: Sequence[int]) -> Value:
        rank = len(self.dims)
        gone = {d % rank for d in dims if size(self.dims[d]) == 1} if rank else set()
        return self._as(tuple(g for d, g in enumerate(self.dims) if d not in gone))


def where(condition: Value, yes: Value | Scalar, no: Value | Scalar) -> Value:
    """`yes` where the condition holds, else `no`; the other branch's NaN does not leak."""
    kind = yes if isinstance(yes, Value) else no
    assert isinstance(kind, Value)
    args = [condition, kind.lift(yes), kind.lift(no)]
    return condition.trace.emit("where", args, kind.dtype, broadcast(*(a.dims for a in args)))


def call(name: str, x: Value, *others: Value | Scalar) -> Value:
    """A scalar function by name: exp, log, tanh, erf, floor, maximum, pow, …"""
    return x._call(name, *others)


def ordered(x: Value) -> Value:
    """int32 that compare as fp32 `x` does: zeros are equal, and NaN is above all others. On a GPU only."""
    return x._call("ordered", dtype="int32")


def predicate(name: str, x: Value) -> Value:
    """A scalar predicate by name: isnan, isinf, not."""
    return x._call(name, dtype="bool")
