"""Attention: [B, H, S, d] queries, keys and values, in a window, over a cache, or over packed sequences."""

from __future__ import annotations

from tilewright.operators.arithmetic import CallSizes, Count, Formula, UnknownCost, elements
from tilewright.operators.attention import attention_arithmetic, attention_shapes, gradient_shapes, pairs_twice
from tilewright.operators.row import Traffic, own
from tilewright.operators.shapes import CallAxes, Result

OPTIONS = (
    "Tensor? mask, Tensor? slopes, Tensor? starts_q, Tensor? starts_k, float scale, SymInt? left, SymInt? right, "
    "float softcap, float dropout, SymInt longest_q, SymInt longest_k, bool deterministic, str impl"
)
QKV = ("q", "k", "v")


def _pairs_twice(sizes: CallSizes) -> Count:
    """Two for each pair of a query and a key that it sees, in every head."""
    if sizes.shape("starts_q") is not None:
        raise UnknownCost("how long packed sequences are is in a tensor")
    query, key = sizes.shape("q"), sizes.shape("k")
    assert query is not None and key is not None
    heads, rows, keys = elements(query[:-2]), query[-2], key[-2]
    left, right = sizes.argument("left"), sizes.argument("right")
    if left is None and right in (None, 0):
        # The last query stands at the last key: where there are more keys, each query sees those in front of all.
        before = rows * (keys - rows) if right == 0 and sizes.number(keys - rows) > 0 else 0
        return heads * (rows * keys + before) if right == 0 else 2 * heads * rows * keys
    return 2 * heads * _within(sizes.only_number(rows), sizes.only_number(keys), left, right)


def _within(rows: int, keys: int, left: object, right: object) -> int:
    """(query, key) pairs of a window; the last query is aligned with the last key."""
    most = _up_to(rows, keys, right) if isinstance(right, int) else rows * keys
    return max(most - _up_to(rows, keys, -left - 1), 0) if isinstance(left, int) else most


def _up_to(rows: int, keys: int, places: int) -> int:
    """Pairs whose key is at most so many places after the query."""

    def summed(last: int) -> int:
        # The numbers up to `last`, none below 0 and none above `keys`.
        inside = min(max(last, 0), keys)
        return inside * (inside + 1) // 2 + keys * max(last - keys, 0)

    return summed(keys + places) - summed(keys - rows + places)


def _keys_within(name: str) -> Formula:
    """Elements of the keys or values that some query's window reaches: the last ones."""

    def count(sizes: CallSizes) -> Count:
        query, shape, left = sizes.shape("q"), sizes.shape(name), sizes.argument("left")
        assert query is not None and shape is not None
        reached = query[-2] + max(left, -sizes.number(query[-2])) if isinstance(left, int) else shape[-2]
        return elements(shape[:-2]) * reached * shape[-1]

    return count


def _forward(call: CallAxes) -> Result:
    """The output, the log-sum-exp of each row, of fp32 a second one in fp64, and the state of the dropout."""
    found = attention_shapes(QKV)(call)
    if call.known is not None:
        return found
    rows = call.tensor("q")[:-1]
    exact, drops = call.dtype_of("q") == "float32", bool(call.arguments.get("dropout"))
    assert isinstance(found, list)
    return [*found, rows if exact else None, call.names.unknown_shape((2,)) if drops else None]


def _windows(call: CallAxes) -> Result:
    query, value = call.tensor("q"), call.tensor("v")
    call.names.unify(query[-1], call.tensor("k")[-1])
    call.names.unify(call.tensor("k")[-2], value[-2])
    return (*query[:-1], value[-1])


def _windows_backward(call: CallAxes) -> Result:
    return [*(call.tensor(name) for name in QKV), call.axes("mask") if call.arguments.get("want_dmask") else None]


WINDOW = Traffic(gathered={"k": _keys_within("k"), "v": _keys_within("v")})
own(
    f"attention(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    "compute",
    # It may drop weights, and then it draws.
    pure=False,
    arithmetic=attention_arithmetic(_pairs_twice, QKV),
    shapes=_forward,
    traffic=WINDOW,
    dtypes=("q", "float32", "float64", "int64"),
    role="attention",
)
own(
    "attention_prefix(Tensor q, Tensor k, Tensor v, Tensor? prefix, int more, bool else_all, Tensor zeros, "
    "float scale) -> Tensor",
    "compute",
    arithmetic=attention_arithmetic(_pairs_twice, QKV),
    shapes=attention_shapes(QKV),
    traffic=Traffic(unread=("zeros",)),
    dtypes=("q",),
    role="attention",
)
own(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"Tensor lse64, Tensor state, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "compute",
    arithmetic=attention_arithmetic(_pairs_twice, QKV, backward=True),
    shapes=gradient_shapes(QKV),
    traffic=WINDOW,
    dtypes=QKV,
    role="attention backward",
)
own(
    "window_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor",
    "compute",
    arithmetic=attention_arithmetic(pairs_twice(QKV), QKV),
    shapes=_windows,
    dtypes=("q",),
    role="attention",
)
own(
    "window_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool want_dmask) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    "compute",
    arithmetic=attention_arithmetic(pairs_twice(QKV), QKV, backward=True),
    shapes=_windows_backward,
    dtypes=(*QKV, "mask"),
    role="attention backward",
)
