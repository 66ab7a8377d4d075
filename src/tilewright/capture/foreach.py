"""Operators over lists of tensors (`torch._foreach_add`), traced as one call for each tensor.

    y = _foreach_add([a, b], [c, d])   →   y = [add(a, c), add(b, d)]

Each then has its row in the operator table and is fused with its neighbours: an optimizer's update becomes one kernel
for each parameter. A list that has a row of its own (`_foreach_norm`) stays one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.operators.table import row_of

_EACH = "CompositeExplicitAutograd"
"""PyTorch's dispatch key for the form of a list operator that calls an operator for each tensor."""

_WHOLE = ("_foreach_zero.default", "_foreach_addcdiv.Tensor", "_foreach_addcmul.Tensor")
"""List operators whose `_EACH` form writes in place or reads a tensor's values."""


@functools.cache
def by_tensor() -> dict[Any, Callable[..., Any]]:
    """Decompositions, as AOTAutograd takes them, of the list operators that write to none of their operands."""
    found: dict[Any, Callable[..., Any]] = {}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(_EACH):
        name, _, overload = qualified.removeprefix("aten::").partition(".")
        if name.startswith("_foreach_") and not name.endswith("_") and "out" not in overload:
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            if row_of(operator) is None and str(operator).removeprefix("aten.") not in _WHOLE:
                found[operator] = functools.partial(operator._op_dk, getattr(torch._C.DispatchKey, _EACH))
    return found
