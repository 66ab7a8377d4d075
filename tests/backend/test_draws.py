"""Random draws that nothing reads: they are made all the same, so that later draws are eager's."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from tests.backend.compiling import compiled, tensors
from tests.contract import called, recorded

Draw = Callable[[torch.Tensor], object]
DRAWS: dict[str, Draw] = {
    "factories": lambda x: (torch.rand(100), torch.randn_like(x), torch.randperm(4)),
    "in place": lambda x: x.clone().normal_(),
    "of values": lambda x: (torch.bernoulli(x.sigmoid()), F.rrelu(x, training=True)),
    "dropout by PyTorch's mask": lambda x: F.dropout(x, 0.5),
    "dropout by a stream": lambda x: F.dropout(x.repeat(200, 40), 0.5),
}


@pytest.mark.parametrize("backward", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_that_nothing_reads_moves_the_generator(name: str, backward: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        DRAWS[name](x)
        return torch.rand(3), x * F.dropout(x, 0.3)

    found, mine = [], compiled(function, fullgraph=True)
    for run in (mine, function):
        x = torch.linspace(-1, 1, 42).view(6, 7).requires_grad_(backward)
        torch.manual_seed(3)
        results = run(x)
        if backward:
            results[1].sum().backward()
        found.append([*tensors(results), x.grad, torch.rand(2)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_forward_draws_once_and_backward_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return (x * torch.rand_like(x)).sin() * F.dropout(x, 0.5)

    mine, record = recorded(function)
    mine(torch.randn(6, 7, requires_grad=True)).sum().backward()
    assert len(called(record, "aten.rand")) == 2 and len(called(record, "keep_mask")) == 1
