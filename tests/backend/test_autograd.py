"""Autograd's contract holds for a compiled function, also for results without a gradient and in forward mode."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from tests.backend.compiling import Run, agrees, assert_same, chain, compiled, differentiate, kernels, twin, with_grad
from tilewright import functional
from tilewright.backend import backend, recording


@pytest.mark.usefixtures("lenient")
def test_compiled_autograd() -> None:
    x = with_grad(40, 200)
    y = twin(x)
    with recording() as record, torch._dynamo.config.patch(compiled_autograd=True):
        compiled(lambda: chain(x).sum().backward())()
    chain(y).sum().backward()
    assert_same(x.grad, y.grad)
    assert not [fallback for fallback in record.fallbacks if "cannot be traced" in fallback.why]
    assert kernels(record)


def test_some_inputs_need_no_gradient() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * y + z

    agrees(function, [with_grad(40, 20), torch.randn(40, 20), with_grad(20)], backward=True)
    agrees(function, [torch.randn(40, 20), torch.randn(40, 20), torch.randn(20)])


@pytest.mark.parametrize("how", ["amax", "amin"])
def test_the_gradient_of_an_extreme_finds_it_again(how: str) -> None:
    """Backward compares recomputed values with the extreme; if none were equal, it would divide by 0."""
    source, to = (torch.randint(50, (300,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            sent = x.sin()[source]
            x = torch.zeros_like(x).scatter_reduce(0, to[:, None].expand_as(sent), sent, how) + x
        return x

    x = torch.randn(50, 32).bfloat16().requires_grad_()
    y = twin(x)
    compiled(layers)(x).sum().backward()
    layers(y).sum().backward()
    # A value and its recomputed twin may differ by one rounding; which of several edges has the extreme may not.
    torch.testing.assert_close(x.grad, y.grad, rtol=2e-2, atol=5e-2)


def test_detached_results() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x)
        return h.detach() * 2 + h, h.detach()

    agrees(function, [with_grad(40, 20)], backward=True)


def test_an_input_changed_before_backward_is_never_used_in_silence() -> None:
    x = with_grad(40, 20)
    result = compiled(torch.relu)(x * 1)
    with torch.no_grad():
        x.add_(100)
    differentiate(result)  # x itself was not saved
    inner = torch.randn(40, 20)
    weight = with_grad(40, 20)
    result = compiled(lambda a, w: F.gelu(a * w))(inner, weight)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(result)


def test_no_grad_and_inference_mode_then_training() -> None:
    function = compiled(chain)
    x = with_grad(40, 20)
    y = twin(x)
    with torch.inference_mode():
        inferred = function(x)
    with torch.no_grad():
        ungraded = function(x)
    trained = function(x)
    differentiate(trained)
    expected = chain(y)
    differentiate(expected)
    assert inferred.is_inference() and not ungraded.requires_grad and trained.requires_grad
    for result in (inferred.clone(), ungraded, trained.detach()):
        assert_same(result, expected.detach())
    assert_same(x.grad, y.grad)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.GELU(), nn.LayerNorm(30))


def assert_close_in_bfloat16(ours: torch.Tensor, eager: torch.Tensor) -> None:
    assert ours.dtype == eager.dtype
    torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def test_autocast_around_the_call() -> None:
    model, x = layers(), torch.randn(40, 20)
    function = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = function(x), model(x)
    assert eager.dtype == torch.bfloat16
    assert_close_in_bfloat16(ours, eager)
    ours, eager = function(x), model(x)  # and outside of it again
    assert ours.dtype == torch.float32
    assert_same(ours, eager)


def test_backward_outside_of_the_autocast_that_is_around_the_call() -> None:
    """Where the function turns autocast off, gradients that half precision cannot hold stay in fp32, as in eager."""
    model, x = nn.Linear(20, 30), torch.randn(40, 20)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return model(x.float())  # type: ignore[no-any-return]

    gradients = []
    for run in (compiled(function), function):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            y = run(x)
        (y * 1e5).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert gradients[1][1] is not None and gradients[1][1].min() > torch.finfo(torch.float16).max
    torch.testing.assert_close(*gradients)


def test_autocast_inside_the_function() -> None:
    linear = nn.Linear(20, 30)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = linear(x)
        return F.gelu(h) * 2

    x = torch.randn(40, 20)
    assert_close_in_bfloat16(compiled(function)(x), function(x))


@pytest.mark.parametrize(
    "function",
    [torch.exp, torch.tanh, torch.relu, lambda x: x.softmax(1), lambda x: (x @ x.t()).exp()],
    ids=["exp", "tanh", "relu", "softmax", "exp of a product"],
)
def test_a_result_written_to_before_backward_gives_no_wrong_gradient(function: Run) -> None:
    """Eager raises. A compiled backward that saved the result raises; one that computes it again need not."""
    x = with_grad(6, 7)
    reference = twin(x)
    function(reference).sum().backward()
    result = compiled(function)(x)
    with torch.no_grad():
        result.mul_(2)
    try:
        result.sum().backward()
    except RuntimeError as error:
        assert "has been modified by an inplace operation" in str(error)
    else:
        assert_same(x.grad, reference.grad)


class Head(nn.Module):
    """A loss, its logits and what they were computed of; all have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 40)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = x.sin()
        logits = self.project(hidden)
        return nn.functional.cross_entropy(logits.view(-1, 40), target.view(-1)), logits, hidden


def gradients(function: Any, model: nn.Module, x: Tensor, target: Tensor, uses: str) -> dict[str, Tensor | None]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    loss, logits, hidden = function(leaf, target)
    total = {"loss": loss, "logits": logits.square().sum(), "all": loss + logits.sum() * 3 + hidden.cos().sum()}[uses]
    total.backward()
    return {"x": leaf.grad} | {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def head() -> tuple[nn.Module, Tensor, Tensor]:
    return Head(), torch.randn(2, 6, 16), torch.randint(0, 40, (2, 6))


@pytest.mark.parametrize("order", [("loss", "loss"), ("loss", "all", "logits", "loss"), ("logits",), ("all",)], ids=str)
def test_gradients_are_eagers_whatever_is_used(order: tuple[str, ...], head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with recording() as record:
        for uses in order:
            ours = gradients(compiled, model, x, target, uses)
            assert_same(ours, gradients(model, model, x, target, uses))
    # Forward and the backward of the loss; those of other results are compiled when one is used.
    others = len({*order} - {"loss"})
    assert [graph.plan.name for graph in record.graphs] == ["forward", "backward"] + ["backward"] * others


def test_nothing_is_added_to_the_gradient_of_the_logits(head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    with recording() as record:
        torch.compile(model, backend=backend)(x, target)[0].backward()
    _, backward_ = record.graphs
    inputs = backward_.plan.graph.find_nodes(op="placeholder")
    assert sum("tangents" in node.name for node in inputs) == 1
    targets = {str(node.target) for node in backward_.plan.graph.nodes}
    assert "aten.add.Tensor" not in targets and "aten.full.default" not in targets


class Heads(nn.Module):
    """Three results of one input, two of them by parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = nn.Linear(6, 6), nn.Linear(6, 4)
        self.norm, self.window = nn.LayerNorm(6), nn.Conv1d(1, 2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = self.norm(self.body(x).relu())
        return hidden, self.pooler(hidden[:, 0]).tanh(), self.window(hidden[:, :1]).softmax(-1)


@pytest.mark.parametrize(
    ("used", "dynamic"),
    [((0,), True), ((1, 2), False)],
    ids=str,
)
def test_what_no_used_result_depends_on_has_no_gradient(used: tuple[int, ...], dynamic: bool) -> None:
    model, x = Heads(), torch.randn(3, 5, 6)
    run = compiled(model, fullgraph=True, dynamic=dynamic)
    # The second call is that of the executor.
    for call in (model, run, run):
        model.zero_grad()
        results = call(x)
        torch.stack([results[i].square().sum() for i in used]).sum().backward()
        if call is model:
            expected = {name: p.grad for name, p in model.named_parameters()}
            continue
        found = {name: p.grad for name, p in model.named_parameters()}
        assert [name for name in found if found[name] is None] == [n for n in expected if expected[n] is None]
        assert_same(found, expected)


@pytest.mark.parametrize("dynamic", [False, None, True])
def test_the_derivative_of_an_unused_result_is_not_computed(dynamic: bool | None) -> None:
    """The logarithm's derivative is infinite at 0, and its product with a zero gradient would be NaN."""
    run = compiled(lambda x: (x.log().t(), x * 2), dynamic=dynamic)
    for rows in (2, 2, 3, 4):
        x = torch.tensor([[-1.0, 0.0, 2.0]] * rows, requires_grad=True)
        run(x)[1].sum().backward()
        assert torch.equal(x.grad, torch.full((rows, 3), 2.0))  # type: ignore[arg-type]


def test_what_was_never_used_in_a_loss_has_no_gradient() -> None:
    other = nn.Parameter(torch.ones(16))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), (x * other).cos()

    x = torch.randn(2, 16, requires_grad=True)
    loss, _ = torch.compile(function, backend=backend)(x)
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert other.grad is None


def test_a_gradient_that_comes_in_a_second_pass(head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    compiled = torch.compile(model, backend=backend)
    leaf = x.clone().requires_grad_()
    loss, logits, _ = compiled(leaf, target)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()  # type: ignore[union-attr]
    (loss + logits.sum()).backward()
    eager = x.clone().requires_grad_()
    expected, its_logits, _ = model(eager, target)
    (2 * expected + its_logits.sum()).backward()
    assert_same(leaf.grad, eager.grad)
    assert not torch.equal(first, leaf.grad)  # type: ignore[arg-type]


def function(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm((x.sin() * x).exp(), (8,))


@pytest.mark.parametrize("is_compiled_before", [False, True])
def test_the_tangent_is_eagers(is_compiled_before: bool) -> None:
    x, tangent = torch.randn(2, 5, 8)
    run = compiled(function, dynamic=False)
    with recording() as record:
        if is_compiled_before:
            run(x)
        with forward_ad.dual_level():
            primal, found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, tangent)))
            expected = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            assert found is not None
            assert_same((primal, found), tuple(expected))
            # What carries no tangent runs the kernels.
            assert forward_ad.unpack_dual(run(x)).tangent is None
    assert kernels(record)
    assert_same(run(x), function(x))


def test_what_has_no_tangent_says_so() -> None:
    x, tangent = torch.randn(2, 5, 8)
    run = compiled(lambda x: functional.softmax(x * 2, -1).sin(), dynamic=False)
    run(x)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"tilewright\.\w+.*has no tangent"):
        run(forward_ad.make_dual(x, tangent))
