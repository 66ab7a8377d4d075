"""Which elements one operator's kernel must read and write, where that is not all of its operands."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.cost.arithmetic import Count, Formula, Launch, elements
from tilewright.cost.own import logits_of_product, wanted_gradients

ALL = frozenset({"*"})

UNREAD: dict[str, frozenset[str]] = {
    # These look at their operand's shape only.
    **dict.fromkeys(("full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like"), ALL),
    **dict.fromkeys(("new_empty", "new_empty_strided", "new_full", "new_zeros", "new_ones"), ALL),
    "zero": ALL,
    "fill": frozenset({"self"}),
    "copy": frozenset({"self"}),
    "copy_": frozenset({"self"}),
    "bernoulli.p": frozenset({"self"}),
    "native_layer_norm_backward": frozenset({"bias"}),
    "nll_loss_backward": frozenset({"self"}),
}
"""Tensor arguments of an operator that its kernel never reads."""

UNWRITTEN = frozenset(["empty", "empty_like", "new_empty", "new_empty_strided"])
"""Operators that only reserve memory."""


def _rows_of_weight(launch: Launch) -> Count:
    weight = launch.shape("weight")
    return elements(launch.shape("indices")) * elements(weight[1:] if weight else ())


def _of_result(launch: Launch) -> Count:
    return elements(launch.result())


def _of_targets(launch: Launch) -> Count:
    return elements(launch.shape("target"))


def _keys_within(name: str) -> Callable[[Launch], Count]:
    """Those of the keys or values that some query's window reaches: the last ones."""

    def count(launch: Launch) -> Count:
        query, shape, left = launch.shape("q"), launch.shape(name), launch.argument("left")
        assert query is not None and shape is not None
        reached = query[-2] + max(left, -launch.number(query[-2])) if isinstance(left, int) else shape[-2]
        return elements(shape[:-2]) * reached * shape[-1]

    return count


GATHERED: dict[tuple[str, str], Callable[[Launch], Count]] = {
    ("embedding", "weight"): _rows_of_weight,
    ("index", "self"): _of_result,
    ("index_select", "self"): _of_result,
    ("gather", "self"): _of_result,
    ("nll_loss_forward", "self"): _of_targets,
    ("tilewright.embedding", "weight"): _rows_of_weight,
    **{
        (f"tilewright.attention{direction}", name): _keys_within(name)
        for direction in ("", "_backward")
        for name in ("k", "v")
    },
}
"""By operator and argument: what is read at given places only, and how many elements those are.

Places that repeat are read from the cache or again; which do is not known before the program runs, so
each counts, up to the whole tensor.
"""


def _read_between(launch: Launch) -> Count:
    # The loss reads the logits; the gradient of x reads theirs and the weight, that of the weight theirs and x.
    of_x, of_weight = wanted_gradients(launch)
    again = of_x * elements(launch.shape("weight")) + of_weight * elements(launch.shape("x"))
    return logits_of_product(launch) * (1 + of_x + of_weight) + again


def _written_between(launch: Launch) -> Count:
    return logits_of_product(launch) * (1 + any(wanted_gradients(launch)))


def _unscaled(launch: Launch) -> Count:
    return elements(launch.result(0)) + elements(launch.result(1))


BETWEEN: dict[str, tuple[Formula, Formula]] = {
    "tilewright.linear_cross_entropy": (_read_between, _written_between),
    "tilewright.linear_cross_entropy_backward": (
        lambda launch: _read_between(launch) + _unscaled(launch),
        lambda launch: _written_between(launch) + _unscaled(launch),
    ),
}
"""Elements that an operator of several kernels reads and writes between the first and the last of them.

Those of the dtype of its first operand. Where a kernel runs once for each chunk of the tokens, it counts as one.
"""
