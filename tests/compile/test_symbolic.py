"""Programs for all sizes, planned for a GPU: of one structure, and without conditions that rewrites ask of sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright.backend
from tilewright.compile.symbolic import SymbolicGraph, SymbolicProgram
from tilewright.graph import calls
from tilewright.graph.size_symbols import POINTS
from tilewright.hardware.target import target_named


class Captured(Exception):
    """A program was captured; there is no GPU to run it."""


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(300, 64), nn.Embedding(512, 64)
        self.qkv, self.norm, self.head = nn.Linear(64, 192), nn.LayerNorm(64), nn.Linear(64, 300)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), 0.1)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.Conv2d(32, 64, 3, 2, 1)
        self.norm, self.last = nn.BatchNorm2d(32), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, 2, 1)
        return self.last(F.avg_pool2d(F.relu(self.second(x)), 2).mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "tokens": (Tokens, lambda: torch.randint(300, (4, 90))),
    "images": (Images, lambda: torch.randn(23, 3, 96, 96)),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_h200_has_one_program_for_each_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilewright.backend, "target_of", lambda device: target_named("h200"))
    # After each rewrite no size has been asked what needs a condition.
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "1")
    found: list[tuple[SymbolicGraph, list[Any]]] = []

    def sized(compiler: Any, name: Any, module: Any, symbols: Any) -> Callable[[list[Any]], None]:
        args = [_captured(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
        found.append((SymbolicGraph(name, module, symbols, compiler.planner), args))
        return _not_run

    monkeypatch.setattr(tilewright.backend._Compiler, "_sized", sized)
    make, inputs = MODELS[name]
    with pytest.raises(Captured):
        torch.compile(make(), backend=tilewright.backend.backend, dynamic=True)(inputs())
    assert [graph.name for graph, _ in found] == ["forward", "backward"]
    for graph, args in found:
        moduli = graph.symbols.moduli()[0]
        plans = graph.plans(graph.symbols.read(args), args, moduli)
        program = SymbolicProgram(graph, plans, moduli, args, _give_up)
        assert len(program.points) == len(plans) == POINTS


def _give_up(error: Exception) -> None:
    raise error


def _captured(value: Any) -> Any:
    """An input of the sizes with which it was captured."""
    if isinstance(value, Tensor):
        return torch.empty_strided(calls.shape_of(value), calls.strides_of(value), dtype=value.dtype)
    return value if isinstance(value, float) else calls.number(value)


def _not_run(args: list[Any]) -> None:
    raise Captured


_not_run._boxed_call = True  # type: ignore[attr-defined]
