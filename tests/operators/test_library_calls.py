"""Calls that stay PyTorch's have rows, draw what eager draws, and give eager's values and gradients."""

from pathlib import Path

import torch
from torch import Tensor

from tests.contract import recorded
from tests.tables import rows, value

TABLE = Path(__file__).with_name("library_calls.txt")
DRAWS, SYSTEMS, OTHERS = (
    [value(row["call"]) for row in rows(TABLE, section)] for section in ("draws", "systems", "others")
)


def _gradient(results: list[Tensor], x: Tensor) -> Tensor:
    ends = [t for t in results if t.requires_grad]
    (found,) = torch.autograd.grad(ends, x, [torch.ones_like(t) for t in ends])
    return found


def test_library_calls_have_rows_and_are_eagers() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def program(x: Tensor) -> list[Tensor]:
        system = x.mT @ x + 5 * torch.eye(5)
        return [*(f(x) for f in DRAWS), *(f(system) for f in SYSTEMS), *(f(x) for f in OTHERS)]

    call, record = recorded(program)
    torch.manual_seed(3)
    ours, state = call(x), torch.get_rng_state()
    torch.manual_seed(3)
    eager = program(x)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(_gradient(ours, x), _gradient(eager, x), rtol=1e-4, atol=1e-5)
    assert record.fallbacks == []
