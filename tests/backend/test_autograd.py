"""What autograd promises of any function holds for a compiled one."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.compiling import agrees, assert_same, chain, compiled, differentiate, kernels, twin, with_grad
from tilewright.backend import recording

Run = Callable[[torch.Tensor], torch.Tensor]


def twice_through_a_retained_graph(run: Run, x: torch.Tensor) -> None:
    result = run(x)
    result.sum().backward(retain_graph=True)
    result.square().sum().backward()


def retained_after_one_that_was_not(run: Run, x: torch.Tensor) -> None:
    run(x).sum().backward()
    twice_through_a_retained_graph(run, x)


def with_saved_tensors_cloned(run: Run, x: torch.Tensor) -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(x)
    differentiate(result)
    assert packed


def with_saved_tensors_moved_away_and_back(run: Run, x: torch.Tensor) -> None:
    with torch.autograd.graph.save_on_cpu():
        result = run(x)
    differentiate(result)


def with_one_tensor_as_two_inputs(run: Run, x: torch.Tensor) -> None:
    differentiate(run(x, x))


def with_the_result_written_before_backward(run: Run, x: torch.Tensor) -> None:
    result = run(x)
    result.add_(1)
    result.mul_(2)
    differentiate(result)


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * y


def in_the_storage_of_an_operand(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.ones(200, 200)) * 2


STEPS: list[tuple[Run, Callable[..., None]]] = [
    (chain, twice_through_a_retained_graph),
    (chain, retained_after_one_that_was_not),
    (chain, with_saved_tensors_cloned),
    (chain, with_saved_tensors_moved_away_and_back),
    (product, with_one_tensor_as_two_inputs),
    (lambda x: F.gelu(x) * 2 + 1, with_the_result_written_before_backward),
    (in_the_storage_of_an_operand, with_the_result_written_before_backward),
]


@pytest.mark.parametrize(("function", "step"), STEPS)
def test_gradients_are_eagers(function: Run, step: Callable[..., None]) -> None:
    agrees(function, [with_grad(300, 200)], step)


def test_a_second_backward_without_retaining_is_pytorch_s_error() -> None:
    result = compiled(chain)(with_grad(4, 20)).sum()
    result.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        result.backward()


def test_double_backward_is_pytorch_s_error() -> None:
    x = with_grad(4, 20)
    (gradient,) = torch.autograd.grad(compiled(chain)(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


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
