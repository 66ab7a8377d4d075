"""One token at a time against static caches on a GPU: by calls and replayed, eager's numbers and eager's caches."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import targets
from tests.kernels.few_rows import keeps_contract
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
WIDTH, HEADS, KV_HEADS, HIDDEN, LENGTH = 512, 8, 2, 1408, 1024
HEAD = WIDTH // HEADS
STEPS = 7


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        sizes = (WIDTH, KV_HEADS * HEAD, KV_HEADS * HEAD)
        self.q, self.k, self.v = (nn.Linear(WIDTH, size, bias=False) for size in sizes)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(batch, KV_HEADS, LENGTH, HEAD))

    def forward(self, x: Tensor, place: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (layer(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        self.keys.index_copy_(2, place, k)
        self.values[:, :, place] = v
        mixed = F.scaled_dot_product_attention(q, self.keys, self.values, seen, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """[B, 1, D] at one place → [B, 1, D]."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(batch) for _ in range(2))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        rate = 1e4 ** (-torch.arange(0, HEAD, 2, device=x.device) / HEAD)
        angle = (place[:, None] * rate).repeat(1, 2)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        seen = (torch.arange(LENGTH, device=x.device) <= place[:, None])[None, None]
        for layer in self.layers:
            x = layer(x, place, cos, sin, seen)
        return x


@pytest.mark.parametrize("batch", [1, 3, 32])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_each_token_keeps_the_contract(batch: int, mode: str) -> None:
    model = Decoder(batch).to(GPU, torch.bfloat16)
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    record = Recording()

    def noting(module: Any, inputs: Any, **rest: Any) -> Any:
        with recording() as found:
            made = backend(module, inputs, **rest)
        record.graphs.extend(found.graphs)
        return made

    call: Any = torch.compile(model, backend=noting, mode=mode, dynamic=False)
    with torch.no_grad():
        for step in range(STEPS):
            x = torch.randn(batch, 1, WIDTH, device=GPU, dtype=torch.bfloat16)
            place = torch.tensor([step if step < 5 else LENGTH - STEPS + step], device=GPU)
            result = call(x, place).clone()
            verified = compare(result, eager(x, place), exact(x.double(), place))
            assert verified.ok, (step, verified)
            # Each step is checked alone: what eager rounded otherwise does not add up.
            for mine, theirs, true in zip(model.layers, eager.layers, exact.layers, strict=True):
                for name in ("keys", "values"):
                    cache = getattr(mine, name)
                    assert compare(cache, getattr(theirs, name), getattr(true, name)).ok, (step, name)
                    getattr(theirs, name).copy_(cache)
                    getattr(true, name).copy_(cache)
    names = targets(record)
    for own, count in (("attention_prefix", 2), ("write_cache_", 2), ("skinny_linear", 8)):
        assert names.count(f"tilewright.{own}.default") == count, own
    assert not any(word in name for name in names for word in ("index_copy", "index_put", "copy_."))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 33, 64])
@pytest.mark.parametrize(("columns", "outputs", "activation"), [
    (2048, (2048, 512, 512), "none"), (8192, (2048,), "gelu_tanh"), (2048, (5632, 5632), "swiglu"),
    (768, (50257,), "gelu"), (264, (9, 9), "swiglu"),
])  # fmt: skip
def test_products_of_few_rows(
    rows: int, columns: int, outputs: tuple[int, ...], activation: str, dtype: torch.dtype
) -> None:
    keeps_contract(rows, columns, outputs, activation, dtype, GPU)
