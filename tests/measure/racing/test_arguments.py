"""The arguments of a race are ready before the candidates' clocks run."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.measure.racing.arguments import Arguments
from tilewright.measure.racing.candidate import RacedVariant
from tilewright.measure.timing.benchmark import WARM_UP
from tilewright.measure.timing.stopwatch import stopwatch_for
from tilewright.records.suite import Variant, Work, Workload


def made(rows: int, device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor]:
    return (torch.randn(rows, 8, device=device, generator=generator).requires_grad_(),)


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


WORKLOAD = Workload("3x8 fp32", (3, 8), "float32", partial(made, 3), {"fwd+bwd": Work(1)})


class Seen(TorchDispatchMode):
    """The operators that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_call_with_its_backward_draws_nothing_while_it_is_timed() -> None:
    candidates = [
        RacedVariant(Variant(name, "torch", double), "fwd+bwd", arguments, stopwatch_for("cpu"))
        for arguments in [Arguments(WORKLOAD, "cpu")]
        for name in ("first", "second")
    ]
    for candidate in candidates:
        candidate.call(WARM_UP)
    for number in (0, 1):
        for candidate in candidates:
            with torch.enable_grad():
                run = candidate.ready(number)
                with Seen() as seen:
                    run()
            assert sorted(set(seen.names)) == ["add"], f"{candidate.variant.name} in round {number}"


def test_the_gradient_of_a_round_is_one_for_all_and_another_in_the_next() -> None:
    arguments, result = Arguments(WORKLOAD, "cpu"), torch.zeros(3, 8)
    drawn = []
    for number in (0, 0, 1):
        arguments.fill(number)
        handed = arguments.tangent(result, 0)
        assert torch.equal(handed, arguments.tangent_of(number)(result, 0))
        drawn.append(handed.clone())
        handed.zero_()
        assert not arguments.intact()
        arguments.scramble()
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("result", [torch.zeros(5), torch.zeros(3, 8, dtype=torch.float64)], ids=["shape", "dtype"])
def test_a_result_unlike_the_last_gets_a_gradient_like_itself(result: torch.Tensor) -> None:
    arguments = Arguments(WORKLOAD, "cpu")
    arguments.fill(0)
    arguments.tangent(torch.zeros(3, 8), 0)
    handed = arguments.tangent(result, 0)
    assert handed.shape == result.shape and handed.dtype == result.dtype
