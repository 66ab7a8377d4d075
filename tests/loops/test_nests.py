"""Nests as text that a person can read, computed step by step and compared with eager."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import golden
from tests.loops.interpreter import capture, run
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


Program = tuple[Callable[..., Any], list[Tensor]]
PROGRAMS: dict[str, Program] = {
    "softmax": (lambda x: x.softmax(-1), [given(4, 6)]),
    "softmax_over_rows": (lambda x: x.softmax(0), [given(4, 6)]),
    "layer_norm": (lambda x, w, b: aten.native_layer_norm(x, [6], w, b, 1e-5), [given(4, 6), given(6), given(6) + 1]),
    "layer_norm_backward": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward(g, x, [6], m, r, w, w, [True, True, True]),
        [given(4, 6), given(4, 6) + 1, *moments(given(4, 6) + 1), given(6)],
    ),
    "transposed_copy": (lambda x: 2 * x.t().contiguous(), [given(4, 6)]),
    "column_sum": (lambda x: x.sum(0), [given(4, 6)]),
    "sum_of_everything": (lambda x: (x * x).sum(), [given(64, 512)]),
    "sum_over_pairs": (lambda x: (x.exp()[:, None] * (-x)[None]).sum(), [given(6)]),
    "plus_transpose": (lambda x: x + x.t(), [given(5, 5)]),
    "argmax": (lambda x: x.argmax(1), [given(4, 6)]),
    "sums_both_ways": (lambda x: (x.exp(), x.exp().sum(1).log(), x.sum(0)), [given(4, 6)]),
    "rotary": (rotary, [given(2, 3, 5, 8), given(5, 8), given(5, 8) + 1]),
    "rotary_backward": (rotary_backward, [given(2, 3, 5, 8), given(5, 8), given(5, 8) + 1]),
    "softmax_of_two": (lambda x, y: torch.cat([x, y.exp()], -1).softmax(-1), [given(4, 6), given(4, 3)]),
    "parts": (lambda x: x.exp()[1:, ::2] * 2 + x.exp().select(0, 1)[1::2], [given(4, 6)]),
    "cat_of_cats": (
        lambda x, y: torch.cat([torch.cat([x, y], 0)[2:5], y.flip(0)], 0)[1:].roll(1, 1),
        [given(4, 6), given(3, 6)],
    ),
    "padded": (lambda x: aten.constant_pad_nd(x.exp(), [2, -1, 0, 3], 0.5).triu(1), [given(4, 6)]),
    "gather": (
        lambda x, bias, i, j: (x + bias.gather(1, i.expand(4, 6)).clamp(0) + x[j.clamp(-3, 2)]).softmax(1),
        [given(4, 6), given(4, 8), torch.tensor([[7, 0, 3, 3, 1, 2]]), torch.tensor([-1, 3, -4, 0])],
    ),
    "gather_beside_zeros": (
        lambda x, i: aten.constant_pad_nd(F.embedding(i + 1, x), [0, 0, 1, 2], 0.0) * 2,
        [given(4, 6), torch.tensor([-1, 2, 0])],
    ),
    "beside_a_sum_of_columns": (
        lambda x, y: (torch.full_like(x, 3), y.exp().expand(4, 6).clone(), x.sum(0) * 3 + y.exp()),
        [given(4, 6), given(6)],
    ),
    "heads": (lambda x: x.exp().view(2, 5, 3, 4).transpose(1, 2).contiguous() + 1, [given(2, 5, 12)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nest_is_as_written_down(name: str) -> None:
    function, inputs = PROGRAMS[name]
    golden.check(GOLDEN / f"{name}.txt", describe(capture(function, *inputs, name=name).nest) + "\n")


@pytest.mark.parametrize("name", PROGRAMS)
def test_nest_computes_what_eager_does(name: str) -> None:
    function, inputs = PROGRAMS[name]
    eager = function(*inputs)
    for mine, theirs in zip(run(capture(function, *inputs), inputs), _flat(eager), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_store_has_a_stage_that_performs_it(name: str) -> None:
    function, inputs = PROGRAMS[name]
    nest = capture(function, *inputs).nest
    for store, stage in zip(nest.stores, nest.store_stages(), strict=True):
        assert nest.steps[store.value].is_late or stage <= nest.stages


def _flat(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


REFUSED: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "own transpose": (
        lambda x: (lambda e: e + e.t())(x.exp()),
        [given(5, 5)],
        "a value is combined with its own transpose",
    ),
    "sum over its own pairs": (
        lambda x: (lambda e: (e[:, None] * e[None]).sum())(x.exp()),
        [given(5)],
        "a value is combined with its own transpose",
    ),
    "windows of its own pairs": (
        lambda x: (lambda e: (e[:, None] - e[None]).view(2, 3, 2, 3).transpose(1, 2).contiguous())(x.exp()),
        [given(6)],
        "a value is combined with its own transpose",
    ),
    "pairs of what runs over the same axes only later": (
        lambda x, y: (lambda e, f: ((e[:, None] * f[None]).sum(), e + f))(x.exp(), y.exp()),
        [given(5), given(5)],
        "a value is combined with its own transpose",
    ),
    "two means": (
        lambda x: x - x.mean(0) - x.mean(1, keepdim=True),
        [given(4, 6)],
        "its elements use two reductions over different axes, and one loop cannot wait for both",
    ),
    "sums over other axes": (
        lambda x: (x.exp().sum(1), x.exp().sum((0, 1))),
        [given(3, 4, 5)],
        "its reductions run over different axes, which one loop cannot do",
    ),
    "sum of a sum": (
        lambda x: x.sum(0).exp().sum(),
        [given(4, 6)],
        "has fewer rows than the rest of the kernel, so they cannot share a loop",
    ),
    "no body": (lambda x: x.exp().cummax(0)[0], [given(4, 6)], r"no kernel is generated for aten.cummax.default"),
    "scan": (lambda x: x.exp().cumsum(1), [given(4, 6)], "on a CPU, PyTorch's own scan is used"),
    "diagonal": (
        lambda x: x.exp().diagonal() * 2,
        [given(4, 4)],
        "diagonal.default reads memory, but this value is computed",
    ),
    "many parts": (lambda x: torch.cat([x * n for n in range(17)]), [given(4, 6)], "more than 16 parts"),
    "part of a merged dimension": (
        lambda x: (2 * x.t()).reshape(24)[3:] + 1,
        [given(4, 6)],
        "the dimension that is sliced has no single stride in memory",
    ),
    "part of flattened rows beside a sum of each": (
        lambda x: (lambda y: y + y.flip(0))((x - x.sum(-1, keepdim=True)).reshape(24)),
        [given(4, 6)],
        "it slices a dimension along which a scan or a partial reduction runs",
    ),
    "view across axes": (lambda x: x.exp().view(6, 4) + 1, [given(4, 6)], "a view cuts an axis of 6 elements at 4"),
    "part of a softmax": (
        lambda x: torch.softmax(x, -1)[:, 1:] * 2,
        [given(4, 9)],
        "each reduction would be computed 8 times, once for each copy of its result",
    ),
    "sums that are three parts of one dimension": (
        lambda x: torch.cat([x.sum(1), x.exp().sum(1), (x * x).sum(1)], -1),
        [given(4, 6, 5)],
        "a reduction would be computed over 3 times its elements",
    ),
    "sum for each of many": (
        lambda x, y: x.sum(-1)[:, None] * y,
        [given(4, 9), given(4, 5)],
        "each reduction would be computed 5 times, once for each copy of its result",
    ),
    "expanded operand": (
        lambda x: x.expand(4, 6).sum(0),
        [given(6)],
        "it adds up equal values: its operand is the same along the summed axis",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_shares_no_nest_says_why(name: str) -> None:
    function, inputs, reason = REFUSED[name]
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
