"""Dropout in compiled graphs on a GPU: eager's masks, eager's generator, and no mask in memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.contract import keeps_contract
from tilewright.backend import recording

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [(7, 13), (64, 33), (300, 768), (2048, 1030), (4096, 2048)]
"""One by one, in vectors of 2, of 8; several steps of PyTorch's kernel."""


class Block(nn.Module):
    """Two dropouts beside a norm and an activation, as a Transformer has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + F.dropout(self.linear(x), 0.1, self.training)
        return y + F.dropout(F.gelu(self.norm(y)), 0.3, self.training)


def generator_after(call: Callable[[], tuple[Tensor, ...]]) -> tuple[int, tuple[Tensor, ...]]:
    torch.cuda.manual_seed(0x1234_5678_9ABC)
    torch.cuda.default_generators[0].set_offset(12)
    result = call()
    return torch.cuda.default_generators[0].get_offset(), result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_masks_and_generator_are_eagers(size: tuple[int, int], dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first = F.dropout(x, 0.37)
        return first + 1, F.dropout(y.t(), 0.5) * 2, F.dropout(first[:, 1:], 0.25) - 1

    x, y = torch.ones(size, device=GPU, dtype=dtype), torch.ones(size[1], 7, device=GPU, dtype=dtype)
    offset, expected = generator_after(lambda: program(x, y))
    with recording() as compiled:
        call = torch.compile(program, backend="tilewright")
        moved, results = generator_after(lambda: call(x, y))
    assert compiled and moved == offset
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(64, 33), (2048, 768)], ids=str)
def test_a_block_keeps_the_numbers_contract_in_training(size: tuple[int, int], dtype: torch.dtype) -> None:
    model = Block(size[1]).to(GPU, dtype).train()
    inputs = torch.randn(size, device=GPU, dtype=dtype, requires_grad=True)
    keeps_contract(model, [inputs])


def test_no_mask_is_kept() -> None:
    model = Block(768).to(GPU).train()
    call = torch.compile(model, backend="tilewright")
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call(torch.randn(512, 768, device=GPU, requires_grad=True)).sum().backward()
    assert kept and torch.bool not in {x.dtype for x in kept}
