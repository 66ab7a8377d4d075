"""Compares one function of a suite with float64, by the numbers contract."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.measure.truth.proof import exact_in_any_dtype, run, truth_of
from tilewright.records.measurement import Verified
from tilewright.records.suite import Suite


def prove(suite: Suite, function: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> list[Verified]:
    """`prove_each` of one function."""
    (rows,) = prove_each(suite, [function], inputs, **options)
    return rows


def prove_each(
    suite: Suite,
    functions: Sequence[Callable[..., Any]],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
    backward: bool = True,
) -> list[list[Verified]]:
    """For each function, one row for each output of `function(*inputs)`, and with `backward` for each gradient.

    The truth is `suite.reference` in float64 on the same rounded inputs and random draws. The error of the suite's
    `eager` (or `torch`) variant sets the bound. All runs start from the same state of the generators. The truth runs
    last, and all results are kept: none lies where another was, which would fill its gaps.
    """
    ours = [run(function, inputs, seed, backward=backward, tangent=_tangent) for function in functions]
    truth = truth_of(suite, inputs, seed, backward=backward, tangent=_tangent)
    return [truth.compare(one) for one in ours]


def _tangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """The same incoming gradient for every implementation, drawn on its device."""
    generator = torch.Generator(result.device).manual_seed(1000 + index)
    return exact_in_any_dtype(torch.randn(result.shape, generator=generator, device=result.device)).to(result)
