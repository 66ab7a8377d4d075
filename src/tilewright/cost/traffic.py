"""Which elements one operator's kernel must read and write, where that is not all of its operands."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.cost.arithmetic import Count, Launch, elements

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


GATHERED: dict[str, tuple[str, Callable[[Launch], Count]]] = {
    "embedding": ("weight", _rows_of_weight),
    "index": ("self", _of_result),
    "index_select": ("self", _of_result),
    "gather": ("self", _of_result),
    "nll_loss_forward": ("self", _of_targets),
}
"""The argument that an operator reads at given places only, and how many elements those are.

Places that repeat are read from the cache or again; which do is not known before the program runs, so
each counts, up to the whole tensor.
"""
