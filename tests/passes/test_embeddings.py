"""Gradients of embeddings: which become tilewright's sums, and their numbers."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.compiling import compiled
from tests.choose.test_kernels import priced
from tests.passes.graphs import aten, calls, run
from tilewright.backend import recording
from tilewright.choose import embeddings
from tilewright.choose.embeddings import sum_sorted
from tilewright.compile.stages import rewrite
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target, target_named
from tilewright.kernels import segment_reduce  # noqa: F401  (registers the operators that tests call)
from tilewright.passes.index.embeddings import add_sums_in_place
from tilewright.runtime.native import Native

H200 = Target(profile_for("h200"), False)


class Table(nn.Module):
    def __init__(self, dtype: torch.dtype, **options: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(50257, 64, dtype=dtype, **options)

    def forward(self, indices: Tensor) -> Tensor:
        return self.table(indices).sin()


@pytest.mark.parametrize(
    ("model", "inputs", "device", "verdicts"),
    [
        (Table(torch.bfloat16), "int64[8,1024]", "h200", ["taken"]),
        (Table(torch.float32), "int32[8,1024]", "h200", ["taken"]),
        (Table(torch.bfloat16), "int64[3,256]", "h200", ["refused"]),
        (Table(torch.float64), "int64[8,1024]", "h200", ["refused"]),
        (Table(torch.bfloat16, scale_grad_by_freq=True), "int64[8,1024]", "h200", ["refused"]),
        (Table(torch.bfloat16), "int64[8,1024]", "cpu", []),
    ],
)
def test_which_are_summed_in_the_kernel(model: nn.Module, inputs: str, device: str, verdicts: list[str]) -> None:
    found = priced(model, inputs, device)
    assert [d.verdict for d in found.program.decisions if d.passed_by == "embeddings"] == verdicts
    ran = {kernel for _, _, kernel in found.plan.launches()}
    assert ("tilewright.embedding_sums.default" in ran) == (verdicts == ["taken"])


class Bags(nn.Module):
    def __init__(self, mode: str, **options: bool) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(5000, 64, mode=mode, dtype=torch.bfloat16, **options)

    def forward(self, indices: Tensor) -> Tensor:
        return self.bags(indices).sin()


@pytest.mark.parametrize(
    ("model", "verdicts"),
    [
        (Bags("sum"), ["taken"]),
        (Bags("mean"), ["taken"]),
        (Bags("max"), []),
        (Bags("sum", scale_grad_by_freq=True), []),
    ],
    ids=["sum", "mean", "max", "by frequency"],
)
def test_gradients_of_bags_are_those_of_their_rows(model: nn.Module, verdicts: list[str]) -> None:
    found = priced(model, "int64[512,4]", "h200")
    assert [d.verdict for d in found.program.decisions if d.passed_by == "embeddings"] == verdicts
    assert any("_embedding_bag_backward" in kernel for _, _, kernel in found.plan.launches()) == (not verdicts)


@pytest.mark.parametrize("mode", [0, 1], ids=["sum", "mean"])
@pytest.mark.parametrize("padding", [-1, 2])
def test_numbers_of_bags_stay(mode: int, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bags of several lengths, one of them empty."""
    indices, offsets = torch.randint(7, (30,)), torch.tensor([0, 4, 4, 11, 29])
    bag_of = torch.bucketize(torch.arange(30), offsets, right=True) - 1
    sizes = torch.zeros(5, dtype=torch.int64).index_add(0, bag_of, (indices != padding).long())
    dout, table = torch.randn(5, 9), torch.randn(7, 9, requires_grad=True)

    def gradient(dout: Tensor, indices: Tensor, offsets: Tensor, bag_of: Tensor, sizes: Tensor) -> Tensor:
        return torch.ops.aten._embedding_bag_backward(
            dout, indices, offsets, bag_of, sizes, sizes, 7, False, mode, False, None, padding
        )

    graph = aten(gradient, dout, indices, offsets, bag_of, sizes)
    sum_sorted(graph, H200)
    assert "_embedding_bag_backward.default" not in calls(graph)
    padded = None if padding < 0 else padding
    y = F.embedding_bag(indices, table, offsets, mode=("sum", "mean")[mode], padding_idx=padded)
    (true,) = torch.autograd.grad(y, table, dout)
    torch.testing.assert_close(run(graph, dout, indices, offsets, bag_of, sizes), true)


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("expanded", [False, True])
def test_numbers_stay(padding: int, expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "UNSORTED", 0)
    indices, table = torch.randint(7, (5, 6)), torch.randn(7, 9)
    if expanded:
        indices = indices[:1].expand(5, 6)
    dout = torch.randn(5, 6, 9)

    def gradient(dout: Tensor, indices: Tensor) -> Tensor:
        return torch.ops.aten.embedding_dense_backward(dout, indices, 7, padding, False)

    graph = aten(gradient, dout, indices)
    assert [d.verdict for d in sum_sorted(graph, H200)] == ["taken"]
    assert calls(graph)[-1] == "tilewright.embedding_sums.default"
    wide = table.double().requires_grad_()
    rows = F.embedding(indices, wide, None if padding < 0 else padding)
    (exact,) = torch.autograd.grad(rows, wide, dout.double())
    torch.testing.assert_close(run(graph, dout, indices).double(), exact, rtol=1e-5, atol=1e-5)


class Tables(nn.Module):
    """Tables of one width; a result has the rows of all, after another tensor's."""

    def __init__(self, laid: str, padding: int | None = None) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8, padding) for n in (40, 7, 131))
        self.laid = laid

    def forward(self, x: Tensor, indices: Tensor) -> Tensor:
        places = (indices % 7).unbind(2) if self.laid == "apart" else [indices[:, :, t] % 7 for t in range(3)]
        rows = [x.sin(), *(table(i) for table, i in zip(self.tables, places, strict=True))]
        if self.laid == "stacked":
            return torch.stack(rows).sin().sum()
        return sum(((row * k).sin().sum() for k, row in enumerate(rows)), start=x.sum())


@pytest.mark.parametrize(("laid", "padding"), [("stacked", 2), ("apart", None)])
def test_tables_of_one_width_are_one_sum(laid: str, padding: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients are tensors of their own for autograd: backward adds to them, and users write to them."""
    monkeypatch.setattr(rewrite("sum_sorted"), "run", lambda graph, _: sum_sorted(graph, H200))
    monkeypatch.setattr(embeddings, "UNSORTED_US", 28.0)
    model = Tables(laid, padding)
    with recording() as record:
        mine = compiled(copy.deepcopy(model))
        mine(torch.randn(5, 3, 8), torch.zeros(5, 3, 3, dtype=torch.int64))
    (joined,) = [graph for graph in record.graphs if graph.plan.name == "backward"]
    ran = [str(node.target) for node in joined.plan.graph.nodes]
    assert ran.count("tilewright.embedding_sums.default") == ran.count("aten.sort.stable") == 1
    exact, weights = copy.deepcopy(model).double(), list(mine.parameters())
    for executor in (None, Native(torch.device("cpu"))):
        joined.executable.native = executor
        for _ in range(2):
            x, indices = torch.randn(5, 3, 8), torch.randint(40, (5, 3, 3))
            mine(x, indices).backward()
            exact(x.double(), indices).backward()
        for weight, true in zip(weights, exact.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, true.grad, check_dtype=False)
        for found in torch.autograd.grad(mine(x, indices), weights):
            assert not found._is_view() and found.data_ptr() % 16 == 0
            found.add_(weights[0].sum())


class Tied(nn.Module):
    """A language model of one layer whose table is the weight of its output, too."""

    def __init__(self, entries: int) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, 64, dtype=torch.bfloat16)

    def forward(self, indices: Tensor) -> Tensor:
        return (self.table(indices).sin() @ self.table.weight.t()).sum()


@pytest.mark.parametrize("entries", [4096, 4099])
def test_sums_go_into_the_product_that_they_are_added_to(entries: int) -> None:
    """Also for a padded vocabulary, into the part without padding."""
    found = priced(Tied(entries), "int64[8,1024]", "h200")
    taken = [d for d in found.program.decisions if "added to the product" in d.reason and d.passed_by == "embeddings"]
    assert [(d.graph, d.verdict) for d in taken] == [("backward", "taken")]
    ran = [kernel for _, _, kernel in found.plan.launches()]
    assert "tilewright.add_embedding_sums_.default" in ran and "tilewright.embedding_sums.default" not in ran


@pytest.mark.parametrize("device", ["h200", "cpu"])
def test_where_sums_are_not_added_in_place(device: str) -> None:
    """The product is read by somebody else, or what they are added to is not a product."""
    programs: dict[str, tuple[Callable[..., object], int]] = {
        "read": (lambda product, sums: (product + sums, product), 0),
        "no product": (lambda product, sums: product.sin() + sums, 0),
        "in place": (lambda product, sums: (product + sums).sin(), 1),
    }
    keys, order = torch.arange(12, dtype=torch.int32) // 2, torch.arange(12)
    given = torch.randn(12, 6), torch.randn(6, 6), torch.randn(12, 6), keys, order, torch.arange(0, 25, 2)
    for function, count in programs.values():

        def gradient(x: Tensor, w: Tensor, *sent: Tensor, function: Callable[..., object] = function) -> object:
            if device == "cpu":
                rows, places = sent[0].view(3, 4, 6), sent[1].view(3, 4).long()
                return function(x @ w, torch.ops.aten.embedding_dense_backward(rows, places, 12, 3, False))
            return function(x @ w, torch.ops.tilewright.embedding_sums(*sent, 12, -1))

        graph = aten(lambda *tensors, gradient=gradient: gradient(*tensors), *given)
        assert len(add_sums_in_place(graph, target_named(device))) == count
        torch.testing.assert_close(run(graph, *given), gradient(*given))
