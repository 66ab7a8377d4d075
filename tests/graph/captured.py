"""Graphs for the tests of this package and of `cost/`: programs captured at sizes of one's choice."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.graph.dims import SymbolicShapes, symbolic_shapes

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Program:
    """A function of tensors; for each, `dtype[axis, …]` where an axis is a name, a formula or a number.

    A tensor whose text ends in `?` is a parameter: its axes are not named to the solver.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    inner: tuple[str, ...] = ()

    def tensors(self, sizes: Sizes) -> list[Tensor]:
        return [_tensor(text, sizes) for text in self.inputs]

    def graph(self, sizes: Sizes) -> fx.Graph:
        return make_fx(self.function, tracing_mode="fake")(*self.tensors(sizes)).graph

    def shapes(self, graph: fx.Graph, sizes: Sizes) -> SymbolicShapes:
        placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
        named = {
            name: tuple(axis if axis.isidentifier() else None for axis in _axes(text))
            for name, text in zip(placeholders, self.inputs, strict=True)
            if not text.endswith("?")
        }
        used = {axis for names in named.values() for axis in names if axis} | set(self.inner)
        return symbolic_shapes(graph, named, {name: size for name, size in sizes.items() if name in used})


def _axes(text: str) -> list[str]:
    inside = text[text.index("[") + 1 : text.rindex("]")]
    return [axis.strip() for axis in inside.split(",") if axis.strip()]


def _tensor(text: str, sizes: Sizes) -> Tensor:
    shape = [int(eval(axis, {}, dict(sizes))) for axis in _axes(text)]
    dtype = getattr(torch, text[: text.index("[")])
    return torch.zeros(shape, dtype=dtype)


def naive_softmax(x: Tensor) -> Tensor:
    m = x.max(dim=1)[0]
    z = x - m[:, None]
    e = torch.exp(z)
    s = e.sum(dim=1)
    return e / s[:, None]


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v


def fused_qkv(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = F.linear(x, weight).chunk(3, dim=-1)
    return naive_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def heads_there_and_back(x: Tensor, heads: int) -> Tensor:
    B, S, D = x.shape
    return x.view(B, S, heads, D // heads).transpose(1, 2).transpose(1, 2).reshape(B, S, D) + x


def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, up, bias)), down)


def cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, weight, bias, padding=1)).flatten(1)


def convolution_gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    inputs = tuple(t.detach().requires_grad_() for t in (x, weight, bias))
    return torch.autograd.grad(convolved(*inputs).sum(), inputs)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return (x - mean) * variance.rsqrt(), x.argmax(1), x.logsumexp((0, 1)), x.cumsum(0), x.amax()


def layout(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    joined = torch.cat([x, y], dim=0)
    return (
        joined.permute(1, 0)[:, None].squeeze(1),
        torch.stack([x, x * 2], dim=1).unbind(1)[0],
        x[:, None, :].expand(-1, y.shape[0], -1) * y,
        joined.view(-1),
        x.select(0, 0),
    )


def gathered(table: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    rows = F.embedding(index, table)
    picked = rows[index, :, index[:, :1]], rows[:, index, index.flip(0)]
    return rows, table[index], table.index_select(1, index[0]), table.gather(1, index), *picked


PROGRAMS = {
    "naive softmax": Program(naive_softmax, ("float32[N,M]",)),
    "attention": Program(naive_attention, ("float32[B,N,d]",) * 3),
    "cross attention": Program(naive_attention, ("float32[B,N,d]", "float32[B,M,d]", "float32[B,M,D]")),
    "causal": Program(causal, ("float32[B,N,d]",) * 3),
    "sdpa": Program(sdpa, ("float32[B,H,N,d]",) * 3),
    "fused qkv": Program(fused_qkv, ("float32[B,N,D]", "float32[3*D,D]?")),
    "mlp": Program(mlp, ("float32[B,D]", "float32[4*D,D]?", "float32[4*D]?", "float32[D,4*D]?")),
    "mlp with a named width": Program(
        mlp, ("float32[B,D]", "float32[F,D]?", "float32[F]?", "float32[D,F]?"), inner=("F",)
    ),
    "cross entropy": Program(cross_entropy, ("float32[N,D]", "float32[V,D]?", "int64[N]"), inner=("V",)),
    "convolution": Program(convolved, ("float32[B,C,N,M]", "float32[K,C,3,3]?", "float32[K]?"), inner=("K",)),
    "convolution gradients": Program(
        convolution_gradients, ("float32[B,C,N,M]", "float32[K,C,3,3]?", "float32[K]?"), inner=("K",)
    ),
    "layer norm": Program(
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), ("bfloat16[B,N,D]", "bfloat16[D]?", "bfloat16[D]?")
    ),
    "statistics": Program(statistics, ("float32[B,N,D]",)),
    "layout": Program(layout, ("float32[N,D]", "float32[M,D]")),
    "gathered": Program(gathered, ("float32[V,V]", "int64[B,M]")),
}

EQUAL = {name: 12 for name in ["N", "M", "d", "D", "H", "C"]} | {"B": 6, "K": 20, "F": 36, "V": 100}
"""Sizes at which only the operators' structure tells most dimensions apart."""
DISTINCT = {"B": 2, "N": 5, "M": 7, "d": 11, "D": 13, "H": 3, "F": 17, "V": 19, "C": 23, "K": 29}


class Block(nn.Module):
    """Pre-norm Transformer block with its attention written out, or as `scaled_dot_product_attention`."""

    def __init__(self, D: int, H: int, dropout: float = 0.1, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.fused = H, fused
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.query, self.key, self.value, self.out = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            project(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), dim=-1) @ v
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


@cache
def block_graphs(B: int, S: int, D: int, H: int, dropout: float, fused: bool) -> tuple[fx.Graph, fx.Graph]:
    """The block's forward and backward graphs."""
    graphs: list[fx.Graph] = []

    def keep(module: fx.GraphModule, _inputs: object) -> Callable[..., Any]:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return aot_module_simplified(module, inputs, fw_compiler=keep, bw_compiler=keep)

    torch._dynamo.reset()
    block = torch.compile(Block(D, H, dropout, fused), backend=backend, dynamic=False)
    block(torch.randn(B, S, D, requires_grad=True)).sum().backward()
    forward, backward = graphs
    return forward, backward


BLOCK_EQUAL = {"B": 2, "S": 16, "D": 16, "H": 4}
BLOCK_DISTINCT = {"B": 3, "S": 10, "D": 14, "H": 2}


def block_shapes(sizes: Sizes, dropout: float, fused: bool) -> tuple[SymbolicShapes, SymbolicShapes]:
    forward, backward = block_graphs(**sizes, dropout=dropout, fused=fused)
    inputs = [node for node in forward.nodes if node.op == "placeholder"]
    (x,) = (node.name for node in inputs if node.meta["val"].ndim == 3)
    shapes = symbolic_shapes(forward, {x: ("B", "S", "D")}, sizes)
    return shapes, symbolic_shapes(backward, {}, {}, forward=shapes)
