"""Layout operators: the same elements under other indices. In a nest they cost nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.operators.language import Unfusable, Value
from tilewright.operators.row import Call, Row, body, declare


@body("view.default", "_unsafe_view.default", "reshape.default", operator_class="layout", promotion="none")
def view(c: Call, x: Value, shape: Sequence[int]) -> Value:
    return x.view(c.shape)


@body("permute.default", operator_class="layout", promotion="none")
def permute(c: Call, x: Value, order: Sequence[int]) -> Value:
    return x.permute(order)


@body("transpose.int", operator_class="layout", promotion="none")
def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    order = list(range(len(x.dims)))
    if order:
        order[a], order[b] = order[b], order[a]
    return x.permute(order)


@body("t.default", operator_class="layout", promotion="none")
def t(c: Call, x: Value) -> Value:
    return x.permute(list(reversed(range(len(x.dims)))))


@body("expand.default", operator_class="layout", promotion="none")
def expand(c: Call, x: Value, shape: Sequence[int], **_: object) -> Value:
    return x.expand(c.shape)


@body("unsqueeze.default", operator_class="layout", promotion="none")
def unsqueeze(c: Call, x: Value, dim: int) -> Value:
    return x.unsqueeze(dim)


@body("squeeze.dim", "squeeze.dims", operator_class="layout", promotion="none")
def squeeze(c: Call, x: Value, dims: Sequence[int] | int) -> Value:
    return x.squeeze([dims] if isinstance(dims, int) else dims)


@body("squeeze.default", operator_class="layout", promotion="none")
def squeeze_all(c: Call, x: Value) -> Value:
    return x.squeeze(range(len(x.dims)))


@body("alias.default", "detach.default", "lift_fresh_copy.default", operator_class="layout", promotion="none")
def same(c: Call, x: Value) -> Value:
    return x


@body("slice.Tensor", operator_class="layout", promotion="none")
def slice_(c: Call, x: Value, *_: object, **__: object) -> Value:
    if x.shape == c.shape:
        return x
    raise Unfusable("a slice of a computed value needs that value in memory")


# Views that only ever apply to a tensor in memory.
declare(
    *(
        Row(f"aten.{name}", "layout")
        for name in [
            "select.int",
            "split.Tensor",
            "split_with_sizes.default",
            "chunk.default",
            "unbind.int",
            "diagonal.default",
            "as_strided.default",
            "narrow.default",
            "unfold.default",
            "view.dtype",
            "view_as_real.default",
            "real.default",
        ]
    )
)
