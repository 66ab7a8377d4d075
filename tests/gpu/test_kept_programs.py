"""Programs on a GPU that an earlier compilation kept: generated and hand-written kernels, dropout, CUDA graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tilewright.capture import program_cache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kept_programs")]


class Block(nn.Module):
    """Attention, norms, dropout and a loss over many classes: hand-written kernels take part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(256), nn.LayerNorm(256)
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.head = nn.Linear(256, 5003)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (h.unflatten(-1, (4, 64)).transpose(1, 2) for h in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = x + F.dropout(self.out(mixed), 0.1, self.training)
        logits = self.head(self.last(h))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def steps(mode: str | None, *, training: bool) -> list[list[torch.Tensor]]:
    """Four steps of a block from one state of the generators: loss, logits and gradients of each."""
    torch.manual_seed(1)
    model = Block().cuda().bfloat16().train(training)
    x, labels = torch.randn(2, 128, 256).cuda().bfloat16(), torch.randint(0, 5003, (2, 128)).cuda()
    run: Callable[..., Any] = compiled(model, mode=mode)
    found = []
    for _ in range(4):
        model.zero_grad()
        with torch.set_grad_enabled(training):
            loss, logits = run(x, labels)
        if training:
            loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([loss.detach().clone(), logits.detach().clone(), *gradients])
    return found


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_program_is_found_again(mode: str | None, training: bool) -> None:
    first = steps(mode, training=training)
    assert program_cache.counts == {"compiled": 1, "kept": 1}
    torch._dynamo.reset()
    program_cache.counts.clear()
    second = steps(mode, training=training)
    assert program_cache.counts == {"loaded": 1}
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_of_the_kind_finds_it() -> None:
    first = steps(None, training=True)
    torch._dynamo.reset()
    program_cache.counts.clear()
    with torch.cuda.device(1):
        second = steps(None, training=True)
    assert program_cache.counts == {"loaded": 1}
    torch.testing.assert_close([[x.cpu() for x in step] for step in second], [[x.cpu() for x in s] for s in first])
