"""The numbers contract bounds a tensor's error against float64 by eager's.

With `truth` computed in float64 from the same (rounded) inputs, a floating-point result must have

    ‖result - truth‖ / ‖truth‖  ≤  2 · ‖eager - truth‖ / ‖truth‖ + 4 · ulp(1)
    max |result - truth|        ≤  2 · max |eager - truth|       + 4 · ulp(max |truth|)

with ulp that of the result's dtype. NaN and both infinities appear exactly where eager has them. Integers and bools
must be eager's. Where a result misses a bound, the largest error of eager and of other runs of its operators, which
differ from eager by rounding alone, takes the place of eager's (`conditioning.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tilewright.records.measurement import Verified

if TYPE_CHECKING:
    import torch

TIMES_EAGER = 2.0
ULPS = 4.0


def told_apart(value: float, bound: float, style: str = "e", digits: int = 1) -> tuple[str, str]:
    """Both as text, with as many more digits as it takes to tell them apart.

    >>> told_apart(0.5, 0.25), told_apart(1.0002e-3, 1e-3), told_apart(9000.4, 9000.0, "f", 0)
    (('5.0e-01', '2.5e-01'), ('1.0002e-03', '1.0000e-03'), ('9,000.4', '9,000.0'))
    """
    texts = f"{value:,.{digits}{style}}", f"{bound:,.{digits}{style}}"
    return (
        texts if texts[0] != texts[1] or value == bound or digits > 16 else told_apart(value, bound, style, digits + 1)
    )


def ulp(value: float, dtype: torch.dtype) -> float:
    """The spacing of `dtype` at |value|; below the smallest normal number, the smallest subnormal.

    >>> import torch
    >>> ulp(1.5, torch.float32) == 2**-23, ulp(5.0, torch.bfloat16) == 2**-5, ulp(0.0, torch.half) == 2**-24
    (True, True, True)
    """
    import torch

    info = torch.finfo(dtype)
    normal = min(max(abs(value), info.tiny), info.max)
    return float(info.eps * 2.0 ** (math.frexp(normal)[1] - 1))


def compare(
    result: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    others: Sequence[torch.Tensor] = (),
    *,
    direction: Literal["fwd", "bwd"] = "fwd",
    tensor: str = "output",
) -> Verified:
    """The errors of one tensor, their bounds, and whether they keep the contract.

    `result` and `eager` have the same shape and dtype, otherwise the error is infinite; `truth` has that shape, in
    float64 if the dtype is floating (complex tensors are compared as pairs of reals). Where
    eager or the truth is not finite, only the positions of NaN and Inf are compared. `others` are results that differ
    from eager's by rounding alone: the worst of them and eager sets the bounds.
    """
    import torch

    if result.shape != eager.shape or result.dtype != eager.dtype:
        inf = math.inf
        return Verified(direction, tensor, _name(result), inf, 0.0, inf, 0.0, 0.0, 0.0, ok=False)
    if result.is_complex():
        result, eager, truth, *others = (torch.view_as_real(t.resolve_conj()) for t in (result, eager, truth, *others))
    if not result.is_floating_point():
        return _exact(result, eager, direction, tensor)
    wide, eager_wide, truth = result.detach().double(), eager.detach().double(), truth.detach().double()
    counted = eager_wide.isfinite() & truth.isfinite()
    true = truth.where(counted, 0.0)
    size, largest = _norm(true), _largest(true)
    off, eager_off = ((t - truth).where(counted, 0.0) for t in (wide, eager_wide))
    error, eager_error = _relative(off, size), _relative(eager_off, size)
    most, eager_most = _largest(off), _largest(eager_off)
    spread = [(t.detach().double() - truth).where(counted, 0.0).nan_to_num(0.0, 0.0, 0.0) for t in others]
    bound = TIMES_EAGER * max(eager_error, *(_relative(t, size) for t in spread), 0.0)
    bound += ULPS * torch.finfo(result.dtype).eps
    most_bound = TIMES_EAGER * max(eager_most, *map(_largest, spread), 0.0) + ULPS * ulp(largest, result.dtype)
    # A NaN where eager is finite makes both comparisons false.
    ok = error <= bound and most <= most_bound and _same_specials(wide, eager_wide)
    return Verified(direction, tensor, _name(result), error, eager_error, most, eager_most, bound, most_bound, ok)


def _exact(result: torch.Tensor, eager: torch.Tensor, direction: Literal["fwd", "bwd"], tensor: str) -> Verified:
    wrong = result.ne(eager)
    share = wrong.double().mean().item() if wrong.numel() else 0.0
    most = _largest(result.double() - eager.double())
    return Verified(direction, tensor, _name(result), share, 0.0, most, 0.0, 0.0, 0.0, ok=share == 0.0)


def _same_specials(result: torch.Tensor, eager: torch.Tensor) -> bool:
    import torch

    kinds = (torch.isnan, torch.isposinf, torch.isneginf)
    return all(torch.equal(kind(result), kind(eager)) for kind in kinds)


def _norm(x: torch.Tensor) -> float:
    """The Euclidean norm, scaled so that squares neither overflow nor underflow."""
    largest = _largest(x)
    if largest == 0.0 or not math.isfinite(largest):
        return largest
    return largest * math.sqrt((x / largest).square().sum().item())


def _relative(off: torch.Tensor, size: float) -> float:
    error = _norm(off)
    if size == 0.0:
        return 0.0 if error == 0.0 else math.inf
    return error / size


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
