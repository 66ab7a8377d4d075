"""Kernels that write over an operand that dies with them: of products and convolutions, in any order of the axes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.backend.compiling import assert_same, compiled
from tilewright.backend import backend, recording
from tilewright.launch.executor import EXTENSION
from tilewright.measure.memory import peak_bytes
from tilewright.records.recipe import Layout
from tilewright.runtime.assemble import Scheduled, taken_over
from tilewright.runtime.executable import over
from tilewright.runtime.pool import SMALL


def after_a_product(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x.flatten(1) @ w.flatten(1).T)


def after_a_convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.conv2d(x, w, padding=1))


def convolved_and_added(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.conv2d(x, w, padding=1) * 2 + x)


def with_loss_and_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The loss reads the logits in three passes, and the one of the label beforehand."""
    logits = x.flatten(1) @ w.flatten(1).T + w.flatten(1)[:, 0]
    return F.cross_entropy(logits, torch.tensor([3, 7])), logits


def with_the_loss_of_other_rows(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row picks an element of every row: others have written by then."""
    product = x.flatten(1) @ w.flatten(1).T
    return product * 2, (product * 2).logsumexp(1), (product * 2).flip(0).gather(1, torch.tensor([[3], [7]]))


def read_again(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, w, padding=1)
    return F.gelu(y), y


def read_through_a_view(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = F.conv2d(x, w, padding=1)
    return F.gelu(y), y[:, :2]


def in_another_layout(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(F.conv2d(x, w, padding=1)).contiguous()


def of_an_input(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x)


PRODUCTS = (after_a_product, with_loss_and_logits, with_the_loss_of_other_rows)
TAKEN = (after_a_product, with_loss_and_logits, after_a_convolution, convolved_and_added)
LEFT = (with_the_loss_of_other_rows, read_again, read_through_a_view, in_another_layout, of_an_input)


@pytest.mark.parametrize("function", TAKEN + LEFT)
def test_what_is_written_over(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = torch.randn(2, 8, 6, 5), torch.randn(8, 8, 3, 3)
    if function not in PRODUCTS:
        x, w = x.to(memory_format=torch.channels_last), w.to(memory_format=torch.channels_last)
    else:
        w = torch.randn(8, 240)
    kept = x.clone()
    with recording() as record:
        result = torch.compile(function, backend=backend)(x, w)
    (graph,) = record.graphs
    over = taken_over(Scheduled(graph.plan.graph, graph.plan.units))
    assert bool(over) == (function in TAKEN)
    assert_same(result, function(x, w))
    assert torch.equal(x, kept)


def test_what_forward_saved_is_written_over_where_backward_runs_once() -> None:
    """The gradient of gelu takes over its operand's memory, unless autograd holds that to run backward again."""

    def function(b: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ w.T + b).sum()

    def pack(saved: Tensor) -> Tensor:
        addresses.append(saved.data_ptr())
        return saved

    b, x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8), torch.randn(8, 8)
    (exact,) = torch.autograd.grad(function(b, x, w), b)
    compiled, addresses, taken = torch.compile(function, backend=backend), list[int](), dict[bool, list[bool]]()
    EXTENSION.module()
    assert EXTENSION.wait()
    # The first calls of a program are in Python, which cannot tell who holds what.
    for call in range(8):
        addresses.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            loss = compiled(b, x, w)
        for retains in (True, False) if call % 2 else (False,):
            (gradient,) = torch.autograd.grad(loss, b, retain_graph=retains)
            assert_same(gradient, exact)
            taken.setdefault(retains, []).append(gradient.data_ptr() in addresses)
    assert not any(taken[True]) and taken[False][-1]


def test_what_forward_gives_is_not_written_over() -> None:
    """A caller may hold it by other means than a tensor: a stream that reads it."""

    def function(b: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        z = x @ w.T + b
        return F.gelu(z).sum(), z

    with recording() as record:
        torch.compile(function, backend=backend)(
            torch.randn(8, 8, requires_grad=True), torch.randn(8, 8), torch.randn(8, 8)
        )[0].backward()
    backward = next(graph.plan for graph in record.graphs if graph.plan.name == "backward")
    over = taken_over(Scheduled(backward.graph, backward.units))
    assert all(node.op != "placeholder" for node in over.values())


def test_autograd_adds_to_a_pooled_gradient_in_place() -> None:
    """A weight that a compiled product and eager code read, as where a head is tied to an embedding."""
    embedding, places = nn.Embedding(5000, 64), torch.arange(16)
    weight = embedding.weight
    nbytes = weight.numel() * weight.element_size()
    assert nbytes >= SMALL

    def scores(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).sum()

    head = compiled(scores)

    def step() -> None:
        head(embedding(places), weight).backward()
        embedding.zero_grad()

    for _ in range(4):
        step()
    assert peak_bytes(step) < 2.5 * nbytes, "the two gradients, and no third tensor for their sum"
    step()
    head(embedding(places), weight).backward()
    found, weight.grad = weight.grad, None
    scores(embedding(places), weight).backward()
    assert found is not None and weight.grad is not None
    torch.testing.assert_close(found, weight.grad)


def test_a_result_over_a_part_of_a_tensor_lies_where_the_part_does() -> None:
    part = torch.arange(12.0)[None, 3:9]
    made = over(Layout((6, 1), (1, 1), torch.float32, torch.device("cpu")), part)
    assert (made.shape, made.data_ptr()) == ((6, 1), part.data_ptr())
    assert made.flatten().tolist() == [3, 4, 5, 6, 7, 8]
