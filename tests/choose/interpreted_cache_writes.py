"""A token's keys and values into static caches, in Triton's interpreter, against float64 and eager."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.contract import called
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.usefixtures("in_triton")
LENGTH, WIDTH = 12, 24


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


class Operands(NamedTuple):
    """Caches within larger ones; q, k and v as a linear layer gives them; angles of each token."""

    keys: Tensor
    values: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor


def operands(batch: int, tokens: int = 1, dtype: torch.dtype = torch.bfloat16) -> Operands:
    caches = [torch.randn(batch, 2, LENGTH + 3, WIDTH)[:, :, :LENGTH] for _ in range(2)]
    heads = [torch.randn(batch, tokens, count, WIDTH).transpose(1, 2) for count in (6, 2, 2)]
    angle = torch.randn(batch, tokens, WIDTH)
    return Operands(*(x.to(dtype) for x in (*caches, *heads, angle.cos(), angle.sin())))


def check(function: Callable[[Operands, Tensor], Tensor], inputs: Operands, place: Tensor) -> Recording:
    """The result and the caches keep the numbers contract; what is not turned is eager's, bit for bit."""
    mine, theirs, exact = (Operands(*(x.to(dtype, copy=True) for x in inputs)) for dtype in (None, None, torch.double))
    with recording() as record, torch.no_grad():
        result = torch.compile(function, backend=backend, fullgraph=True)(mine, place)
    with torch.no_grad():
        eager, truth = function(theirs, place), function(exact, place)
    for found, expected, true in zip((result, *mine[:2]), (eager, *theirs[:2]), (truth, *exact[:2]), strict=True):
        assert compare(found, expected, true).ok
    assert torch.equal(mine.values, theirs.values)
    untouched = [n for n in range(LENGTH) if n not in place % LENGTH]
    assert torch.equal(mine.keys[:, :, untouched], theirs.keys[:, :, untouched])
    return record


@pytest.mark.parametrize(
    ("batch", "places", "write", "dtype", "turned"),
    [
        (1, [3], by_index_copy, torch.bfloat16, turned),
        (3, [11], by_index, torch.float16, turned_by_halves),
        (2, [0, 7, 4], by_index_copy, torch.bfloat16, turned_by_halves),
        (2, [0, 7, 4], by_index, torch.float16, turned),
    ],
)
def test_keys_queries_and_values_are_one_launch(
    batch: int, places: list[int], write: Callable[..., None], dtype: torch.dtype, turned: Callable[..., Tensor]
) -> None:
    def function(x: Operands, place: Tensor) -> Tensor:
        cos, sin = x.cos.unsqueeze(1), x.sin.unsqueeze(1)
        q, k = turned(x.q.contiguous(), cos, sin), turned(x.k.contiguous(), cos, sin)
        write(x.keys, x.values, k, x.v, place)
        return q * 2 + x.keys.sum(2, keepdim=True).repeat(1, 3, 1, 1)

    record = check(function, operands(batch, len(places), dtype), torch.tensor(places))
    (launch,) = called(record, "write_cache_")
    assert all(launch.args[5:8]) and not called(record, "index_")
    assert [d.verdict for g in record.graphs for d in g.plan.fusion.decisions if d.passed_by == "cache writes"] == [
        "taken"
    ]


def test_two_layers_turn_each_their_own_queries() -> None:
    def function(x: Operands, place: Tensor) -> Tensor:
        angles, v = (x.cos[:1, None], x.sin[:1, None]), x.v
        for layer in range(2):
            one = slice(layer, layer + 1)
            k, q = (x.k[one] * (layer + 1)).contiguous(), (x.q[one] - layer).contiguous()
            by_index_copy(x.keys[one], x.values[one], turned(k, *angles), v[one], place)
            v = v + (turned(q, *angles) * 2).mean()
        return v

    check(function, operands(2), torch.tensor([5]))


def from_the_end(x: Operands, place: Tensor) -> Tensor:
    by_index(x.keys, x.values, x.k, x.v, place - LENGTH)
    return x.q * 2


def with_angles_of_single_heads(x: Operands, place: Tensor) -> Tensor:
    """Their turning is left to generated kernels."""
    scale = torch.arange(1, 3)[:, None, None]
    by_index_copy(x.keys, x.values, turned(x.k, x.cos[:, None] * scale, x.sin[:, None] * scale), x.v, place)
    return x.q * 2


@pytest.mark.parametrize("function", [from_the_end, with_angles_of_single_heads])
def test_what_is_written_is_not_turned(function: Callable[[Operands, Tensor], Tensor]) -> None:
    (launch,) = called(check(function, operands(2), torch.tensor([5])), "write_cache_")
    assert launch.args[6] is None


def test_different_places_stay_two_writes() -> None:
    def function(x: Operands, place: Tensor) -> Tensor:
        x.keys.index_copy_(2, place[:1], x.k)
        x.values.index_copy_(2, place[1:], x.v)
        return x.q * 2

    record = check(function, operands(2), torch.tensor([4, 5]))
    assert not called(record, "write_cache_") and len(called(record, "index_copy_")) == 2
