"""A token's keys and values into static caches, in Triton's interpreter, against float64 and eager.

`test_cache_writes.py` runs this in a process of its own: Triton decides when it is first imported whether its
library is interpreted. `TILEWRIGHT_TARGET=triton` makes the graphs those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.interpreter import install
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.contract import compare

install()
LENGTH, WIDTH = 12, 24


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def turned_by_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), half = (x[..., : WIDTH // 2], x[..., WIDTH // 2 :]), WIDTH // 2
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat((a * cos - b * sin, b * cos + sin * a), -1)


def by_index_copy(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, place: Tensor) -> None:
    keys.index_copy_(2, place, k)
    values.index_copy_(2, place, v)


def by_index(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, place: Tensor) -> None:
    values[:, :, place] = v
    keys[:, :, place] = k


def operands(batch: int, tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Caches within larger ones; q, k and v as a linear layer gives them; angles of each token."""
    caches = [torch.randn(batch, 2, LENGTH + 3, WIDTH)[:, :, :LENGTH] for _ in range(2)]
    heads = [torch.randn(batch, tokens, count, WIDTH).transpose(1, 2) for count in (6, 2, 2)]
    angle = torch.randn(batch, tokens, WIDTH)
    return [x.to(dtype) for x in (*caches, *heads, angle.cos(), angle.sin())]


def calls(record: Recording, word: str) -> list[Any]:
    nodes = [node for graph in record.graphs for node in graph.plan.graph.nodes]
    return [node for node in nodes if node.op == "call_function" and word in str(node.target)]


def check(function: Callable[..., Any], inputs: list[Tensor], place: Tensor) -> Recording:
    """Results and caches keep the numbers contract; what is not turned is eager's, bit for bit."""
    mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    exact = [x.double() for x in inputs]
    with recording() as record, torch.no_grad():
        results = torch.compile(function, backend=backend, fullgraph=True)(*mine, place)
        for found, eager, true in zip(
            [*results, *mine[:2]], [*function(*theirs, place), *theirs[:2]], [*function(*exact, place), *exact[:2]],
            strict=True,
        ):  # fmt: skip
            assert compare(found, eager, true).ok
    assert torch.equal(mine[1], theirs[1])
    untouched = [n for n in range(LENGTH) if n not in place % LENGTH]
    assert torch.equal(mine[0][:, :, untouched], theirs[0][:, :, untouched])
    return record


@pytest.mark.parametrize("write", [by_index_copy, by_index])
@pytest.mark.parametrize(("batch", "places"), [(1, [3]), (3, [11]), (2, [0, 7, 4])], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [turned, turned_by_halves])
def test_keys_queries_and_values_are_one_launch(
    write: Callable[..., None], batch: int, places: list[int], dtype: torch.dtype, turned: Callable[..., Tensor]
) -> None:
    def function(
        keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, place: Tensor
    ) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = turned(q.contiguous(), cos, sin), turned(k.contiguous(), cos, sin)
        write(keys, values, k, v, place)
        return (q * 2 + keys.sum(2, keepdim=True).repeat(1, 3, 1, 1),)

    record = check(function, operands(batch, len(places), dtype), torch.tensor(places))
    (launch,) = calls(record, "write_cache_")
    assert all(launch.args[5:8]) and not calls(record, "index_")
    assert [d.verdict for g in record.graphs for d in g.plan.fusion.decisions if d.passed_by == "cache writes"] == [
        "taken"
    ]


def test_two_layers_turn_each_their_own_queries() -> None:
    def function(
        keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, place: Tensor
    ) -> tuple[Tensor, ...]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        for layer in range(2):
            kept = keys[layer : layer + 1], values[layer : layer + 1]
            x = (k[layer : layer + 1] * (layer + 1)).contiguous()
            y = (q[layer : layer + 1] - layer).contiguous()
            turns = cos[:1], sin[:1]
            by_index_copy(*kept, turned(x, *turns), v[layer : layer + 1], place)
            yield_ = turned(y, *turns) * 2
            v = v + yield_.mean()
        return (v,)

    check(function, operands(2, 1, torch.bfloat16), torch.tensor([5]))


def test_places_from_the_end() -> None:
    def function(
        keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, place: Tensor
    ) -> tuple[Tensor, ...]:
        by_index(keys, values, k, v, place)
        return (q * 2,)

    record = check(function, operands(2, 1, torch.bfloat16), torch.tensor([-2]))
    (launch,) = calls(record, "write_cache_")
    assert launch.args[5:8] == (None, None, None)


def test_angles_of_single_heads_are_left_to_generated_kernels() -> None:
    def function(
        keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, place: Tensor
    ) -> tuple[Tensor, ...]:
        scale = torch.arange(1, 3)[:, None, None]
        by_index_copy(keys, values, turned(k, cos[:, None] * scale, sin[:, None] * scale), v, place)
        return (q * 2,)

    record = check(function, operands(2, 1, torch.bfloat16), torch.tensor([5]))
    (launch,) = calls(record, "write_cache_")
    assert launch.args[6] is None


def test_different_places_stay_two_writes() -> None:
    def function(
        keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, place: Tensor
    ) -> tuple[Tensor, ...]:
        keys.index_copy_(2, place - 1, k)
        values.index_copy_(2, place, v)
        return (q * 2,)

    mine = operands(2, 1, torch.bfloat16)
    theirs = [x.clone() for x in mine]
    with recording() as record, torch.no_grad():
        torch.compile(function, backend=backend)(*mine, torch.tensor([5]))
        function(*theirs, torch.tensor([5]))
    assert all(map(torch.equal, mine[:2], theirs[:2]))
    assert not calls(record, "write_cache_") and len(calls(record, "index_copy_")) == 2
