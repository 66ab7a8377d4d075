"""Nests as text that a person can read, computed step by step and compared with eager."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import golden
from tests.loops.interpreter import capture, run
from tests.tables import cases
from tilewright.backend import backend
from tilewright.loops.lower import lower
from tilewright.loops.nest import describe
from tilewright.operators.axes import Unfusable

GOLDEN = Path(__file__).parent / "golden"
aten = torch.ops.aten


def given(*shape: int) -> Tensor:
    """Different values for different shapes, in float64, so that a wrong index cannot hide in rounding."""
    generator = torch.Generator().manual_seed(sum(n * 7**i for i, n in enumerate(shape)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def moments(x: Tensor) -> list[Tensor]:
    return [x.mean(1, keepdim=True), (x.var(1, correction=0, keepdim=True) + 1e-5).rsqrt()]


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def rotary_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As autograd has it: the gradients of the two slices, each in zeros."""
    half, end = g.shape[-1] // 2, 2**63 - 1
    turned = (g * sin).split(half, -1)
    into = ((-turned[0], half, end), (turned[1], 0, half))
    parts = [aten.slice_backward(part, g.shape, g.dim() - 1, a, b, 1) for part, a, b in into]
    return g * cos + parts[0] + parts[1]


NAMED = globals()
TABLE = Path(__file__).with_name("nests.txt")
PROGRAMS, REFUSED = (cases(TABLE, section, NAMED, texts=["reason"]) for section in ("nests", "refused"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_nest_is_as_written_down(name: str) -> None:
    inputs, function = PROGRAMS[name].values()
    golden.check(GOLDEN / f"{name}.txt", describe(capture(function, *inputs, name=name).nest) + "\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_nest_computes_what_eager_does(name: str) -> None:
    inputs, function = PROGRAMS[name].values()
    eager = function(*inputs)
    for mine, theirs in zip(run(capture(function, *inputs), inputs), _flat(eager), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_store_has_a_stage_that_performs_it(name: str) -> None:
    inputs, function = PROGRAMS[name].values()
    nest = capture(function, *inputs).nest
    for store, stage in zip(nest.stores, nest.store_stages(), strict=True):
        assert nest.steps[store.value].is_late or stage <= nest.stages


def _flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


@pytest.mark.parametrize("name", REFUSED)
def test_what_shares_no_nest_says_why(name: str) -> None:
    reason, inputs, function = REFUSED[name].values()
    with pytest.raises(Unfusable, match=reason):
        capture(function, *inputs)


def test_a_result_whose_elements_share_memory_is_refused() -> None:
    """As PyTorch 2.11 plans `select_scatter` into an expanded tensor."""
    captured = capture(lambda x: x + 1, given(3, 4))
    (node,) = captured.lowered.outputs
    node.meta["val"] = node.meta["val"][:1].expand(3, 4)
    with pytest.raises(Unfusable, match="elements of add share memory"):
        lower([node], [node], "kernel", "c++")


def test_a_scatter_into_an_expanded_tensor() -> None:
    x, y = given(1, 4).expand(3, 4), given(4)

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.select_scatter(y, 0, 2)

    torch.testing.assert_close(torch.compile(function, backend=backend, fullgraph=True)(x, y), function(x, y))


def test_a_slice_of_an_input_is_an_input() -> None:
    captured = capture(lambda x: x[1:, ::2] * 2, given(5, 6))
    (buffer,) = captured.nest.inputs
    assert buffer.elements == 12
    (result,) = run(captured, [given(5, 6)])
    assert torch.equal(result, given(5, 6)[1:, ::2] * 2)


def test_a_sum_of_tensors_in_different_orders_has_many_rows() -> None:
    """Axes of 4 × 65536 × 3 elements, which collapse no further: the second is divided."""

    def product_sum(x: Tensor, y: Tensor) -> Tensor:
        return (x * y).sum()

    x = given(4, 3, 256, 256)
    found = capture(product_sum, x.contiguous(memory_format=torch.channels_last), x.cos(), language="triton")
    assert (found.lowered.nest.rows, found.lowered.nest.cols) == ((4, 128), (512, 3))
