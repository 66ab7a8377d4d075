"""Decoding against a static cache whose mask is a comparison, in Triton's interpreter, against float64 and eager."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import targets
from tests.passes.attention.interpreted_capped import TABLE
from tests.passes.attention.interpreted_kernel import Compiled
from tests.passes.attention.test_recognise import check_numbers
from tests.tables import programs, value
from tilewright.passes.attention import library

pytestmark = pytest.mark.usefixtures("in_triton")
KEYS = 80
PREFIX = "tilewright.attention_prefix"


def operands(queries: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Two entries; eight heads of queries share two of keys, which are a part of a larger cache."""
    torch.manual_seed(0)
    q = torch.randn(2, queries, 8, 32, dtype=dtype).transpose(1, 2)
    return [q, *(torch.randn(2, 2, 96, 32, dtype=dtype)[:, :, :KEYS] for _ in range(2))]


def check(function: Callable[..., Tensor], inputs: list[Tensor], truth: list[Tensor] | None = None) -> Compiled:
    """By the operator that reads the number of keys, and within the numbers contract."""
    compiled = Compiled(function)
    with torch.no_grad():
        actual = compiled.call(*inputs)
        eager = function(*(truth or inputs))
        exact = function(*(x.double() if x.is_floating_point() else x for x in truth or inputs))
    check_numbers([actual], [eager], [exact])
    return compiled


def taken(compiled: Compiled) -> bool:
    (choice,) = compiled.choices
    assert compiled.targets("scaled_dot_product") == 0
    return compiled.targets(PREFIX) == 1 and choice.verdict == "taken" and "over the visible keys only" in choice.reason


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)


PREFIXES, OTHERS = (programs(TABLE, section, globals()) for section in ("prefixes", "no prefixes"))
AT_MOST = PREFIXES["the first key"].function


@pytest.mark.parametrize("name", PREFIXES)
def test_the_number_of_keys_is_read_on_the_device(name: str) -> None:
    last = value(PREFIXES[name].fields["last"])
    assert taken(check(PREFIXES[name].function, [*operands(len(last)), torch.tensor(last)]))


def test_all_keys_of_a_cache_without_a_mask() -> None:
    compiled = check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), operands(3))
    (choice,) = compiled.choices
    assert choice.verdict == "taken" and compiled.targets(PREFIX) == 1
    assert choice.reason.startswith("tilewright.attention_prefix (Triton, split over the keys) in place of")


def test_a_number_for_each_entry() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attend(q, k, v, (torch.arange(KEYS) < lengths[:, None])[:, None, None, :])

    assert taken(check(function, [*operands(2), torch.tensor([3, 64])]))


def test_what_was_never_written_is_not_read() -> None:
    clean, last = operands(), torch.tensor([33])
    dirty = [x.clone() for x in clean]
    for x in dirty[1:]:
        x[:, :, 34:] = torch.nan
    for x in clean[1:]:
        x[:, :, 34:] = 0
    assert taken(check(AT_MOST, [*dirty, last], [*clean, last]))


def test_who_sees_no_key_gets_zeros() -> None:
    compiled = Compiled(AT_MOST)
    with torch.no_grad():
        out = compiled.call(*operands(2), torch.tensor([-1, 5]))
    assert taken(compiled) and not out[:, :, 0].any() and out[:, :, 1].all()


@pytest.mark.parametrize(
    ("fill", "last", "dtype"),
    [
        (-65504.0, [-1], torch.bfloat16),
        (-65504.0, [-1, 5], torch.bfloat16),
        (-1e9, [-1, 5], torch.float16),
        (-1e9, [-1], torch.bfloat16),
    ],
    ids=str,
)
def test_what_hidden_scores_become(
    fill: float, last: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN is given -65504 for False by PyTorch 2.11: a query that sees no key then weighs all as if it saw them."""
    monkeypatch.setitem(library.BY_FORWARD, library.ON_CPU.forward, replace(library.ON_CPU, hidden_up_to=-65504.0))

    def function(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> Tensor:
        seen = (torch.arange(KEYS) <= last[:, None])[None, None]
        zero, hidden = (torch.scalar_tensor(x, dtype=q.dtype) for x in (0.0, max(fill, torch.finfo(q.dtype).min)))
        return attend(q, k, v, torch.where(seen, zero, hidden))

    compiled = check(function, [*operands(len(last), dtype), torch.tensor(last)])
    # In fp16 the least number is the same.
    assert compiled.targets(PREFIX) == (fill == -65504.0 or dtype == torch.float16)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_read_as_masks(name: str) -> None:
    compiled = check(OTHERS[name].function, [*operands(), torch.tensor([40])])
    assert compiled.targets(PREFIX) == 0 and compiled.targets("tilewright.attention.default") == 1


class Decoder(nn.Module):
    """Two layers that write their keys and values into a static cache, and attend to what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(64, 128, bias=False) for _ in range(2))
        self.caches = nn.ParameterList(nn.Parameter(torch.zeros(2, 2, 2, KEYS, 16), False) for _ in range(2))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        seen = (torch.arange(KEYS) <= place[:, None])[None, None]
        for project, cache in zip(self.projections, self.caches, strict=True):
            q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in project(x).split((64, 32, 32), -1))
            keys, values = cache
            keys.index_copy_(2, place, k)
            values[:, :, place] = v
            x = x + attend(q, keys, values, seen).transpose(1, 2).flatten(2)
        return x


def test_many_steps_leave_the_cache_that_eager_leaves() -> None:
    ours, theirs = Decoder().bfloat16(), Decoder().bfloat16()
    theirs.load_state_dict(ours.state_dict())
    compiled = Compiled(ours)
    with torch.no_grad():
        for step in (*range(4), 78, 79):
            x, place = torch.randn(2, 1, 64, dtype=torch.bfloat16), torch.tensor([step])
            actual, eager = compiled.call(x, place), theirs(x, place)
            torch.testing.assert_close(actual, eager, rtol=0.02, atol=0.02)
            # The first layer's keys and values depend on nothing that may be rounded otherwise.
            assert torch.equal(ours.caches[0], theirs.caches[0])
    assert compiled.targets(PREFIX) == 2
    made = targets(compiled.record)
    assert not any(name.startswith(("aten.index_put.", "aten.index_copy.", "aten.copy_")) for name in made)
    assert made.count("aten.full.default") == 1
