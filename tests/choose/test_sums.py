"""Sums at indices that may repeat, gathers by a permutation and sorts of places: which become cheaper, the same."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.gpu.kernels.launching import in_turn
from tests.passes.graphs import aten, calls, run, stays
from tests.tables import cases
from tilewright.choose.sums import sum_by_index
from tilewright.hardware.target import target_named
from tilewright.passes.index.sorted_rows import gather_back, narrow_sorts
from tilewright.passes.simplify import simplify

put = torch.ops.aten.index_put
H200 = target_named("h200")
ROWS = torch.tensor([3, -1, 3, 0, 4, 3, -5])
"""Indices into five rows."""


SUMMED, IN_ROWS, SORTED, BY_ATOMICS, STAYS = (
    cases(Path(__file__).with_name("sums.txt"), section, {"put": put})
    for section in ("summed", "in rows", "sorted", "by atomics", "stays")
)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SUMMED)
def test_numbers_stay(name: str, dtype: torch.dtype) -> None:
    function, y, index = SUMMED[name]["program"], drawn(SUMMED[name]["shape"], dtype), ROWS
    graph = aten(function, y, index)
    (decision,) = sum_by_index(graph, H200)
    assert (decision.verdict, decision.graph, decision.passed_by) == ("taken", "forward", "index sums")
    assert "tilewright.index_sums.default" in calls(graph) and not any("zeros" in call for call in calls(graph))
    found, exact = run(graph, y, index), function(y.double(), index)
    assert found.dtype == dtype and found.stride() == exact.stride()
    torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_sums_of_sums() -> None:
    def function(y: Tensor, i: Tensor) -> Tensor:
        return put(y.new_zeros(5, 5), [i], put(y.new_zeros(7, 5), [None, i], y, True), True)

    y = drawn((7, 7), torch.float32)
    graph = aten(function, y, ROWS)
    assert [decision.verdict for decision in sum_by_index(graph, H200)] == ["taken", "taken"]
    torch.testing.assert_close(run(graph, y, ROWS).double(), function(y.double(), ROWS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", IN_ROWS)
def test_rows_that_shared_memory_holds(name: str, deterministic: None) -> None:
    """The same at every run, with PyTorch's deterministic algorithms too."""
    y = drawn((4, 3, 7), torch.float32)
    function = IN_ROWS[name]["program"]
    graph = aten(function, y, ROWS)
    (decision,) = sum_by_index(graph, H200)
    assert decision.verdict == "taken" and not any("zeros" in call for call in calls(graph))
    assert calls(graph)[-1] == "tilewright.scatter_sums.default"
    torch.testing.assert_close(run(graph, y, ROWS), function(y, ROWS))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def rows(y: Tensor, i: Tensor) -> Tensor:
    return y.new_zeros(5, 4).index_put((i,), y, accumulate=True)


def test_the_same_bits_in_every_run_are_pytorchs(deterministic: None) -> None:
    """Sums of single elements; sums of whole rows are sorted."""

    def function(y: Tensor, i: Tensor) -> Tensor:
        return y.new_zeros(5, 9).index_put((i, i.flip(0)), y, accumulate=True)

    (decision,) = sum_by_index(aten(function, drawn((7,), torch.float32), ROWS), H200)
    assert decision.verdict == "refused" and "deterministic algorithms" in decision.reason


@pytest.mark.parametrize(("name", "dtype"), in_turn(SORTED, [(torch.float32, torch.bfloat16)]))
def test_many_rows_are_sorted(name: str, dtype: torch.dtype) -> None:
    """Sums at the same index share the sort."""

    def function(y: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
        summed = SORTED[name]["program"]
        return summed(y, i), summed(y * 2, i)

    y, index = drawn((130000, 4, 32), dtype), torch.arange(130000) ** 2 % 1013 % 100
    graph = aten(function, y, index)
    simplify(graph, target_named("cpu"))
    decisions = sum_by_index(graph, H200)
    assert [decision.verdict for decision in decisions] == ["taken"] * 2
    assert all("sorted by index" in decision.reason for decision in decisions)
    ran = calls(graph)
    assert ran.count("tilewright.embedding_sums.default") == 2 and "tilewright.index_sums.default" not in ran
    assert ran.count("sort.stable") == 1
    for found, exact in zip(run(graph, y, index), function(y.double(), index), strict=True):
        assert found.dtype == dtype and found.stride() == exact.stride()
        torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.parametrize("name", BY_ATOMICS)
def test_what_atomics_add(name: str) -> None:
    row = BY_ATOMICS[name]
    graph = aten(row["program"], drawn(row["shape"], torch.float32), torch.arange(row["count"]))
    (decision,) = sum_by_index(graph, H200)
    assert decision.verdict == "taken" and "by atomics" in decision.reason


def test_the_same_bits_in_every_run_are_sorted(deterministic: None) -> None:
    y = drawn((7, 4), torch.float32)
    graph = aten(rows, y, ROWS)
    (decision,) = sum_by_index(graph, H200)
    assert decision.verdict == "taken" and "sorted by index" in decision.reason
    torch.testing.assert_close(run(graph, y, ROWS), rows(y, ROWS))


EDGES = torch.tensor([3, -1, 3, 0, 4, 3, -5, 2, 0, 0, 1]), torch.tensor([1, 0, 4, 4, 1, 1, 1, 6, 4, 0, 0])
"""From rows of five to rows of seven; nothing goes to three of these."""


def neighbours(how: str, base: float, *, include: bool) -> Callable[..., Tensor]:
    """The largest or smallest, or the sum, of the rows at the other ends of edges."""

    def function(x: Tensor, source: Tensor, to: Tensor) -> Tensor:
        sent = x.relu()[source]
        places = to[:, None].expand_as(sent)
        return x.new_full((7, 3), base).scatter_reduce(0, places, sent, how, include_self=include)

    return function


NEIGHBOURS = [
    ("amax", 0.0, True), ("amax", 0.0, False), ("amin", 0.0, True), ("amin", 0.0, False), ("amax", 0.5, True),
    ("amin", 0.5, True), ("sum", 0.0, True), ("mean", 0.0, True), ("mean", 0.0, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "base", "include", "dtype"), in_turn(NEIGHBOURS, [(torch.float32, torch.bfloat16)]), ids=str
)
def test_rows_of_neighbours(how: str, base: float, include: bool, dtype: torch.dtype, deterministic: None) -> None:
    """Neither they nor their gradient write a row for each edge. Two edges are the same, so that extremes are equal."""
    forward = neighbours(how, base, include=include)

    def both(x: Tensor, source: Tensor, to: Tensor) -> tuple[Tensor, Tensor]:
        out = forward(x, source, to)
        weights = torch.arange(21, dtype=out.dtype).view(7, 3)
        return out.detach(), torch.autograd.grad((out * weights).sum(), x)[0]

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(3)).to(dtype)
    graph = aten(both, x.requires_grad_(), *EDGES)
    simplify(graph, target_named("cpu"))
    decisions = sum_by_index(graph, H200)
    assert {decision.verdict for decision in decisions} == {"taken"}
    graph.eliminate_dead_code()
    # PyTorch divides the rows of a mean's gradient after it has gathered them.
    assert how == "mean" or not [n for n in graph.nodes if getattr(n.meta.get("val"), "shape", ()) == (11, 3)]
    exact = both(x.detach().double().requires_grad_(), *EDGES)
    for found, true in zip(run(graph, x, *EDGES), exact, strict=True):
        torch.testing.assert_close(found.double(), true, rtol=2e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_an_index_of_a_neighbour_is_checked(deterministic: None) -> None:
    x, (source, to) = drawn((5, 3), torch.float32), EDGES
    graph = aten(neighbours("sum", 0.0, include=True), x, *EDGES)
    sum_by_index(graph, H200)
    with pytest.raises(IndexError, match="out of bounds"):
        run(graph, x, torch.where(source == 2, 5, source), to)


def test_an_index_outside_stays_outside_on_narrow_keys(deterministic: None) -> None:
    """100 places have keys of eight bits, in which 300 would be 44."""
    graph = aten(lambda y, i: y.new_zeros(100, 3).index_add(0, i, y), drawn((4, 3), torch.float32), EDGES[0][:4])
    sum_by_index(graph, H200)
    for outside in (300, -1, -200):
        with pytest.raises(IndexError, match="out of range of the sums"):
            run(graph, drawn((4, 3), torch.float32), torch.tensor([1, outside, 3, 3]))


@pytest.mark.parametrize("columns", [0, 3])
def test_ones_are_counted_by_the_sort(columns: int, deterministic: None) -> None:
    def function(x: Tensor, i: Tensor) -> Tensor:
        ones = x.new_ones(11, columns) if columns else x.new_ones(11)
        return x.new_zeros(7, *ones.shape[1:]).index_add(0, i, ones)

    x = drawn((5,), torch.bfloat16)
    graph = aten(function, x, EDGES[1])
    sum_by_index(graph, H200)
    graph.eliminate_dead_code()
    assert not any("sums" in call for call in calls(graph))
    assert torch.equal(run(graph, x, EDGES[1]), function(x, EDGES[1]))
    assert run(graph, x, EDGES[1]).stride() == function(x, EDGES[1]).stride()


def test_what_is_compared_with_other_rows_is_summed_as_it_is(deterministic: None) -> None:
    def function(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x.new_zeros(5, 3).index_add(0, i % 5, (x[i] == x[j]).to(x.dtype))

    x = drawn((5, 3), torch.float32)
    graph = aten(function, x, *EDGES[:1], EDGES[0].flip(0))
    sum_by_index(graph, H200)
    assert "tilewright.embedding_sums.default" in calls(graph)
    assert torch.equal(run(graph, x, EDGES[0], EDGES[0].flip(0)), function(x, EDGES[0], EDGES[0].flip(0)))


def test_what_stays() -> None:
    y = drawn((7, 4), torch.float32)
    for reason, row in STAYS.items():
        (decision,) = stays(lambda graph: sum_by_index(graph, H200), row["program"], y, ROWS)
        assert decision.verdict == "refused" and reason in decision.reason
    assert sum_by_index(aten(rows, y, ROWS), target_named("cpu")) == []
    assert sum_by_index(aten(lambda y, i: y.new_zeros(5, 4).index_put((i,), y), y, ROWS), H200) == []


def test_what_has_a_size_that_depends_on_data_stays() -> None:
    def sent(y: Tensor, i: Tensor) -> Tensor:
        kept = torch.nonzero(y[:, 0] > 0)[:, 0]
        return y.exp().index_add(0, kept, y[kept])

    graph = make_fx(sent, tracing_mode="symbolic")(drawn((7, 4), torch.float32), ROWS).graph
    (decision,) = sum_by_index(graph, H200)
    assert decision.verdict == "refused" and "sizes are not known" in decision.reason


Function = Callable[[Tensor, Tensor], Tensor]


def by_order(x: Tensor, keys: Tensor) -> Tensor:
    return x[keys.sort()[1]] * torch.arange(len(keys)).sin()[:, None]


def there_and_back(x: Tensor, keys: Tensor) -> Tensor:
    """Each row to three places, in the order of `keys`, and the three together again."""
    order = keys.argsort()
    back = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
    sent = x[order // 3] * torch.arange(len(keys)).sin()[:, None]
    return sent[back].view(len(x), 3, -1).sum(1)


def gradient(function: Function) -> Function:
    def call(x: Tensor, keys: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(function(x.requires_grad_(), keys).square().sum(), x)
        return dx

    return call


def inputs(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 5, generator=draw, dtype=torch.float64), torch.randint(0, 4, (keys,), generator=draw)


@pytest.mark.parametrize(("function", "rows", "keys"), [(by_order, 12, 12), (there_and_back, 7, 21)])
def test_a_gradient_by_a_permutation_adds_nothing_up(function: Function, rows: int, keys: int) -> None:
    given = inputs(rows, keys)
    graph = aten(gradient(function), *given)
    before = calls(graph)
    decisions = gather_back(graph, target_named("cpu"))
    assert [decision.verdict for decision in decisions] == ["taken"] * (1 if function is by_order else 2)
    # One scatter is left in each: the inverse.
    assert before.count("index_put.default") == len(decisions) + (function is there_and_back)
    assert calls(graph).count("index_put.default") == 1
    torch.testing.assert_close(run(graph, *given), gradient(function)(*given), rtol=1e-14, atol=1e-14)


def by_part_of_a_permutation(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.sort()[1]
    return x[torch.zeros_like(order).index_put((order[:5],), torch.arange(5))]


OTHERS: dict[str, tuple[Function, int, int]] = {
    "of fewer": (lambda x, keys: x[keys.sort()[1][:5]], 12, 12),
    "of more rows": (lambda x, keys: x[keys.sort()[1]], 13, 12),
    "by values": (lambda x, keys: x[keys.sort()[0]], 12, 12),
    "of columns": (lambda x, keys: x[:, keys.sort()[1]], 12, 5),
    "to uneven places": (lambda x, keys: x[keys.sort()[1] // 2], 7, 13),
    "by a part of a permutation": (by_part_of_a_permutation, 12, 12),
}


@pytest.mark.parametrize(("function", "rows", "keys"), OTHERS.values(), ids=OTHERS)
def test_other_gradients_of_gathers_stay(function: Function, rows: int, keys: int) -> None:
    assert stays(lambda graph: gather_back(graph, target_named("cpu")), gradient(function), *inputs(rows, keys)) == []


def by_expert(scores: Tensor) -> Any:
    return scores.topk(2, -1)[1].reshape(-1).sort(stable=True)


def of_columns(scores: Tensor) -> Any:
    return scores.topk(2, 0)[1].flatten().sort(descending=True, stable=True)


def keys_of(graph: torch.fx.Graph) -> list[torch.dtype]:
    return [node.args[0].meta["val"].dtype for node in graph.nodes if "sort" in str(node.target)]


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (by_expert, (30, 8), torch.int8),
        (by_expert, (30, 128), torch.int8),
        (by_expert, (30, 129), torch.int16),
        (of_columns, (129, 8), torch.int16),
        (by_expert, (3, 2**15 + 1), torch.int64),
    ],
)
def test_keys_are_as_narrow_as_the_largest(
    function: Callable[[Tensor], Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    graph = aten(function, scores)
    decisions = narrow_sorts(graph, H200)
    assert keys_of(graph) == [dtype] and len(decisions) == (dtype != torch.int64)
    for ours, eager in zip(run(graph, scores), function(scores), strict=True):
        assert torch.equal(ours, eager) and ours.dtype == eager.dtype == torch.int64


@pytest.mark.parametrize(
    "function",
    [lambda x: x.topk(2)[0].flatten().sort()[1], lambda x: x.to(torch.int64).flatten().sort()[1]],
    ids=["of values", "of places"],
)
def test_other_keys_stay(function: Callable[[Tensor], Tensor]) -> None:
    graph = aten(function, torch.rand(6, 8))
    before = keys_of(graph)
    assert narrow_sorts(graph, H200) == [] and keys_of(graph) == before


def test_a_cpu_sorts_wide_keys() -> None:
    graph = aten(by_expert, torch.rand(6, 8))
    assert narrow_sorts(graph, target_named("cpu")) == [] and keys_of(graph) == [torch.int64]
