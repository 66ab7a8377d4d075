"""Terms that all keys of an attention share receive a gradient of exactly zero, whatever rounding does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from tilewright.compile.stages import TORCH_LEVEL
from tilewright.hardware.target import target_named

B, S, D, H = 2, 7, 12, 3


def split(x: Tensor) -> Tensor:
    heads: Tensor = x.unflatten(-1, (H, -1))
    return heads.transpose(1, 2)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1) @ v


class Heads(nn.Module):
    """Attention over heads, with a way of its own to make the keys from `x` [B, S, D]."""

    def __init__(self, keys: Callable[[Heads, Tensor], Tensor], attend: Callable[..., Tensor] = written_out) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.query, self.key, self.value = (nn.Linear(D, D) for _ in range(3))
        self.shift = nn.Parameter(torch.randn(D))
        self.keys, self.attend = keys, attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(split(self.query(x)), split(self.keys(self, x)), split(self.value(x)))


ZERO: dict[str, tuple[Callable[[Heads, Tensor], Tensor], str]] = {
    "the bias of a linear map": (lambda m, x: m.key(x), "key.bias"),
    "of a product of matrices": (
        lambda m, x: F.linear(x.flatten(0, 1), m.key.weight, m.key.bias).view(B, S, D),
        "key.bias",
    ),
    "a term added afterwards": (lambda m, x: F.linear(x, m.key.weight) + m.shift, "shift"),
    "the same added first": (lambda m, x: m.shift + F.linear(x, m.key.weight), "shift"),
    "one of two": (lambda m, x: m.key(x) + F.linear(x, m.query.weight, m.shift), "shift"),
    "a term of each batch and head": (lambda m, x: m.key(x) + m.shift.expand(B, 1, D), "shift"),
}
OTHER: dict[str, tuple[Callable[[Heads, Tensor], Tensor], str]] = {
    "a term that differs from key to key": (
        lambda m, x: F.linear(x, m.key.weight) + m.shift * torch.arange(S).view(S, 1),
        "shift",
    ),
    "keys that are normalised after it": (lambda m, x: F.normalize(m.key(x), dim=-1), "key.bias"),
    "positions and features swapped": (lambda m, x: m.key(x).mT.reshape(B, S, D), "key.bias"),
    "a map that is read elsewhere too": (lambda m, x: m.key(x) * m.key(x).sum(), "key.bias"),
}
FUSED: dict[str, Callable[..., Tensor]] = {
    "written out": written_out,
    "called": F.scaled_dot_product_attention,
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
}


def compiled(model: Heads, graphs: list[GraphModule]) -> Callable[[Tensor], Tensor]:
    """The model, run as PyTorch runs its rewritten graph, which is put into `graphs`."""

    def rewrite(gm: GraphModule, _: object) -> GraphModule:
        TORCH_LEVEL.run(gm.graph, target_named("cpu"))
        gm.graph.lint()
        gm.recompile()
        graphs.append(gm)
        return gm

    torch._dynamo.reset()
    run: Callable[[Tensor], Tensor] = torch.compile(model, backend=rewrite, fullgraph=True)
    return run


def gradients(model: Heads, x: Tensor, dtype: torch.dtype, rewrite: bool) -> dict[str, Tensor]:
    """Gradients of the parameters, for one random gradient of the output."""
    model = model.to(dtype)
    out = (compiled(model, []) if rewrite else model)(x.to(dtype))
    torch.manual_seed(5)
    names, leaves = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(out, leaves, torch.randn(out.shape).to(dtype), allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


PAIRS = {*zip(ZERO, itertools.cycle(FUSED)), *((next(iter(ZERO)), way) for way in FUSED)}
"""Each way to make keys in one attention, in turn, and the first in all."""


@pytest.mark.parametrize(("keys", "way"), sorted(PAIRS))
def test_a_term_of_all_keys_has_no_gradient(keys: str, way: str) -> None:
    make, name = ZERO[keys]
    x = torch.randn(B, S, D)
    found = gradients(Heads(make, FUSED[way]), x, torch.bfloat16, rewrite=True)
    plain = gradients(Heads(make, FUSED[way]), x, torch.float64, rewrite=False)
    assert plain[name].abs().max() < 1e-14
    assert found[name].count_nonzero() == 0 and found[name].shape == plain[name].shape
    assert found.keys() == plain.keys()
    # A bias beside the term may be another such term.
    for other in found.keys() - {name}:
        assert (found[other].count_nonzero() == 0) == (plain[other].abs().max() < 1e-14), other


@pytest.mark.parametrize("keys", OTHER.values(), ids=OTHER)
def test_what_moves_the_weights_keeps_its_gradient(keys: tuple[Callable[[Heads, Tensor], Tensor], str]) -> None:
    make, name = keys
    x = torch.randn(B, S, D)
    found, plain = (gradients(Heads(make), x, torch.float64, rewrite) for rewrite in (True, False))
    assert plain[name].abs().max() > 1e-6
    for other, gradient in plain.items():
        assert torch.allclose(found[other], gradient, rtol=1e-9, atol=1e-12), other


def test_the_output_is_that_of_the_keys_with_their_bias() -> None:
    model, x = Heads(ZERO["the bias of a linear map"][0]).double(), torch.randn(B, S, D).double()
    assert torch.allclose(compiled(model, [])(x), model(x), rtol=1e-12, atol=1e-14)


def test_nan_stays_nan() -> None:
    model = Heads(ZERO["the bias of a linear map"][0])
    x = torch.randn(B, S, D)
    x[0, 0, 0] = math.nan
    assert gradients(model, x, torch.float32, rewrite=True)["key.bias"].isnan().all()


def test_inference_is_left_alone() -> None:
    graphs: list[GraphModule] = []
    with torch.no_grad():
        compiled(Heads(ZERO["the bias of a linear map"][0]), graphs)(torch.randn(B, S, D))
    parameters = graphs[0].graph.find_nodes(op="placeholder")
    assert not [node for node in graphs[0].graph.nodes if node.target is torch.sub and node.args[0] in parameters]
