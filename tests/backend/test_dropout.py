"""Dropout in compiled programs: eager's masks, drawn inside the kernels, again in backward, and stored nowhere."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.compiling import compiled, differentiate, tensors, twin
from tests.contract import called, recorded
from tilewright.backend import Recording, recording
from tilewright.kernels.dropout_add.stream import SHAPE

N, M = 211, 317
"""An odd number of elements, several blocks of the generator and of the kernels."""


def like_eager(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    words: Sequence[int] = (0,),
    backwards: int = 1,
    draws: int,
) -> Recording:
    """Results, gradients, masks and generator equal eager's; all `draws` draws are made by kernels.

    `words`: how many 32-bit words the generator gave before each call. A dropped element is exactly 0 in both.
    """
    with recording() as record:
        call = compiled(function)
        for before in words:
            _draws_as(function, call, inputs, before, backwards)
    assert drawn(record, "forward") == draws
    return record


def _draws_as(
    function: Callable[..., Any], compiled: Callable[..., Any], inputs: Sequence[Tensor], words: int, backwards: int
) -> None:
    outcomes = []
    for call in (compiled, function):
        mine = [twin(x) for x in inputs]
        torch.manual_seed(11)
        torch.empty(words, dtype=torch.int32).random_()
        results = tensors(call(*mine))
        after = torch.random.get_rng_state()
        for _ in range(backwards):
            roots = [r for r in results if r.requires_grad]
            grads = [torch.linspace(-1, 1, r.numel()).to(r.dtype).reshape(r.shape) for r in roots]
            if roots:
                torch.autograd.backward(roots, grads, retain_graph=True)
        assert torch.equal(torch.random.get_rng_state(), after), "backward draws nothing anew"
        outcomes.append((after, results + [x.grad for x in mine if x.grad is not None]))
    (state, ours), (expected_state, eager) = outcomes
    assert torch.equal(state, expected_state)
    assert len(ours) == len(eager)
    for mine, theirs in zip(ours, eager, strict=True):
        if mine.dim() > 1:
            assert torch.equal(mine == 0, theirs == 0)
        torch.testing.assert_close(mine, theirs)


def drawn(record: Recording, graph: str) -> int:
    """How many draws the kernels of a graph make."""
    found = [g for g in record.graphs if g.plan.name == graph]
    return sum(step.name == "draw" for g in found for r in g.plan.fusion.regions for step in r.lowered.nest.steps)


def saved(record: Recording) -> list[Tensor]:
    """The tensors that forward saves for backward, without the caller's own."""
    forward, backward = (
        next(g.plan.graph.find_nodes(op="placeholder") for g in record.graphs if g.plan.name == name)
        for name in ("forward", "backward")
    )
    own = {n.name for n in forward}
    return [n.meta["val"] for n in backward if n.name not in own and not n.name.startswith("tangents")]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5).to(dtype).requires_grad_()


def test_masks_over_dtypes_sizes_and_p_in_one_program() -> None:
    """Draws in order, by kernels and (the small ones) by PyTorch, from every place in the generator's block."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    large = [ones(N, M, dtype=dtype) for dtype in dtypes for _ in range(3)]
    small = [ones(n) for n in (1, 7, 313)]

    def program(*inputs: Tensor) -> list[Tensor]:
        rates = [0.1, 0.5, 0.9] * 4 + [0.5] * 3
        found = [F.dropout(x, p) for x, p in zip(inputs, rates, strict=False)]
        return [*found, F.dropout(inputs[-1], 0.25)]

    like_eager(program, [*large, *small, ones(N, M)], words=(0, 1, 623, 624), draws=13)


def test_an_empty_tensor_draws_nothing() -> None:
    like_eager(lambda x, y: (F.dropout(x, 0.5), F.dropout(y, 0.5)), [ones(0, 5), ones(N, M)], draws=1)


def test_what_keeps_nothing_draws_nothing() -> None:
    """Eager's function multiplies by zero; the operator that it is captured as would draw a mask."""
    x = torch.randn(N, M, requires_grad=True)
    like_eager(lambda x: (F.dropout(x, 1.0) + 1, F.dropout(x, 0.5)), [x], draws=1)


def test_backward_draws_again_and_only_the_state_is_kept() -> None:
    record = like_eager(lambda x, r: F.dropout(F.gelu(x), 0.1) + r, [ones(N, M), ones(N, M)], draws=1)
    assert drawn(record, "backward") == 1
    assert [tuple(value.shape) for value in saved(record)] == [SHAPE]
    for graph in record.graphs:
        # One kernel each: the mask is nowhere in memory.
        assert len(graph.plan.fusion.regions) == 1 and len(graph.plan.fusion.regions[0].lowered.outputs) == 1


def test_two_backwards_use_one_mask() -> None:
    like_eager(lambda x: F.dropout(x.sin(), 0.3).exp(), [ones(N, M)], backwards=2, draws=1)


def of_layouts(x: Tensor, y: Tensor) -> list[Tensor]:
    """Transposed, permuted, sliced, expanded: numbers go to elements along the mask's memory."""
    views = [x.t(), y.permute(2, 0, 1), y[:, 1:], x[:, None].expand(-1, 2, -1), y.transpose(0, 1)]
    return [F.dropout(view * 1.5, 0.4) for view in views] + [F.dropout(view, 0.4) for view in views]


def beside_row_reductions(x: Tensor, r: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The mask is needed in several walks over the columns, and by sums over the rows in backward."""
    return F.layer_norm(F.dropout(x, 0.2) + r, (M,), weight, bias)


@pytest.mark.parametrize(
    ("program", "shapes", "draws"),
    [
        (lambda x: F.dropout(F.dropout(x, 0.3) * 2, 0.6), [(N, M)], 2),
        (of_layouts, [(N, M), (31, 43, 53)], 10),
        (beside_row_reductions, [(N, M), (N, M), (M,), (M,)], 1),
        (lambda x: F.dropout(torch.softmax(x, -1), 0.1), [(5, 43, M)], 1),
        (lambda x: F.dropout(x, 0.5).sum(-1), [(N, M)], 1),
        (lambda x: F.dropout(x, 0.5).sum(0), [(N, M)], 1),
        (lambda x, r: F.dropout(x, 0.5) * r + r.amax(-1, keepdim=True), [(3, 20011), (20011,)], 1),
    ],
    ids=["inside", "layouts", "norm", "softmax", "row sums", "column sums", "rows longer than a block"],
)
def test_masks_beside_other_operators(program: Callable[..., Any], shapes: list[tuple[int, ...]], draws: int) -> None:
    like_eager(program, [ones(*shape) for shape in shapes], draws=draws)


def test_another_order_than_memorys_needs_the_mask() -> None:
    """A mask met in transposed order is drawn by a kernel of its own."""
    record = like_eager(lambda x, y: y + F.dropout(x, 0.3).t(), [ones(N, M), ones(M, N)], draws=1)
    reasons = [d.reason for d in record.graphs[0].plan.fusion.decisions if d.verdict == "impossible"]
    assert any("random numbers are drawn in the order of memory" in reason for reason in reasons), reasons


def test_autocast() -> None:
    def program(x: Tensor, weight: Tensor, r: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.dropout(F.linear(x, weight) * r, 0.3)

    like_eager(program, [ones(N, 16).detach(), ones(M, 16).detach(), ones(N, M, dtype=torch.bfloat16)], draws=1)


def test_inference() -> None:
    with torch.no_grad():
        like_eager(lambda x, r: F.dropout(F.gelu(x), 0.1) + r, [ones(N, M), ones(N, M)], draws=1)


@pytest.mark.parametrize("threads", [1, 5])
def test_threads_draw_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        like_eager(lambda x: F.dropout(x * 3, 0.4), [ones(1111, M)], draws=1)
    finally:
        torch.set_num_threads(before)


def test_sizes_that_change_from_call_to_call() -> None:
    call = compiled(lambda x: F.dropout(x.exp(), 0.3) * 2, dynamic=True)
    for n in (120, 250, 133):
        x = ones(n, M)
        torch.manual_seed(n)
        mine = call(x)
        state = torch.random.get_rng_state()
        differentiate(mine)
        theirs = twin(x)
        torch.manual_seed(n)
        eager = F.dropout(theirs.exp(), 0.3) * 2
        assert torch.equal(torch.random.get_rng_state(), state)
        differentiate(eager)
        torch.testing.assert_close([mine, x.grad], [eager, theirs.grad])


def test_threads_that_draw_at_once_share_the_numbers() -> None:
    """Every call's mask is one of those that eager draws one after another; none is drawn twice or lost."""
    call = compiled(lambda x: F.dropout(x, 0.5))
    x = ones(N, M).detach()
    call(x)
    torch.manual_seed(4)
    with ThreadPoolExecutor(4) as pool:
        mine = list(pool.map(lambda _: call(x), range(12)))
    state = torch.random.get_rng_state()
    torch.manual_seed(4)
    eager = [F.dropout(x, 0.5) for _ in range(12)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(sum(torch.equal(a, b) for b in mine) == 1 for a in eager)


Draw = Callable[[torch.Tensor], object]
DRAWS: dict[str, Draw] = {
    "factories": lambda x: (torch.rand(100), torch.randn_like(x), torch.randperm(4)),
    "in place": lambda x: x.clone().normal_(),
    "of values": lambda x: (torch.bernoulli(x.sigmoid()), F.rrelu(x, training=True)),
    "dropout by PyTorch's mask": lambda x: F.dropout(x, 0.5),
    "dropout by a stream": lambda x: F.dropout(x.repeat(200, 40), 0.5),
}


@pytest.mark.parametrize(("name", "backward"), [*((name, True) for name in DRAWS), ("factories", False)])
def test_a_draw_that_nothing_reads_moves_the_generator(name: str, backward: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        DRAWS[name](x)
        return torch.rand(3), x * F.dropout(x, 0.3)

    found, mine = [], compiled(function, fullgraph=True)
    for run in (mine, function):
        x = torch.linspace(-1, 1, 42).view(6, 7).requires_grad_(backward)
        torch.manual_seed(3)
        results = run(x)
        if backward:
            results[1].sum().backward()
        found.append([*tensors(results), x.grad, torch.rand(2)])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_forward_draws_once_and_backward_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        return (x * torch.rand_like(x)).sin() * F.dropout(x, 0.5)

    mine, record = recorded(function)
    mine(torch.randn(6, 7, requires_grad=True)).sum().backward()
    assert len(called(record, "aten.rand")) == 2 and len(called(record, "keep_mask")) == 1
