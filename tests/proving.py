"""Compares one function of a suite with float64, by the numbers contract."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.measure.truth.proof import exact_in_any_dtype, run, truth_of
from tilewright.records.measurement import Verified
from tilewright.records.suite import Suite


def broken(
    suite: Suite, inputs: Sequence[Any], *functions: Callable[..., Any], seed: int = 0, backward: bool = True
) -> list[Verified]:
    """The outputs of each `function(*inputs)`, and with `backward` the gradients, that break the contract.

    The truth is `suite.reference` in float64 on the same rounded inputs and random draws. The error of the suite's
    `eager` (or `torch`) variant sets the bound. All runs start from the same state of the generators. The truth runs
    last, and all results are kept: none lies where another was, which would fill its gaps.
    """
    ours = [run(function, inputs, seed, backward=backward, tangent=_tangent) for function in functions]
    truth = truth_of(suite, inputs, seed, backward=backward, tangent=_tangent)
    rows = [(number, row) for number, one in enumerate(ours) for row in truth.compare(one)]
    return [replace(row, tensor=f"{row.tensor} of function {number}") for number, row in rows if not row.ok]


def _tangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """The same incoming gradient for every implementation, drawn on its device."""
    generator = torch.Generator(result.device).manual_seed(1000 + index)
    return exact_in_any_dtype(torch.randn(result.shape, generator=generator, device=result.device)).to(result)
