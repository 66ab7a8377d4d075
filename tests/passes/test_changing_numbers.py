"""Numbers of Python that change from call to call: two programs serve all values, and give eager's results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tilewright.backend import recording

Function = Callable[[Tensor, Tensor, float], Tensor]
FUNCTIONS: dict[str, Function] = {
    "add": lambda x, y, s: torch.add(x, y, alpha=s),
    "add_": lambda x, y, s: (x * 1).add_(y, alpha=-s),
    "sub of a number": lambda x, y, s: torch.sub(x * y, s, alpha=3),
    "addcmul_": lambda x, y, s: (x * 1).addcmul_(x, y, value=s),
    "addcdiv": lambda x, y, s: torch.addcdiv(x, x, y.square() + 1, value=-s),
    "clamp": lambda x, y, s: (x * y).clamp(-s, s),
    "clamp_": lambda x, y, s: (x * y).clamp_(max=s) + (x + y).clamp_(min=-s),
    "masked_fill": lambda x, y, s: x.masked_fill(y > 0, s).sin(),
    "pow": lambda x, y, s: x.abs() ** s + y.abs().pow(s),
    "fill_": lambda x, y, s: torch.empty_like(x).fill_(s) * y,
    "leaky_relu": lambda x, y, s: F.leaky_relu(x, s) + F.leaky_relu(x * y, s, inplace=True),
    "lerp": lambda x, y, s: torch.lerp(x, y, s),
    "full": lambda x, y, s: torch.full((5, 1), s, dtype=x.dtype) * x + torch.full_like(y, s),
}
VALUES = 0.25, 1.0, 0.75, 2.5, 0.1, 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_two_programs_serve_all_values(dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor, s: float) -> dict[str, Tensor]:
        return {name: each(x, y, s) for name, each in FUNCTIONS.items()}

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 7, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    run = compiled(function)
    with torch.no_grad(), recording() as record:
        for value in VALUES:
            found, eager, exact = run(x, y, value), function(x, y, value), function(x.double(), y.double(), value)
            for name, each in found.items():
                limit = 2 * (eager[name] - exact[name]).norm() + 4 * torch.finfo(dtype).eps * exact[name].norm()
                assert each.dtype == dtype and (each - exact[name]).norm() <= limit, name
    assert len(record.graphs) == 2


def test_gradients_of_a_bounded_power() -> None:
    def function(x: Tensor, s: float) -> Tensor:
        return x.square().add(1).pow(s).clamp(max=4 * s)

    run = compiled(function)
    with recording() as record:
        for value in VALUES:
            x = torch.linspace(-2, 2, 33, requires_grad=True)
            (found,), (expected,) = (torch.autograd.grad(each(x, value).sum(), x) for each in (run, function))
            torch.testing.assert_close(found, expected)
    assert len(record.graphs) == 4


def test_parameters_are_averaged_where_gradients_are_off() -> None:
    """As an average of weights is kept: writes of parameters, by a number that changes from step to step."""

    def step(average: nn.Module, model: nn.Module, decay: float, x: Tensor) -> Tensor:
        loss = model(x).square().sum()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.mul_(decay).add_(theirs, alpha=1 - decay)
        return loss + decay

    def network() -> nn.Module:
        torch.manual_seed(1)
        return nn.Linear(3, 4)

    run, x = compiled(step), torch.ones(2, 3)
    ours, eagers, models = network(), network(), [nn.Linear(3, 4), nn.Linear(3, 4)]
    models[1].load_state_dict(models[0].state_dict())
    with recording() as record:
        for decay in VALUES:
            loss, expected = run(ours, models[0], decay, x), step(eagers, models[1], decay, x)
            loss.backward(), expected.backward()
            torch.testing.assert_close(loss, expected)
    assert record.fallbacks == []
    for number, pairs in enumerate(zip([ours, models[0]], [eagers, models[1]], strict=True)):
        for mine, theirs in zip(*(network.parameters() for network in pairs), strict=True):
            torch.testing.assert_close(mine, theirs)
            if number:
                torch.testing.assert_close(mine.grad, theirs.grad)
