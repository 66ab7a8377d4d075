"""Calls of compiled graphs that the executor makes without AOTAutograd's wrappers keep what autograd promises."""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd import forward_ad
from torch.nn import functional as F

from tests.backend.compiling import (
    STEPS,
    Run,
    agrees,
    assert_same,
    chain,
    compiled,
    deterministic,
    differentiate,
    product,
    twin,
    with_grad,
)

pytestmark = pytest.mark.usefixtures("executor")
TWICE = "backward through the graph a second time"


def called(function: Callable[..., Any], *inputs: Any) -> Callable[..., Any]:
    """`function` compiled and called once, in AOTAutograd's wrappers: from now on the executor calls it."""
    run = compiled(function)
    run(*inputs)
    return run


def is_native(result: torch.Tensor) -> bool:
    """Whether the executor made the node of a result."""
    node = result.grad_fn
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


@pytest.mark.parametrize(("function", "step"), STEPS)
def test_gradients_of_the_second_call_are_eagers(function: Run, step: Callable[..., None]) -> None:
    def second(run: Run, *inputs: torch.Tensor) -> None:
        step(run, *inputs)
        step(run, *inputs)

    agrees(function, [with_grad(300, 200)], second)


def test_the_node_is_shown_as_aotautograds() -> None:
    result = called(chain, with_grad(4, 20))(with_grad(4, 20))
    assert is_native(result)
    assert type(result.grad_fn).__name__ == result.grad_fn.name() == "CompiledFunctionBackward"  # type: ignore[union-attr]


def test_a_saved_input_that_has_changed_is_an_error() -> None:
    x, y = with_grad(4, 20), with_grad(4, 20)
    result = called(product, x, y)(x, y)
    assert is_native(result)
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
        differentiate(result)


@pytest.mark.parametrize("shape", [(4, 30), (120,)])
def test_a_saved_result_that_has_changed_is_an_error(shape: tuple[int, ...]) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x @ torch.ones(20, 30)
        return h.view(shape), F.gelu(h)

    x = with_grad(4, 20)
    h, result = called(function, x)(x)
    assert is_native(result)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(result)


def test_a_second_backward_needs_a_retained_graph() -> None:
    x = with_grad(4, 20)
    result = called(chain, x)(x).sum()
    result.backward(retain_graph=True)
    first = twin(x.grad)
    result.backward()
    assert_same(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match=TWICE):
        result.backward()


def test_saved_tensors_are_free_after_backward() -> None:
    packed: list[weakref.ref[torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.clone()
        packed.append(weakref.ref(kept))
        return kept

    x = with_grad(4, 20)
    run = called(chain, x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run(x * 1)
    assert is_native(result) and packed and all(ref() is not None for ref in packed)
    differentiate(result)
    assert all(ref() is None for ref in packed)


def test_a_gradient_that_is_passed_on_stays_the_callers() -> None:
    x, incoming = with_grad(4, 20), torch.ones(4, 20)
    result = called(lambda x: x + 1, x)(x)
    assert is_native(result)
    torch.autograd.grad(result, x, incoming, create_graph=True)
    assert incoming.grad_fn is None


def test_anomaly_mode_names_the_call() -> None:
    x = torch.zeros(4, 20, requires_grad=True)
    run = called(torch.sqrt, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            result = run(x)
            assert is_native(result)
            with pytest.raises(RuntimeError, match="'CompiledFunctionBackward' returned nan values"):
                result.backward(torch.zeros(4, 20))
    (where,) = [str(w.message) for w in caught if "Error detected in CompiledFunctionBackward" in str(w.message)]
    assert "result = run(x)" in where


def test_under_autocast() -> None:
    model = nn.Linear(20, 30)

    def step(run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                results.append(differentiate(run(x)))
        return results

    agrees(lambda x: F.gelu(F.linear(x, model.weight)), [with_grad(4, 20)], step)


def test_without_gradients() -> None:
    x = with_grad(4, 20)
    run = called(chain, x)
    with torch.no_grad():
        run(x)
        assert not run(x).requires_grad
    run(x.detach())
    assert not run(x.detach()).requires_grad
    assert torch.is_grad_enabled() and is_native(run(x))


def test_an_input_that_needs_no_gradient_any_more() -> None:
    weight = with_grad(20)

    def step(run: Callable[..., Any], x: torch.Tensor, weight: torch.Tensor) -> None:
        for needs in (True, True, False, False, True):
            weight.requires_grad_(needs)
            differentiate(run(x, weight))

    agrees(lambda x, w: F.gelu(x) * w, [with_grad(4, 20), weight], step)


def two_results(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.gelu(x) * 2, torch.softmax(x, -1)


@pytest.mark.parametrize("used", [0, 1])
def test_a_result_that_nobody_differentiates(used: int) -> None:
    def step(run: Callable[..., Any], x: torch.Tensor) -> None:
        for _ in range(2):
            differentiate(run(x)[used])

    agrees(two_results, [with_grad(4, 20)], step)


def test_logits_beside_a_loss() -> None:
    def step(run: Callable[..., Any], x: torch.Tensor) -> None:
        for _ in range(3):
            run(x)[0].backward()
        loss, logits = run(x)
        (loss + logits.sum()).backward()
        run(x)[1].sum().backward()

    agrees(lambda x: (F.gelu(x * 3).square().sum(), F.gelu(x * 3) * 2), [with_grad(40, 20)], step)


def test_results_without_gradients() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = F.gelu(x)
        return h.argmax(-1), h * 2, (h * 3).detach()

    x = with_grad(4, 20)
    places, h, detached = called(function, x)(x)
    assert is_native(h) and not places.requires_grad and not detached.requires_grad
    torch._dynamo.reset()
    agrees(function, [x], lambda run, x: [differentiate(run(x)) for _ in range(2)])


def test_hooks_of_tensors_and_nodes() -> None:
    def gradients(run: Run, x: torch.Tensor) -> list[torch.Tensor]:
        observed: list[torch.Tensor] = []
        h = x * 1
        h.register_hook(lambda g: observed.append(g) or g * 2)
        result = run(h)
        result.register_hook(lambda g: observed.append(g) or g * 3)
        node = result.grad_fn
        assert node is not None
        node.register_prehook(lambda gs: observed.append(gs[0]))
        differentiate(result)
        assert x.grad is not None
        return [*observed, x.grad]

    x = with_grad(4, 20)
    run = called(chain, with_grad(4, 20) * 1)
    assert is_native(run(x * 1))
    assert_same(gradients(run, x), gradients(chain, twin(x)))


def test_compiled_autograd_traces_the_backward() -> None:
    x = with_grad(40, 20)
    y = twin(x)
    result = called(product, x, x * 2)(x, x * 2)
    assert is_native(result)
    graphs = []
    with torch._dynamo.compiled_autograd._enable(lambda graph: graphs.append(graph) or graph):
        result.sum().backward()
    product(y, y * 2).sum().backward()
    assert_same(x.grad, y.grad)
    (graph,) = graphs
    assert any("aten" in str(node.target) and "aot" in node.name for node in graph.graph.nodes), graph.graph


def test_dynamo_does_not_trace_a_backward_that_a_compiled_step_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    x = with_grad(40, 20)

    def step(x: torch.Tensor) -> None:
        chain(x).sum().backward()

    run = compiled(step)
    run(x)
    traced = counters["frames"]["total"]
    run(x)
    assert counters["frames"]["total"] == traced > 0


def test_backwards_in_several_threads() -> None:
    x = with_grad(40, 20)
    run = called(chain, x)
    results = [run(x) for _ in range(8)]
    given: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda r=r: given.extend(torch.autograd.grad(r.sum(), x))) for r in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = torch.autograd.grad(chain(x).sum(), x)[0]
    assert len(given) == 8
    for gradient in given:
        assert_same(gradient, expected)


def test_a_profiler_sees_both_ranges() -> None:
    x = with_grad(4, 20)
    run = called(chain, x)
    with torch.profiler.profile(acc_events=True) as profile:
        differentiate(run(x))
    by_name = {event.name: event for event in profile.events()}
    forward, backward = by_name["CompiledFunction"], by_name["CompiledFunctionBackward"]
    assert forward.sequence_nr == backward.sequence_nr >= 0


def test_a_gradient_with_other_strides() -> None:
    x = with_grad(30, 20)
    y = twin(x)
    result, expected = called(chain, x)(x), chain(y)
    for incoming in (torch.ones(()).expand(30, 20), torch.randn(20, 30).t()):
        result.backward(incoming, retain_graph=True)
        expected.backward(incoming, retain_graph=True)
    assert_same(x.grad, y.grad)


def rows_and_columns(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.gelu(x) * y.shape[0], torch.softmax(y, -1) * x.shape[1]


def test_sizes_that_change() -> None:
    def step(run: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
        x, y = inputs
        results = []
        for size in (5, 7, 9, 7, 9):
            results += differentiate(run(x[:size], y[:, :size]))
        return results

    inputs = [with_grad(12, 16), with_grad(16, 12)]
    agrees(rows_and_columns, inputs, step, dynamic=True)
    torch._dynamo.reset()
    run = compiled(rows_and_columns, dynamic=True)
    first, last = (run(inputs[0][:size], inputs[1][:, :size]) for size in (5, 7))
    assert all(map(is_native, last)) and not any(map(is_native, first))
    assert [vars(x) for x in first] == [vars(x) for x in last] and all(map(vars, last))  # Dynamo's marks


def test_compiled_autograd_traces_a_backward_of_changing_sizes() -> None:
    x = with_grad(12, 16)
    y = twin(x)
    run = compiled(chain, dynamic=True)
    for size in (5, 7):
        result = run(x[:size])
    assert is_native(result)
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        result.sum().backward()
    chain(y[:7]).sum().backward()
    assert_same(x.grad, y.grad)


@pytest.mark.parametrize("sizes", [(5, 6), (4, 20, 3, 3)])
def test_channels_last_gradients(sizes: tuple[int, ...]) -> None:
    def step(run: Callable[..., Any], x: torch.Tensor) -> None:
        for _ in range(2):
            result = run(x)
            # The memory format that the result does not have.
            other = torch.channels_last if result.dim() == 4 and result.is_contiguous() else torch.contiguous_format
            incoming = torch.linspace(-1, 1, result.numel()).view(result.shape)
            result.backward(incoming.contiguous(memory_format=other))

    x = torch.randn(sizes)
    agrees(chain, [x.requires_grad_()], step)
    if len(sizes) == 4:
        agrees(chain, [torch.randn(sizes).contiguous(memory_format=torch.channels_last).requires_grad_()], step)


def test_an_input_without_a_gradient_keeps_no_history() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.detach()) * y

    x, y = with_grad(4, 20), with_grad(4, 20)
    run = called(function, x * y, y)
    h = x * y
    result = run(h, y)
    assert is_native(result)
    h.sum().backward()  # frees the history of h
    differentiate(result)


def test_tangents_are_eagers() -> None:
    x, tangent = torch.randn(2, 4, 20)
    run = called(chain, x)
    with forward_ad.dual_level():
        result, expected = (
            forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))) for function in (run, chain)
        )
        assert_same(tuple(result), tuple(expected))
    x.requires_grad_()
    run(x)
    assert is_native(run(x))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        run(forward_ad.make_dual(x, tangent))


def test_backward_refuses_a_determinism_that_forward_did_not_have() -> None:
    x = with_grad(4, 20)
    result = called(chain, x)(x)
    assert is_native(result)
    with deterministic(), pytest.raises(RuntimeError, match="use_deterministic_algorithms"):
        differentiate(result)


def test_checkpoints_stop_early() -> None:
    run = called(chain, with_grad(4, 20))

    def step(run: Callable[..., Any], x: torch.Tensor) -> None:
        torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False).sum().backward()

    x = with_grad(4, 20)
    y = twin(x)
    step(run, x)
    step(chain, y)
    assert_same(x.grad, y.grad)
