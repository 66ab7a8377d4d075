"""Attention written out by hand or by a model, planned for an H200: what runs, and that no product of scores does."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.passes.attention.spellings import draw
from tests.passes.attention.test_recognise import check_numbers, value_and_gradients
from tests.passes.graphs import planned
from tilewright.hardware.target import target_named
from tilewright.passes.attention.recognise import recognise_attention

pytest.importorskip("triton")
H200 = target_named("h200")
B, H, S, D = 2, 16, 256, 64
SCALE = D**-0.5
Function = Callable[..., Any]


def tril() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril()


class GptNeo(nn.Module):
    """A mask in a buffer, and the causal one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.ones(1, 1, 2 * S, 2 * S, dtype=torch.bool).tril())

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
        lowest = torch.tensor(torch.finfo(scores.dtype).min, dtype=scores.dtype)
        scores = torch.where(self.bias[:, :, :S, :S], scores, lowest)
        scores = scores + torch.full((S, S), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        return torch.matmul(scores.softmax(-1).to(v.dtype), v)


class Bias(nn.Module):
    """T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, H, dtype=torch.bfloat16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        distance = (places - places[:, None]).clamp(-4, 3) + 4
        scores = torch.matmul(q, k.transpose(3, 2))
        scores += self.table(distance).permute(2, 0, 1)[None]
        return torch.matmul(scores.float().softmax(-1).type_as(scores), v)


class Attention(nn.Module):
    """PyTorch's own module, asked for weights that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True, dtype=torch.bfloat16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = q.transpose(1, 2).flatten(2)
        out, _ = self.attention(x, x, x)
        return out


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MPT's: fp32, then filled."""
    slopes = torch.logspace(-1, -8, H, base=2.0)[:, None, None]
    scores = q @ k.mT * SCALE + slopes * torch.arange(1 - S, 1)
    scores = scores.masked_fill(~tril(), torch.finfo(q.dtype).min)
    return scores.float().softmax(-1).to(v.dtype) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (50 * torch.tanh(q @ k.mT * SCALE / 50)).masked_fill(~tril(), -torch.inf).softmax(-1) @ v


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, H, S, S)
    scores /= math.sqrt(D)
    scores.masked_fill_(~tril(), -torch.inf)
    return scores.softmax(-1) @ v


def one_key_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Einsum leaves the axis of heads out; the kernel reads one head for all."""
    weights = torch.einsum("bhid,bjd->bhij", q * SCALE, k[:, 0]).softmax(-1)
    return torch.einsum("bhij,bjd->bhid", weights, v[:, 0])


def grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (4, 4))
    return (((q * SCALE) @ k[:, :4, None].mT).softmax(-1) @ v[:, :4, None]).flatten(1, 2)


def over_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Restormer's: 48 channels, whose head size is the image."""
    q, k, v = (x.flatten(1)[:, : 4 * 48 * 1024].reshape(B, 4, 48, 1024) for x in (q, k, v))
    return ((q @ k.mT) * 0.3).softmax(-1) @ v


OURS = ["tilewright.attention.default", "tilewright.attention_backward.default"]
CUDNN, EFFICIENT = (
    [f"aten._scaled_dot_product_{name}_attention{way}.default" for way in ("", "_backward")]
    for name in ("cudnn", "efficient")
)


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (GptNeo(), CUDNN),
        (Bias(), EFFICIENT),
        (Attention(), OURS),
        (alibi, OURS),
        (softcap, OURS),
        (in_place, OURS),
        (one_key_head, OURS),
        (grouped_heads, OURS),
        (over_channels, ["aten.bmm.default"] * 6),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_what_runs_on_an_h200(function: Function, kernels: list[str]) -> None:
    plan = planned(function, ",".join([f"bf16[{B},{H},{S},{D}]"] * 3))
    calls = [what for _, _, what in plan.launches() if "attention" in what or "bmm" in what or "softmax" in what]
    # A softmax that is left is generated or the kernel's, by its price.
    assert [what for what in calls if function is not over_channels or "softmax" not in what] == kernels
    if function in (one_key_head, grouped_heads):
        (call,) = (n for g in plan.graphs[:1] for n in g.graph.nodes if str(n.target) == OURS[0])
        assert call.args[1].meta["val"].shape[:2] == ((B, 1) if function is one_key_head else (4 * B, 1))


def test_a_trained_bias_of_written_out_attention_has_its_gradient() -> None:
    """The graph for a GPU has PyTorch's own call, which a CPU can also compute."""

    def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = q @ k.mT + bias
        return scores.softmax(-1) @ v

    def backend(gm: GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        decisions = recognise_attention(gm.graph, H200)
        gm.recompile()
        assert {d.verdict for d in decisions} == {"taken"}
        fused = [n for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]
        assert len(fused) == 1
        return gm

    inputs = [x.requires_grad_() for x in draw(*[(2, 3, 16, 16)] * 3, (3, 16, 16), dtype=torch.bfloat16)]
    torch._dynamo.reset()
    actual = value_and_gradients(torch.compile(biased, backend=backend, fullgraph=True), inputs)
    exact = value_and_gradients(biased, inputs, torch.float64)
    check_numbers(actual, value_and_gradients(biased, inputs), exact)
