"""Sizes that change from call to call, and sizes that only the data know."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from tests.backend.compiling import agrees, assert_same, chain, compiled, differentiate, twin, with_grad
from tilewright.backend import Recording, recording
from tilewright.runtime.by_size import AT_ONCE


def run_at(function: Callable[..., Any], shapes: list[tuple[int, ...]], **options: Any) -> Recording:
    """One compiled function at each shape in turn, forward and backward held against eager."""
    counters.clear()

    def step(run: Callable[..., Any], *leaves: torch.Tensor) -> list[Any]:
        return [differentiate(run(x)) for x in leaves]

    record = agrees(function, [with_grad(*shape) for shape in shapes], step, **options)
    assert not any("graph" in fallback.what for fallback in record.fallbacks)
    return record


def of_each(run: Callable[..., Any], *inputs: torch.Tensor) -> list[Any]:
    return [run(x) for x in inputs]


def traces() -> int:
    return counters["stats"]["unique_graphs"]


def test_a_second_size_is_traced_once_more_and_a_third_not_at_all() -> None:
    record = run_at(chain, [(33, 20), (34, 20), (35, 20), (34, 20), (7, 20)])
    assert traces() == 2
    assert [graph.plan.name for graph in record.graphs] == ["forward", "backward"] * 2


def test_several_sizes_at_once_and_sizes_of_one() -> None:
    run_at(lambda x: chain(x) * x.shape[0] / math.sqrt(x.shape[-1]), [(33, 20), (34, 21), (35, 22), (1, 22), (35, 1)])


def test_symbolic_from_the_first_call_on() -> None:
    run_at(chain, [(33, 20), (34, 21), (35, 22)], dynamic=True)
    assert traces() == 1


def test_layers_with_dropout() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.LayerNorm(30), nn.Dropout(0.3))
    run_at(model, [(8, 20), (9, 20), (10, 20)])


def test_a_size_that_backward_needs_for_a_view_alone() -> None:
    def heads(x: torch.Tensor, w: torch.Tensor, rows: int, again: int) -> torch.Tensor:
        return F.gelu((x @ w).view(2, rows, 4, 16)).sum((2, 3)) + x.view(2, again, 64).sum(-1)

    def step(run: Callable[..., torch.Tensor], w: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [differentiate(run(x, w, x.shape[1], x.shape[1])) for x in inputs]

    agrees(heads, [with_grad(64, 64), with_grad(2, 40, 64), with_grad(2, 41, 64)], step, dynamic=True)


def test_sizes_as_results() -> None:
    def function(x: torch.Tensor) -> tuple[Any, ...]:
        return F.gelu(x), x.shape[0], x.numel() * 2, x.shape[0] / 2, x.new_zeros(x.shape[0] + 1)

    agrees(function, [torch.randn(rows, 20) for rows in (8, 9, 10)], of_each)


def test_strides_and_offsets_that_change() -> None:
    run = compiled(chain)
    whole = torch.randn(100, 20)
    inputs = [whole[:8], whole[3:12], whole[40:48], whole.t(), whole[:11].t(), whole[:, ::2], torch.randn(0, 5)]
    assert_same(of_each(run, *inputs), of_each(chain, *inputs))


def test_a_written_input_of_changing_size() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return F.gelu(x)

    agrees(function, [torch.randn(rows, 4) for rows in (8, 9, 10)], of_each)


def test_numbers_that_change() -> None:
    def function(x: torch.Tensor, scale: float, count: int) -> torch.Tensor:
        return F.gelu(x) * scale + x.new_ones(count + 3).sum()

    run = compiled(function)
    x = torch.randn(20, 20)
    with recording() as record:
        for scale in (0.5, 0.25, 0.125, 3.0):
            assert_same(run(x, scale, 2), function(x, scale, 2))
        compilations = len(record.graphs)
        run(x, 7.0, 2)
        assert len(record.graphs) == compilations, "a number that is no size needs no new kernel"
        for count in (3, 4, 5):
            assert_same(run(x, 3.0, count), function(x, 3.0, count))


@pytest.fixture
def by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs as if none could be one program for all sizes."""
    monkeypatch.setattr("tilewright.backend.size_symbols", lambda graph: None)


MOST_SIZES = AT_ONCE + 2


def test_past_the_most_sizes_one_line_and_pytorch(
    lenient: None, told: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, by_size: None
) -> None:
    for module in ("tilewright.backend", "tilewright.runtime.by_size"):
        monkeypatch.setattr(f"{module}.MOST_SIZES", MOST_SIZES)
    run = compiled(lambda x: F.gelu(x) * 2, dynamic=True)
    with torch.no_grad(), recording() as record:
        for rows in 3 * [*range(2, MOST_SIZES + 5)]:
            x = torch.randn(rows, 20)
            assert_same(run(x), F.gelu(x) * 2)
    assert len(record.graphs) == MOST_SIZES and len(record.fallbacks) == 1
    (line,) = [line for line in told() if "different sizes" in line]
    assert "test_dynamic_shapes.py" in line
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    run = compiled(lambda x: F.gelu(x) * 3, dynamic=True)
    with torch.no_grad():
        for rows in [*range(2, MOST_SIZES + 3), *range(2, MOST_SIZES + 2)]:
            run(torch.randn(rows, 20))
        for _ in range(2):
            with pytest.raises(Exception, match=f"compiled for {MOST_SIZES} different sizes"):
                run(torch.randn(MOST_SIZES + 2, 20))


def test_without_such_a_program_a_growing_sequence_is_not_compiled_for_each_length(by_size: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 3))
    run = compiled(model, dynamic=True)
    with recording() as record:
        for rows in range(2, 40):
            x = with_grad(rows, 8)
            y = twin(x)
            results = []
            for each, leaf in ((run, x), (model, y)):
                torch.manual_seed(1)
                results.append(differentiate(each(leaf)))
            assert_same(*results)
            assert_same(x.grad, y.grad)
        lengths = len({graph.plan.graph for graph in record.graphs}) // 2
        assert lengths == AT_ONCE and not record.fallbacks
        # A length that comes again is one to compile for.
        run(with_grad(39, 8)).sum().backward()
        assert len(record.graphs) // 2 == AT_ONCE + 1


def step_of_cache(cache: torch.Tensor, new: torch.Tensor, place: int) -> torch.Tensor:
    cache[:, place : place + 1] = new
    return F.softmax((cache[:, : place + 1] * new).sum(-1), -1) * place


SIZES = [(batch, length, 4) for batch, length in ((2, 13), (3, 6), (5, 4), (7, 200), (16, 16), (4, 2), (4, 4))]
ONE_PROGRAM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: F.softmax(x / math.sqrt(x.shape[1]), 1) * x.mean(),
    "norm": lambda x: F.layer_norm(x, x.shape[1:]) + x.var(1, keepdim=True),
    "transposed": lambda x: F.gelu(x.mT).contiguous() + 1,
    "last": lambda x: F.gelu(x) * x[:, -1:],
}


@pytest.mark.parametrize("function", ONE_PROGRAM.values(), ids=ONE_PROGRAM)
def test_one_program_serves_all_sizes(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    record = run_at(function, SIZES, dynamic=True)
    assert [graph.plan.name for graph in record.graphs] == ["forward", "backward"]
    assert all(graph.executable.kernels for graph in record.graphs)


def test_what_is_fused_is_decided_for_one_of_the_sizes() -> None:
    def recomputed(x: torch.Tensor) -> torch.Tensor:
        """A value that two kernels compute if it has at least a MiB, and one writes otherwise."""
        negative = -(x * x)
        return negative - x * negative.amax(0)

    inputs = [torch.randn(n, 4096) for n in (64, 40, 200)]
    with torch.no_grad():
        record = agrees(recomputed, inputs, of_each, dynamic=True)
    (graph,) = record.graphs
    assert graph.plan.copied
    (layout,) = {layout for _, layout in graph.executable.inputs if layout is not None}
    assert layout.shape[0] * 4096 * 4 > 2**20


def table() -> torch.Tensor:
    """[64, 7]"""
    return torch.linspace(-1, 1, 448).view(64, 7)


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x.to(memory_format=torch.channels_last), None, None, training=True)


def test_even_and_odd_sizes_have_a_program_each_where_one_cannot_serve_both() -> None:
    shapes = [(2, 3, n, 4) for n in (7, 8, 13, 10, 31, 64)]
    record = run_at(lambda x: F.gelu(F.max_pool2d(x, 2, ceil_mode=True)), shapes, dynamic=True)
    # Windows that reach beyond odd sizes begin in even ones' last place.
    assert [graph.plan.name for graph in record.graphs].count("backward") == 2


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        # Odd sizes have elements in no window.
        (lambda x: F.gelu(F.max_pool2d(x, 2)), [(2, 3, n, 4) for n in (7, 8, 13, 10, 31, 64)]),
        # A spread divides by one less than a count, which is made of halves here.
        (lambda x: F.avg_pool1d(x, 2).var((0, 2)), [(a, 3, b) for a, b in ((5, 12), (6, 9), (11, 40), (7, 31))]),
        # A norm of less than 64 KiB is one kernel, and a larger one is split: they follow one size.
        (batch_norm, [(n, 16, 8, 8) for n in (17, 10, 24, 15, 40)]),
        # At a multiple of these sizes the places would lie outside the table.
        (lambda x: F.gelu(x) + table()[torch.arange(x.shape[1])], [(3, n, 7) for n in (54, 60, 33, 64)]),
    ],
    ids=["windows", "halves", "splits", "places"],
)
def test_one_program_serves_sizes_that_would_be_planned_otherwise(
    function: Callable[[torch.Tensor], torch.Tensor], shapes: list[tuple[int, ...]]
) -> None:
    record = run_at(function, shapes, dynamic=True)
    assert [graph.plan.name for graph in record.graphs] == ["forward", "backward"]


def test_a_size_that_a_slice_cuts_off_has_another_program() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x[:, :40]).sum(-1)

    agrees(function, [torch.randn(2, n) for n in (7, 9, 100, 38, 40, 41, 500)], of_each, dynamic=True)


def test_positions_beyond_32_bits_have_another_program() -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(x.shape[0])
        return F.relu(x) + i * i

    inputs = [torch.randint(-9, 9, (n,)) for n in (30_000, 40_000, 50_000)]
    record = agrees(squares, inputs, of_each, dynamic=True)
    assert len(record.graphs) == 2


def test_loads_at_computed_places_beyond_32_bits_have_another_program() -> None:
    """Rows mirrored at their ends, a megabyte from each other."""

    def mirrored(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[None, None, :, :3].float(), (0, 0, 2, 2), mode="reflect") * 2

    memory = torch.empty(3000 * 2**20, dtype=torch.uint8)
    run = compiled(mirrored, dynamic=True)
    with recording() as record:
        for rows, programs in ((1400, 1), (1600, 1), (3000, 2)):
            x = memory[: rows * 2**20].view(rows, 2**20)
            x[:, :3] = torch.randint(256, (rows, 3), dtype=torch.uint8)
            torch._dynamo.mark_static(x, 1)
            assert torch.equal(run(x), mirrored(x)) and len(record.graphs) == programs


def test_one_program_serves_all_places_of_a_cache() -> None:
    run = compiled(step_of_cache, dynamic=True)
    mine, theirs = torch.zeros(2, 64, 8), torch.zeros(2, 64, 8)
    with torch.no_grad(), recording() as record:
        for place in (2, 3, 4, 10, 20, 33, 62):
            new = torch.randn(2, 1, 8)
            assert_same(run(mine, new, place), step_of_cache(theirs, new, place))
            assert_same(mine, theirs)
    assert len(record.graphs) == 1 and record.graphs[0].executable.kernels


def test_a_norm_of_a_length_that_changes_beside_a_write() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        scaled = torch.expm1(F.layer_norm(x, x.shape[-1:]).clamp(-2, 1)).clone()
        scaled = scaled.add_(1) * scaled
        return [scaled.double(), torch.ceil(scaled)]

    def step(run: Callable[..., Any], *leaves: torch.Tensor) -> list[Any]:
        return [differentiate(run(x)[0]) for x in leaves]

    agrees(function, [with_grad(n) for n in (16, 32, 3, 13)], step, dynamic=True)


def test_what_nothing_reads_has_no_arguments_to_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "1")

    def function(x: torch.Tensor) -> torch.Tensor:
        part = torch.floor(torch.reciprocal(x * x + 1)).clone()
        part[..., ::2].tanh_()
        return torch.sigmoid(part.flatten())

    run_at(function, [(2, 33, 1, 5), (5, 7, 1, 11), (10, 99, 1, 35)], dynamic=True)


def picking(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)[x > 0] * 2


def test_what_only_the_data_know_breaks_the_graph(lenient: None, told: Callable[[], list[str]]) -> None:
    agrees(picking, [torch.randn(rows, 20) for rows in (8, 9, 10)], of_each)
    (line,) = told()
    assert line.startswith("tilewright: the call that breaks the graph at test_dynamic_shapes.py:")


def test_a_graph_break_is_an_error_where_that_is_wished() -> None:
    with pytest.raises(Exception, match=r"^the call that breaks the graph at test_dynamic_shapes"):
        compiled(picking)(torch.randn(4, 4))


def test_the_last_variant_before_pytorch_s_limit_is_announced(told: Callable[[], list[str]]) -> None:
    def function(x: torch.Tensor, text: str) -> torch.Tensor:
        return F.gelu(x) + len(text)

    run = compiled(function)
    x = torch.randn(5)
    with torch._dynamo.config.patch(recompile_limit=3):
        for text in ("", "a", "ab", "abc", "abcd"):
            assert_same(run(x, text), function(x, text))
    (line,) = told()
    assert "test_dynamic_shapes.py" in line and "compiled 3 times" in line


@pytest.mark.parametrize("first", [20, 40])
def test_sizes_at_which_an_expression_divides_by_zero(first: int) -> None:
    """Whether the view is possible is asked as `s0 % (s0 // 5)`, which no s0 below 5 has."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1, -1, 5) * 2

    def shared(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, 5)
        return rows.sum(0) * torch.ones(60)[: 60 // rows.shape[0]].sum()

    for function in (rows, shared):
        run = compiled(function, dynamic=True)
        with recording() as record:
            for size in (first, 15, 80, 30):
                x = torch.arange(float(size))
                assert torch.equal(run(x), function(x))
        assert len(record.graphs) == 1
