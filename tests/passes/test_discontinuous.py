"""What backward compares, sorts or rounds has forward's bits: saved, or computed again only where all kernels agree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from benchmarks.discontinuous import READERS, check, is_differentiable
from tests.passes.graphs import aten
from tests.passes.test_recompute import TABLE, calls, draw, partitions
from tests.passes.test_schedule import second_is_a_gradient
from tests.tables import cases
from tilewright.emit.accuracy import feeds_discontinuous
from tilewright.emit.scheduled_nest import ScheduledNest
from tilewright.graph.calls import class_of
from tilewright.hardware.target import target_named
from tilewright.loops.exact import EXACT, feeding_discontinuous, mark_exact
from tilewright.loops.trace import is_repeatable
from tilewright.passes.fusion import fuse
from tilewright.passes.rematerialise import compute_in_each_reader
from tilewright.schedule.choose import schedule_of

FEW = ("gelu", "tanh", "softmax", "polynomial")
CPU = target_named("cpu")
Program = Callable[..., Any]


@pytest.mark.parametrize(
    ("reader", "dtype"),
    [
        ("amax", torch.float32),
        ("scatter_amax", torch.float32),
        ("at_least_amax", torch.float32),
        ("norm_inf", torch.bfloat16),
        ("fake_quantize", torch.float32),
        ("median_dim", torch.float16),
    ],
)
def test_activations_before_it_keep_the_contract(reader: str, dtype: torch.dtype) -> None:
    """All others are in `benchmarks/discontinuous.py`."""
    assert [row for row in check(FEW, reader, dtype) if not row.ok] == []


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_only_gradients_that_pytorch_has_not_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [reader for reader in READERS if not is_differentiable(reader, "cpu")] == []
    monkeypatch.setitem(READERS, "heaviside", lambda v: torch.heaviside(v, v))
    monkeypatch.setitem(READERS, "wrong", lambda v: v.view(-1, 2))
    assert not is_differentiable("heaviside", "cpu")
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        is_differentiable("wrong", "cpu")


def largest(activation: Program) -> Program:
    return lambda x: activation(x).amax(-1)


def test_backward_computes_no_rounded_value_that_it_compares() -> None:
    ours = partitions(largest(F.gelu), draw(6, 8), min_cut=False)["ours"]
    assert "eq.Tensor" in calls(ours.forward) and "eq.Tensor" not in calls(ours.backward)


def test_distances_are_computed_from_what_their_gradient_compares() -> None:
    """It compares the largest difference with the saved distances."""
    found = partitions(lambda x, y: torch.cdist(x.sin(), y, p=float("inf")), draw(5, 3), draw(4, 3), min_cut=False)
    assert torch.ops.aten.sin.default in [node.target for node in found["ours"].kept]


REPEATABLE, CONTRACTED, ROUNDED = (
    cases(TABLE, section, texts=["rounded"]) for section in ("repeatable", "contracted", "rounded")
)


@pytest.mark.parametrize("name", REPEATABLE)
def test_whether_all_kernels_compute_the_same(name: str) -> None:
    same, program = REPEATABLE[name].values()
    graph = aten(program, draw(4, 4), draw(4, 4))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert all(map(is_repeatable, nodes)) is same


def test_a_value_that_a_comparison_sees_is_computed_by_one_kernel() -> None:
    """Another kernel would round a sine otherwise in its vectors and in what remains after them."""

    def program(f: Program) -> Program:
        def compare(g: Tensor, z: Tensor) -> Tensor:
            dz = f(g * z)
            return dz - z * (dz >= dz.amax(0))

        return compare

    inputs = [draw(1024, 320), draw(1024, 320)]
    for function, again in ((torch.neg, True), (torch.sin, False)):
        graph = aten(program(function), *inputs)
        mark_exact(graph)
        copied = compute_in_each_reader(graph, fuse(graph, "forward", CPU).regions, CPU.profile)
        assert bool(copied) is again


def marked(graph: fx.Graph) -> list[str]:
    return [str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function" and n.meta.get(EXACT)]


def test_marks_go_through_kernels_up_to_library_calls() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = (x.cos() @ x).sin() * 2
        return y.view(-1).sort()[0], x.exp(), x.tan().diagonal().sort()[0]

    graph = aten(program, draw(4, 4))
    mark_exact(graph)
    assert marked(graph) == ["mm", "sin", "mul", "view", "tan", "diagonal"]


def test_marks_end_at_gradients_which_forward_has_not_seen() -> None:
    def program(x: Tensor, gradient: Tensor) -> Tensor:
        return (gradient * 2).cos() > x.sin()

    graph = aten(program, draw(4, 4), draw(4, 4))
    second_is_a_gradient(graph)
    mark_exact(graph)
    assert marked(graph) == ["sin"]


@pytest.mark.parametrize(
    ("program", "allowed"),
    [(lambda x, y: (x * y + 1).sort()[0], False), (lambda x, y: (x * y + 1).cumsum(0), True)],
    ids=["sort", "cumulative sum"],
)
def test_marks_forbid_contraction_in_the_kernels_of_forward(program: Program, allowed: bool) -> None:
    """x · y + 1 is compared in another kernel."""
    graph = aten(program, draw(4, 4), draw(4, 4))
    mark_exact(graph)
    (region,) = fuse(graph, "forward", CPU).regions
    nest = region.lowered.nest
    assert ScheduledNest(nest, schedule_of(nest)).allows_fma is allowed
    assert bool(feeds_discontinuous(nest)) is not allowed


@pytest.mark.parametrize("name", CONTRACTED)
def test_a_product_that_is_rounded_before_it_is_added_is_not_contracted(name: str) -> None:
    allowed, program = CONTRACTED[name].values()
    graph = aten(program, draw(64, 96).bfloat16())
    mark_exact(graph)
    nests = [region.lowered.nest for region in fuse(graph, "forward", target_named("h200")).regions]
    assert any(step.name == "mul" for nest in nests for step in nest.steps)
    assert all(ScheduledNest(nest, schedule_of(nest)).allows_fma for nest in nests) is allowed


@pytest.mark.parametrize("name", ROUNDED)
def test_what_a_comparison_or_a_cancellation_sees_is_rounded(name: str) -> None:
    rounded, program = ROUNDED[name].values()
    graph = aten(program, draw(4, 4).bfloat16(), torch.tensor([0, 2]))
    inside = [n for n in graph.nodes if n.op == "call_function" and class_of(n) != "layout" and n.name != "index"]
    assert sorted(str(node.target).split(".")[1] for node in feeding_discontinuous(inside)) == rounded.split()


BESIDE_NUMBERS: list[Program] = [
    lambda x: x + 0.1,
    lambda x: x - 0.3,
    lambda x: 0.3 - x,
    lambda x: torch.sub(x, 0.3, alpha=0.7),
    lambda x: torch.add(x, x.flip(0), alpha=0.3),
    lambda x: x.abs().pow(1.7),
    lambda x: x.abs().pow(2.001),
    lambda x: x.pow(3),
    lambda x: x.pow(-2),
    lambda x: x * 0.3,
    lambda x: x / 0.3,
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_beside_16_bits_are_eagers_where_something_compares(dtype: torch.dtype) -> None:
    """Some of PyTorch's kernels round the number to the dtype, others do not."""
    x = draw(64, 16).to(dtype)

    def program(x: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(y := function(x), y > 0.37) for function in BESIDE_NUMBERS]

    found = torch.compile(program, backend="tilewright", fullgraph=True)(x)
    different = [i for i, (y, z) in enumerate(zip(found, program(x), strict=True)) if not torch.equal(y[0], z[0])]
    assert different == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_draws_are_by_eagers_probabilities(dtype: torch.dtype) -> None:
    def draws(x: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid((torch.sqrt(torch.abs(x) + 0.5) * 0.5).pow(3)))

    x = torch.randn(400, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(0)
    expected = draws(x)
    torch.manual_seed(0)
    assert torch.equal(torch.compile(draws, backend="tilewright", fullgraph=True)(x), expected)


def test_equal_elements_of_a_row_are_equally_large() -> None:
    """libmvec's vectors round otherwise than its scalar functions, here of the last 5 elements."""
    functions = [torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.sinh, torch.cosh]
    functions += [torch.erfc, torch.tanh, lambda x: x.abs() ** 1.7, lambda x: torch.atan2(x, x + 2)]

    def ties(*inputs: Tensor) -> list[Tensor]:
        found = [f(x) for f, x in zip(functions, inputs, strict=True)]
        return [y == y.amax(-1, keepdim=True) for y in found]

    # One input for each function, so that each has its own kernel.
    inputs = [torch.linspace(-0.9, 0.9, 501)[:, None].expand(501, 37).contiguous() for _ in functions]
    found = torch.compile(ties, backend="tilewright", fullgraph=True)(*inputs)
    assert [n for n, tie in enumerate(found) if not tie.all()] == []
