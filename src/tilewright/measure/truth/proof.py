"""Compares the results and gradients of a suite's variant with float64, by the numbers contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewright.measure.truth.contract import compare
from tilewright.records.measurement import Verified
from tilewright.records.suite import Suite, Variant

Tangent = Callable[[torch.Tensor, int], torch.Tensor]
"""(result, its index among the results that require a gradient) → the incoming gradient of that result."""

ERROR_BASELINES = ("eager", "torch")


@dataclass(frozen=True)
class RunOutput:
    """The outputs of one run, and the gradients of the inputs that require one."""

    outputs: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """The results of eager and of the suite's reference in float64 for one set of inputs."""

    eager: RunOutput
    true: RunOutput

    def compare(self, ours: RunOutput) -> list[Verified]:
        """One row for each output and each gradient; a missing or additional one breaks the contract."""
        outputs = _rows("fwd", "output", ours.outputs, self.eager.outputs, self.true.outputs)
        return outputs + _rows("bwd", "gradient", ours.gradients, self.eager.gradients, self.true.gradients)


def error_baseline(suite: Suite) -> Variant:
    """The variant whose error bounds that of the others: `eager`, or `torch` if there is none."""
    return next(variant for variant in suite.variants if variant.name in ERROR_BASELINES)


def truth_of(suite: Suite, inputs: Sequence[Any], seed: int, *, backward: bool, tangent: Tangent) -> Truth:
    """The results of eager and of float64 for these inputs, with generators seeded with `seed`."""
    eager = run(error_baseline(suite).function, inputs, seed, backward=backward, tangent=tangent)
    draws: tuple[torch.Tensor, ...] = ()
    if suite.draws:
        with _seeded(inputs, seed), torch.no_grad():
            draws = suite.draws(*inputs)
    wide = [_wide(value) for value in (*inputs, *draws)]
    return Truth(eager, run(suite.reference, wide, seed, backward=backward, tangent=tangent))


def run(
    function: Callable[..., Any], inputs: Sequence[Any], seed: int, *, backward: bool, tangent: Tangent
) -> RunOutput:
    """Call `function` on detached inputs with all generators seeded; their state is restored afterwards."""
    arguments = [
        value.detach().requires_grad_(value.requires_grad and backward) if isinstance(value, torch.Tensor) else value
        for value in inputs
    ]
    with _seeded(inputs, seed), torch.set_grad_enabled(backward):
        results = tensors_of(function(*arguments))
        gradients = gradients_of(results, arguments, tangent) if backward else []
    return RunOutput([result.detach() for result in results], gradients)


def tensors_of(returned: Any) -> list[torch.Tensor]:
    """The tensors that a variant returned, as a list."""
    return [returned] if isinstance(returned, torch.Tensor) else list(returned)


def gradients_of(results: Sequence[torch.Tensor], arguments: Sequence[Any], tangent: Tangent) -> list[torch.Tensor]:
    """Gradients of the arguments that require one."""
    wanted = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
    if not wanted:
        return []
    ends = [result for result in results if result.requires_grad]
    return list(torch.autograd.grad(ends, wanted, [tangent(end, index) for index, end in enumerate(ends)]))


def _rows(
    direction: Literal["fwd", "bwd"],
    kind: str,
    ours: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    true: Sequence[torch.Tensor],
) -> list[Verified]:
    if len(ours) != len(eager):
        inf = float("inf")
        name = f"{len(ours)} {kind}s for {len(eager)}"
        return [Verified(direction, name, "", inf, 0.0, inf, 0.0, 0.0, 0.0, ok=False)]
    return [
        compare(result, theirs, truth, direction=direction, tensor=f"{kind} {index}")
        for index, (result, theirs, truth) in enumerate(zip(ours, eager, true, strict=True))
    ]


@contextmanager
def _seeded(inputs: Sequence[Any], seed: int) -> Iterator[None]:
    """Seed every generator, and restore their states afterwards."""
    devices = {value.device for value in inputs if isinstance(value, torch.Tensor) and value.is_cuda}
    with torch.random.fork_rng(sorted({device.index or 0 for device in devices})):
        torch.manual_seed(seed)
        yield


def exact_in_any_dtype(drawn: torch.Tensor) -> torch.Tensor:
    """`drawn` rounded to values that bf16 and fp16 represent, so that all dtypes start from the same values."""
    return drawn.bfloat16().to(torch.float16)


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
