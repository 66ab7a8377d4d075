"""A kernel against the truth: results and gradients of one variant of a suite, by the numbers contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.measure.contract import compare
from tilewright.records.measurement import Verified
from tilewright.records.suite import Suite


def prove(
    suite: Suite, function: Callable[..., Any], inputs: Sequence[Any], *, seed: int = 0, backward: bool = True
) -> list[Verified]:
    """One row for each result of `function(*inputs)`, and for each gradient where `backward`.

    The truth is `suite.reference` in float64 on the same rounded inputs and the same random draws; the
    yardstick is the suite's own `eager` (or `torch`) variant. All start from one state of the generators.
    """
    eager = next(variant for variant in suite.variants if variant.name in ("eager", "torch")).function
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
        ours = _run(function, inputs, seed, backward)
        theirs = _run(eager, inputs, seed, backward)
        torch.manual_seed(seed)
        draws = suite.draws(*inputs) if suite.draws else ()
        truth = _run(suite.reference, [_wide(value) for value in (*inputs, *draws)], seed, backward)
    rows = []
    for direction, parts in (("fwd", 0), ("bwd", 1)):
        for index, (result, yardstick, true) in enumerate(zip(ours[parts], theirs[parts], truth[parts], strict=True)):
            tensor = f"{'output' if parts == 0 else 'gradient'} {index}"
            rows.append(compare(result, yardstick, true, direction=direction, tensor=tensor))  # type: ignore[arg-type]
    return rows


def _run(
    function: Callable[..., Any], inputs: Sequence[Any], seed: int, backward: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    arguments = [
        value.detach().requires_grad_(value.requires_grad and backward) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]
    torch.manual_seed(seed)
    returned = function(*arguments)
    results = [returned] if isinstance(returned, torch.Tensor) else list(returned)
    wanted = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    if not wanted:
        return results, []
    ends = [result for result in results if result.requires_grad]
    gradients = torch.autograd.grad(ends, wanted, [_tangent(end, index) for index, end in enumerate(ends)])
    return [result.detach() for result in results], list(gradients)


def _tangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """The same incoming gradient for every implementation: drawn in fp32 on the CPU and rounded to bf16,
    which every dtype but fp16's smallest numbers holds exactly."""
    generator = torch.Generator().manual_seed(1000 + index)
    drawn = torch.randn(result.shape, generator=generator).bfloat16().to(torch.float16).double()
    return drawn.to(device=result.device, dtype=result.dtype)


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
