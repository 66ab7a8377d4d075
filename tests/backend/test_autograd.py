"""What autograd promises of any function holds for a compiled one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.compiling import agrees, assert_same, compiled, differentiate, kernels, twin, with_grad
from tilewright.backend import recording


def chain(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x * 2) + torch.softmax(x, -1)


def test_gradients_are_eager_s() -> None:
    agrees(chain, [with_grad(33, 70)], backward=True)


def test_two_backwards_through_a_retained_graph() -> None:
    x = with_grad(40, 200)
    y = twin(x)
    for function, leaf in ((compiled(chain), x), (chain, y)):
        result = function(leaf)
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()
    assert_same(x.grad, y.grad)


def test_a_graph_is_retained_after_one_that_was_not() -> None:
    x = with_grad(40, 200)
    y = twin(x)
    for function, leaf in ((compiled(chain), x), (chain, y)):
        function(leaf).sum().backward()
        result = function(leaf)
        result.sum().backward(retain_graph=True)
        result.square().sum().backward()
    assert_same(x.grad, y.grad)


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


def test_saved_tensor_hooks_see_what_is_saved() -> None:
    x = with_grad(40, 200)
    y = twin(x)
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = compiled(chain)(x)
    differentiate(result)
    differentiate(chain(y))
    assert packed
    assert_same(x.grad, y.grad)


def test_saved_tensors_moved_away_and_back() -> None:
    x = with_grad(40, 200)
    y = twin(x)
    with torch.autograd.graph.save_on_cpu():
        result = compiled(chain)(x)
    differentiate(result)
    differentiate(chain(y))
    assert_same(x.grad, y.grad)


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


def test_one_tensor_as_two_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * y

    x = with_grad(40, 20)
    y = twin(x)
    differentiate(compiled(function)(x, x))
    differentiate(function(y, y))
    assert_same(x.grad, y.grad)


def test_detached_results() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = F.gelu(x)
        return h.detach() * 2 + h, h.detach()

    agrees(function, [with_grad(40, 20)], backward=True)


def pooled(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) * 2 + 1


def in_the_storage_of_an_operand(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.ones(200, 200)) * 2


@pytest.mark.parametrize("function", [pooled, in_the_storage_of_an_operand])
def test_results_may_be_written_before_backward(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = with_grad(300, 200)
    y = twin(x)
    for result in (compiled(function)(x), function(y)):
        result.add_(1)
        result.mul_(2)
        differentiate(result)
    assert_same(x.grad, y.grad)


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


def test_dropout_draws_as_eager_does() -> None:
    agrees(lambda x: F.dropout(F.gelu(x), 0.3) + F.dropout(x, 0.5), [with_grad(40, 21)], backward=True)
