"""Attention of a compiled model on a GPU: tilewright's kernels, the numbers contract, CUDA graphs, autocast."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import keeps_contract, recorded, targets
from tests.gpu.kernels.launching import values_of
from tilewright.backend import Recording
from tilewright.launch.executor import EXTENSION
from tilewright.launch.race import Race
from tilewright.records.program import Decision
from tilewright.runtime.executable import CallStep

pytestmark = pytest.mark.gpu
GPU = "cuda:0"
WIDTH, HEADS = 256, 4


class Block(nn.Module):
    """Pre-norm attention with a residual, [B, S, D] → [B, S, D]; causal, or written out."""

    def __init__(self, causal: bool, width: int = WIDTH, heads: int = HEADS) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.causal, self.heads = causal, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.project(self.norm(x)).chunk(3, -1))
        if self.causal:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
        result: Tensor = x + self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Encoder(nn.Module):
    """PyTorch's own module, which calls attention out of Dynamo's sight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "causal": lambda: Block(True),
    "written out": lambda: Block(False),
    "module": Encoder,
}


def on_kernels(record: Recording) -> list[Decision]:
    """The decisions on whose kernel an attention is."""
    return [d for d in record.decisions if d.passed_by == "attention" and "N² tensor" not in d.reason]


def inputs(dtype: torch.dtype = torch.bfloat16, length: int = 333) -> Tensor:
    return torch.randn(2, length, WIDTH, device=GPU, dtype=dtype, requires_grad=True)


def on_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in MODELS), ("causal", False)])
def test_the_numbers_contract_of_a_block(name: str, training: bool) -> None:
    model = MODELS[name]().to(GPU, torch.bfloat16)
    record = keeps_contract(model, [inputs()], training=training)
    (decision,) = on_kernels(record)
    ran = targets(record)
    if on_hopper():
        assert decision.verdict == "taken" and "Gluon, for Hopper" in decision.reason
        assert ran.count("tilewright.attention.default") == 1
        assert ran.count("tilewright.attention_backward.default") == training
        assert not any("scaled_dot_product" in target for target in ran)
    else:
        assert decision.verdict == "refused" and "compute capability 9.0" in decision.reason


def test_what_stays_with_pytorch_says_why() -> None:
    def dropped(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    def masked(q: Tensor) -> Tensor:
        seen = torch.rand(q.shape[2], q.shape[2], device=GPU) > 0.2
        return F.scaled_dot_product_attention(q, q, q, attn_mask=seen)

    q = torch.randn(1, 2, 128, 64, device=GPU, dtype=torch.bfloat16)
    for function, operand, reason in (
        (dropped, q, "dropout"),
        (masked, q, "a mask"),
        (lambda q: F.scaled_dot_product_attention(q, q, q), q.float(), "float32"),
    ):
        call, record = recorded(function)
        torch.manual_seed(0)
        out = call(operand)
        torch.manual_seed(0)
        torch.testing.assert_close(out, function(operand))
        (decision,) = on_kernels(record)
        assert decision.verdict == "refused" and reason in decision.reason


def test_recipes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is built in the background: a compiled model goes over to it between two steps."""
    call, record = recorded(Block(True).to(GPU, torch.bfloat16))
    x = inputs()
    with monkeypatch.context() as without:
        without.setattr(EXTENSION, "found", None)
        without.setattr(EXTENSION, "module", lambda: None)
        first = values_of(call, [x])
    EXTENSION.module()
    assert EXTENSION.wait()
    values_of(call, [x])
    steps = [step for graph in record.graphs for step in graph.executable.steps]
    by_recipe = [step for step in steps if isinstance(step, CallStep) and step.recipe is not None]
    assert len(by_recipe) == 2 * on_hopper()
    for step in by_recipe:
        monkeypatch.setattr(step, "target", lambda *_: pytest.fail("Python ran attention"))
    then = values_of(call, [x])
    assert torch.equal(first[0], then[0])
    # The gradient of q is a sum in no fixed order.
    torch.testing.assert_close(first[1], then[1], rtol=2**-6, atol=2**-6)
    assert len(on_kernels(record)) == 1


def test_autocast() -> None:
    model = Block(True).to(GPU)
    with torch.autocast("cuda", torch.bfloat16):
        record = keeps_contract(model, [inputs(torch.float32)])
    (decision,) = on_kernels(record)
    assert decision.verdict == ("taken" if on_hopper() else "refused")


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_race_settles_what_the_portable_kernels_take(
    training: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def masked(q: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=seen)

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    outcome = Race.outcome
    monkeypatch.setattr(Race, "outcome", lambda race, measure: outcome(race))
    q = torch.randn(2, 4, 512, 64, device=GPU, dtype=torch.bfloat16, requires_grad=training)
    seen = torch.rand(512, 512, device=GPU) > 0.2
    record = keeps_contract(masked, [q, seen], training=training)
    (decision,) = on_kernels(record)
    assert decision.verdict in ("taken", "tried and lost")
    assert (" µs measured forward and backward, " if training else " µs measured, ") in decision.reason
    assert (decision.measured_us is None) == training
    with capsys.disabled():
        print(f"\nmasked attention, {'training' if training else 'inference'}: {decision.verdict}: {decision.reason}")
