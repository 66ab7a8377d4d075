"""The operators that are traced as those of their formulas, or as one call for each tensor of a list.

    y = _euclidean_dist(a, b)   →   y = sqrt(clamp_min(matmul(a', b'), 0))    a', b': with squares of their rows beside

PyTorch runs such a formula as so many kernels; here what is around the product is fused. `cdist` of many rows calls it.

    y = pow(mask, True)         →   y = clone(mask)                           ones_like for False

PyTorch's fake tensors take this power of booleans for integers; its kernels give booleans.

    y = linalg_vector_norm(x, 2, [-1])   →   y = linalg_vector_norm(x, 2, [1])

PyTorch 2.11's fake tensors keep a dimension of one element that is counted from the end.

    y = _efficientzerotensor([2, 3])   →   y = zeros([2, 3])

Forward-mode differentiation makes tangents of zeros without memory, which no kernel can read.

    y = _foreach_add([a, b], [c, d])   →   y = [add(a, c), add(b, d)]

Each then has its row in the operator table and is fused with its neighbours: an optimizer's update becomes one kernel
for each parameter. A list that has a row of its own (`_foreach_norm`) stays one call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.capture.result_strides import laid_out_as_eager
from tilewright.operators.table import row_of


@functools.cache
def decompositions(*, on_cpu: bool = True) -> dict[Any, Callable[..., Any]]:
    """By operator, as AOTAutograd takes them; list operators among them, and `on_cpu` those of `result_strides`."""
    from torch._decomp import get_decompositions

    distances = dict(get_decompositions([torch.ops.aten._euclidean_dist]))
    laid_out = dict(laid_out_as_eager()) if on_cpu else {}
    own = {
        torch.ops.aten.pow.Tensor_Scalar: _power,
        torch.ops.aten.linalg_vector_norm.default: _norm,
        torch.ops.aten._efficientzerotensor.default: torch.zeros,
    }
    return by_tensor() | distances | laid_out | own


def _power(x: torch.Tensor, exponent: complex) -> Any:
    if x.dtype is not torch.bool or not isinstance(exponent, bool):
        return NotImplemented
    return x.clone() if exponent else torch.ones_like(x)


def _norm(x: torch.Tensor, order: complex = 2, dims: Sequence[int] | None = None, *rest: Any, **options: Any) -> Any:
    if not dims or not x.dim() or min(dims) >= 0:
        return NotImplemented
    return torch.ops.aten.linalg_vector_norm.default(x, order, [dim % x.dim() for dim in dims], *rest, **options)


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
