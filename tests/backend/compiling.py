"""Compiling a function and holding it against eager: what every test of the backend does."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tilewright.backend import Recording, backend, recording


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    result: Callable[..., Any] = torch.compile(function, backend=backend, **options)
    return result


def chain(x: torch.Tensor) -> torch.Tensor:
    """Two operators of a kind each, which make a kernel or two."""
    return F.gelu(x * 2) + torch.softmax(x, -1)


def kernels(record: Recording) -> list[str]:
    """Names of the compiled kernels, of all graphs."""
    return [k.name for g in record.graphs for k in g.executable.kernels]


def tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def with_grad(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def twin(value: Any) -> Any:
    """A copy that shares nothing, strides and `requires_grad` kept."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value)
    if not isinstance(value, torch.Tensor):
        return value
    with torch.no_grad():
        fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)
    return fresh.requires_grad_(value.requires_grad)


def assert_same(ours: Any, eager: Any) -> None:
    """The same structure and strides, numbers within rounding, NaN and Inf in the same places."""
    torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-5, equal_nan=True, check_stride=True)


Step = Callable[..., Any]
"""Uses a function, given first, with inputs; what it returns is compared."""


def agrees(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    step: Step | None = None,
    *,
    backward: bool = False,
    runs: bool = True,
    **options: Any,
) -> Recording:
    """`step` with `function` compiled and eager on equal inputs and the same seed: results, gradients and inputs agree.

    The step is one call, with `backward` a call and its backward. With `runs`, at least one compiled kernel must
    have run. `options` are those of `torch.compile`.
    """
    with recording() as record:
        compare_steps(function, inputs, step or (_call_and_backward if backward else _call), **options)
    assert bool(kernels(record)) == runs, kernels(record)
    return record


def compare_steps(function: Callable[..., Any], inputs: Sequence[Any], step: Step, **options: Any) -> None:
    """As `agrees`, without a recording, under which no program is kept."""
    mine, theirs = [twin(x) for x in inputs], [twin(x) for x in inputs]
    model = twin(function)
    torch.manual_seed(3)
    result = step(compiled(model, **options), *mine)
    torch.manual_seed(3)
    expected = step(function, *theirs)
    assert_same(result, expected)
    assert_same(mine, theirs)
    assert_same([x.grad for x in tensors(mine)], [x.grad for x in tensors(theirs)])
    if isinstance(function, nn.Module):
        assert_same(dict(model.named_buffers()), dict(function.named_buffers()))
        assert_same([p.grad for p in model.parameters()], [p.grad for p in function.parameters()])


def _call(run: Callable[..., Any], *inputs: Any) -> Any:
    return run(*inputs)


def _call_and_backward(run: Callable[..., Any], *inputs: Any) -> Any:
    return differentiate(run(*inputs))


def differentiate(result: Any) -> Any:
    """`result`, after backward of each of its floating tensors with a gradient of its own."""
    roots = [t for t in tensors(result) if t.requires_grad]
    grads = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).reshape(t.shape) for t in roots]
    torch.autograd.backward(roots, grads)
    return result


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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
"""Functions, and uses of their gradients in which a backward that is not autograd's may go wrong."""
