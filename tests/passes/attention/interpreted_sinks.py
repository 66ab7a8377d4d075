"""Attention sinks written out, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.attention.interpreted_capped import B, D, H, K, N, keep
from tests.passes.attention.interpreted_kernel import inferred, trained
from tests.passes.attention.spellings import Function, draw

pytestmark = pytest.mark.usefixtures("in_triton")


def beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """The weights as transformers' gpt-oss computes them."""
    column = sinks.reshape(1, -1, 1, 1).expand(B, -1, N, -1)
    together = torch.cat([scores, column], dim=-1)
    together = together - together.max(dim=-1, keepdim=True).values
    return F.softmax(together, dim=-1, dtype=together.dtype)[..., :-1]


def repeated(x: Tensor) -> Tensor:
    return x[:, :K][:, :, None].expand(B, K, H // K, N, D).reshape(B, H, N, D)


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(q, repeated(k).transpose(2, 3)) * D**-0.5
    scores = scores + torch.full((N, N), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
    return torch.matmul(beside(scores, sinks), repeated(v)).transpose(1, 2).contiguous()


def window(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """The softmax in fp32, no maximum taken off before it."""
    i, j = torch.arange(N)[:, None], torch.arange(N)
    scores = (q @ k.mT * D**-0.5).masked_fill((j > i) | (j < i - 3), -torch.inf)
    together = torch.cat((scores, sinks[:, None, None].expand(B, H, N, 1)), -1)
    return torch.softmax(together.float(), -1).to(q.dtype)[:, :, :, :-1] @ v


def padded(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kept: Tensor) -> Tensor:
    """One entry sees nothing: the sinks have all its weight."""
    return beside((q @ k.mT).masked_fill(~kept[:, None, None], -torch.inf), sinks) @ v


def padded_low(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, kept: Tensor) -> Tensor:
    return beside((q @ k.mT).masked_fill(~kept[:, None, None], -1e9), sinks) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    return beside(3 * torch.tanh(q @ k.mT / 3), sinks) @ v


UNMASKED: list[Function] = [gpt_oss, window, capped]
MASKED: list[Function] = [padded, padded_low]


@pytest.mark.parametrize("fn", [*UNMASKED, *MASKED], ids=lambda fn: fn.__name__)
def test_sinks_run_in_our_kernels(fn: Function) -> None:
    inputs = [x.requires_grad_() for x in draw(*[(B, H, N, D)] * 3, (H,), dtype=torch.bfloat16)]
    inputs += [keep(0)] if fn in MASKED else []
    compiled = trained(fn, inputs)
    assert compiled.targets("tilewright.attention.default") == 1
    assert compiled.targets("tilewright.attention_backward.default") == 1
    assert compiled.targets("bmm") == compiled.targets("softmax") == 0


def keeps_the_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    together = torch.cat([q @ k.mT, sinks[:, None, None].expand(B, H, N, 1)], -1)
    return torch.softmax(together, -1)[..., 1:] @ v


def reads_its_weight(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    weights = torch.softmax(torch.cat([q @ k.mT, sinks[:, None, None].expand(B, H, N, 1)], -1), -1)
    return weights[..., :-1] @ v + weights[..., -1:]


@pytest.mark.parametrize("fn", [keeps_the_sink, reads_its_weight], ids=lambda fn: fn.__name__)
def test_other_columns_stay_written_out(fn: Function) -> None:
    compiled = inferred(fn, draw(*[(B, H, N, D)] * 3, (H,), dtype=torch.bfloat16))
    assert compiled.targets("tilewright.attention") == 0
