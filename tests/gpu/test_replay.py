"""Compiled models replayed as CUDA graphs on a GPU: eager's numbers, masks and buffers, step after step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import check, recorded
from tilewright.backend import Recording
from tilewright.records.errors import CaptureError

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
WIDTH, HEADS = 128, 2
STEPS = 6
"""Two by calls, one that is recorded, three replays."""


class Block(nn.Module):
    """A pre-norm block with dropout, [B, S, D] → [B, S, D]."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.project(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return result


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one with each replay of a CUDA graph."""
    seen: list[object] = []
    once = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        seen.append(graph)
        once(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return seen


def replaying(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Recording]:
    """The function under the backend with CUDA graphs, and what its compilations learn."""
    return recorded(function, mode="reduce-overhead", **options)


def inputs(dtype: torch.dtype, length: int = 128, *, grad: bool = True) -> Tensor:
    return torch.randn(2, length, WIDTH, device=GPU, dtype=dtype, requires_grad=grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_the_numbers_contract_of_each_step(dtype: torch.dtype, training: bool, replays: list[object]) -> None:
    """Fresh inputs in each step, and parameters that an optimizer moves in place between them."""
    model = Block().to(GPU, dtype).train(training)
    call, record = replaying(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        before = len(replays)
        check(model, call, [inputs(dtype)], seed=step, training=training)
        assert len(replays) - before == (0 if step < 2 else 2 if training else 1), step
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    assert len(record.graphs) == (2 if training else 1)
    assert {d.verdict for d in record.decisions if d.passed_by == "replay"} == {"taken"}


def bucketed(x: Tensor) -> Tensor:
    """As a model's relative positions, which it makes on the CPU."""
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    return x * (distance.abs() + 1).log().mul(3).long().to(x.device)


def test_a_table_made_on_the_cpu_is_no_obstacle(replays: list[object]) -> None:
    call, record = replaying(bucketed)
    for _ in range(STEPS):
        x = torch.randn(4, 64, 64, device=GPU)
        assert torch.equal(call(x), bucketed(x))
    assert len(replays) == STEPS - 2 and record.fallbacks == []


def dropped(x: Tensor, residual: Tensor) -> Tensor:
    return F.dropout(F.gelu(x), 0.3) + residual + F.dropout(residual, 0.5)


def attended(x: Tensor, residual: Tensor) -> Tensor:
    """With dropout this attention stays with PyTorch, whose kernels keep the state of the generator each in its way."""
    q, k = (y.view(1, 3, 111, 64) for y in (x, residual))
    return F.scaled_dot_product_attention(q, k, k, dropout_p=0.25).reshape(333, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [dropped, attended])
def test_each_step_draws_eagers_mask(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, replays: list[object]
) -> None:
    """One generator over all steps: masks of forward and backward, and where the generator stands in the end."""

    def steps(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        found = []
        for _ in range(STEPS):
            x, residual = (torch.full((333, 64), v, device=GPU, dtype=dtype, requires_grad=True) for v in (1.0, 2.0))
            y = call(x, residual)
            found += [y.detach().clone(), *(g.clone() for g in torch.autograd.grad(y.sum(), (x, residual)))]
        return [*found, torch.cuda.get_rng_state()]

    ours, eager = steps(replaying(function)[0]), steps(function)
    assert len(replays) == 2 * (STEPS - 2)
    for mine, theirs in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len({y.float().square().sum().item() for y in ours[:-1:3]}) == STEPS


def test_training_ends_where_eagers_ends(replays: list[object]) -> None:
    """Buffers that training writes to, and an optimizer that steps on gradients from the graphs' memory."""

    def train(model: nn.Module, call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(STEPS):
            loss = call(torch.randn(16, 32, device=GPU)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return [*losses, *model.parameters(), *model.buffers()]

    eager = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8)).to(GPU)
    ours = copy.deepcopy(eager)
    mine, theirs = train(ours, replaying(ours)[0]), train(eager, eager)
    assert len(replays) == 2 * (STEPS - 2)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_graphs_on_both_sides_of_a_break(replays: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first graph's results for the second, and both graphs' saved values, share one memory pool."""
    monkeypatch.delenv("TILEWRIGHT_STRICT")

    def broken(x: Tensor) -> Tensor:
        y = F.gelu(x) * 2
        torch._dynamo.graph_break()
        return F.softmax(y, -1) + y

    call, _ = replaying(broken, fullgraph=False)
    for step in range(STEPS):
        x = torch.randn(64, 64, device=GPU, requires_grad=True)
        check(broken, call, [x], seed=step)
    assert len(replays) == 4 * (STEPS - 2)


def test_two_shapes_take_turns(replays: list[object]) -> None:
    model = Block().to(GPU, torch.bfloat16)
    call, _ = replaying(model, dynamic=True)
    for step in range(4):
        for length in (64, 96):
            check(model, call, [inputs(torch.bfloat16, length)], seed=step)
    assert len(replays) == 2 * 2 * 2


def test_a_parameter_that_moves_is_followed(replays: list[object]) -> None:
    model = Block(0.0).to(GPU).eval()
    call, _ = replaying(model)
    for step in range(7):
        if step == 4:
            model.down.weight.data = torch.randn_like(model.down.weight)
        check(model, call, [inputs(torch.float32)], training=False)
    assert len(replays) == 5


def test_a_query_against_a_long_cache(replays: list[object]) -> None:
    """Its kernels keep room for themselves from call to call, which a recording must not find in its memory."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    call, _ = replaying(attend)
    for _ in range(STEPS):
        q, k, v = (torch.randn(2, 4, s, 64, device=GPU, dtype=torch.bfloat16) for s in (1, 4096, 4096))
        check(attend, call, [q, k, v], training=False)
    assert len(replays) == STEPS - 2


@torch.library.custom_op("tilewright_tests::waiting", mutates_args=())
def waiting(x: Tensor) -> Tensor:
    result: Tensor = x + x.sum().item() * 0.0
    return result


@waiting.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_waits_for_the_device_stays_with_calls(
    replays: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def function(x: Tensor) -> Tensor:
        result: Tensor = waiting(x * 2).sin()
        return result

    x = torch.randn(64, device=GPU)
    call, _ = replaying(function)
    call(x)
    with pytest.raises(CaptureError, match="one of its operators waits for the device"):
        call(x)
    monkeypatch.delenv("TILEWRIGHT_STRICT")
    call, record = replaying(function)
    for _ in range(STEPS):
        torch.testing.assert_close(call(x), function(x))
    assert replays == []
    verdicts = [d.verdict for d in record.decisions if d.passed_by == "replay"]
    assert verdicts == ["taken", "tried and lost"]
    assert capsys.readouterr().err.count("is not replayed as a CUDA graph: one of its operators waits") == 1


def test_an_input_that_is_written_is_written_where_it_lies(replays: list[object]) -> None:
    """A recording for each place: what lies at another one stays as it is."""

    def function(x: Tensor, kept: Tensor) -> Tensor:
        kept[2:4] = x
        return kept * 2

    call, _ = replaying(function)
    caches = [torch.zeros(8, 64, device=GPU) for _ in range(2)]
    for turn in range(2):
        for number, kept in enumerate(caches):
            for step in range(STEPS):
                x = torch.full((2, 64), 10.0 * number + step + turn, device=GPU)
                expected = kept.clone()
                expected[2:4] = x
                assert torch.equal(call(x, kept), expected * 2) and torch.equal(kept, expected)
    assert len(replays) == 2 * (STEPS - 2) + 2 * STEPS


def test_results_live_until_the_next_step(replays: list[object]) -> None:
    call, _ = replaying(lambda x: x.sin() + 1)
    x = torch.randn(64, device=GPU)
    for _ in range(4):
        call(x)
    old = call(x)
    torch.testing.assert_close(old, x.sin() + 1)
    new = call(2 * x)
    torch.testing.assert_close(new, (2 * x).sin() + 1)
    assert old.data_ptr() == new.data_ptr()


def test_memory_does_not_grow(replays: list[object]) -> None:
    model = Block().to(GPU, torch.bfloat16)
    call, _ = replaying(model)
    taken = []
    for step in range(110):
        call(inputs(torch.bfloat16)).sum().backward()
        model.zero_grad()
        if step in (9, 109):
            torch.cuda.synchronize()
            taken.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(replays) == 2 * 108
    assert taken[0] == taken[1]


class Scored(nn.Module):
    """A loss and its logits, both with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 1000)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.project(x)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


def test_gradients_of_logits_come_and_stay_away(replays: list[object]) -> None:
    model = Scored().to(GPU)
    x, target = torch.randn(4, 64, WIDTH, device=GPU), torch.randint(0, 1000, (4, 64), device=GPU)
    run, _ = replaying(model)
    for step in range(3 * STEPS):
        uses_logits = STEPS <= step < 2 * STEPS
        found = []
        for function in (run, model):
            loss, logits = function(x, target)
            (loss + logits.square().mean() if uses_logits else loss).backward()
            del loss, logits
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            model.zero_grad()
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    # Forward from the third call on, and each backward from its own.
    assert len(replays) == (3 * STEPS - 2) + (2 * STEPS - 2) + (STEPS - 2)
