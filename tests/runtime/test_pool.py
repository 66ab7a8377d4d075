"""Pooled memory in autograd's hands."""

import torch
from torch import Tensor, nn

from tests.backend.compiling import compiled
from tilewright.measure.memory import peak_bytes
from tilewright.runtime.pool import SMALL


def test_autograd_adds_to_a_pooled_gradient_in_place() -> None:
    """A weight that a compiled product and eager code read, as where a head is tied to an embedding."""
    embedding, places = nn.Embedding(5000, 64), torch.arange(16)
    weight = embedding.weight
    nbytes = weight.numel() * weight.element_size()
    assert nbytes >= SMALL

    def scores(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).sum()

    head = compiled(scores)

    def step() -> None:
        head(embedding(places), weight).backward()
        embedding.zero_grad()

    for _ in range(4):
        step()
    assert peak_bytes(step) < 2.5 * nbytes, "the two gradients, and no third tensor for their sum"
    step()
    head(embedding(places), weight).backward()
    found, weight.grad = weight.grad, None
    scores(embedding(places), weight).backward()
    assert found is not None and weight.grad is not None
    torch.testing.assert_close(found, weight.grad)
