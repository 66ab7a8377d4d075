"""Every example, through its target and small, against its formula in float64 or PyTorch's own operator."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import processes
from tilewright.case_names import load_case
from tilewright.measure.inputs import make_inputs
from tilewright.records.case import Case

EXAMPLES = Path(__file__).parents[1] / "examples"

SMALL: dict[str, dict[str, int]] = {
    "naive_softmax": {"N": 7, "M": 13},
    "online_softmax": {"N": 7, "M": 13},
    "manual_gelu": {"N": 7, "M": 13},
    "gelu_dropout_residual": {"N": 7, "M": 13},
    "attention": {"B": 3, "N": 7, "d": 5},
    "mlp": {"dimension": 11, "layers": 3, "batch": 5},
    "transformer_block": {"D": 12, "H": 3, "B": 2, "S": 7},
}

SHIPPED = [
    *("naive_softmax.py:softmax", "naive_softmax.py:small", "online_softmax.py:online", "manual_gelu.py:gelu"),
    *("gelu_dropout_residual.py:gelu_dropout_residual", "attention.py:attention", "attention.py:square", "mlp.py:mlp"),
    *(f"transformer_block.py:block{kind}" for kind in ("", "_no_dropout", "_large", "_large_no_dropout", "_bf16")),
]
"""The cases that documents name."""


def small(example: str, dtype: str = "fp64", **sizes: float) -> Case:
    """The example's own `case` factory at an odd, small size."""
    made: Case = module_of(example).case(dtype=dtype, **(SMALL[example] | sizes))
    return made


def module_of(example: str) -> ModuleType:
    """The module that the example's file becomes when it is loaded as a user would."""
    target = next(target for target in SHIPPED if target.startswith(f"{example}.py:"))
    return sys.modules[load_case(f"{EXAMPLES / target}").build.__module__]


def test_every_example_is_listed() -> None:
    """All but the program of `docs/slow_model.md`, which has no case: it is run under `profile`."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "slow_training"}


def test_every_shipped_case_has_a_name_of_its_own() -> None:
    cases = [load_case(f"{EXAMPLES / target}") for target in SHIPPED]
    assert len({case.name for case in cases}) == len(cases)
    assert {spec.dtype for case in cases for spec in case.inputs} == {"float32", "bfloat16"}


def softmax_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, dim=-1)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("example", "truth", "tolerance"),
    [
        ("naive_softmax", softmax_rows, 1e-14),
        ("online_softmax", softmax_rows, 1e-14),
        # The example's √(2/π) has eight digits.
        ("manual_gelu", gelu_tanh, 1e-8),
        ("attention", flash, 1e-14),
    ],
)
def test_function(example: str, truth: Callable[..., torch.Tensor], tolerance: float) -> None:
    case = small(example)
    inputs = make_inputs(case, seed=1, device="cpu", requires_grad=False)
    torch.testing.assert_close(case.build()(*inputs), truth(*inputs), rtol=tolerance, atol=tolerance)


def test_dropout_tail_keeps_or_drops() -> None:
    case = small("gelu_dropout_residual", N=101, M=103)
    x, r = make_inputs(case, seed=2, device="cpu", requires_grad=False)
    torch.manual_seed(3)
    branch = case.build()(x, r) - r
    kept = branch.abs() > 1e-12
    exact = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    torch.testing.assert_close(branch[kept], (exact / 0.9)[kept], rtol=1e-9, atol=1e-14)
    count = 101 * 103
    assert abs(kept.sum().item() - 0.9 * count) < 5 * math.sqrt(count * 0.9 * 0.1)


def test_mlp_is_alternating_linear_and_gelu() -> None:
    case = small("mlp")
    model = case.build()
    (x,) = make_inputs(case, seed=4, device="cpu", requires_grad=False)
    expected = x
    for linear in model.linears:
        expected = expected @ linear.weight.T + linear.bias
        expected = 0.5 * expected * (1 + torch.erf(expected / math.sqrt(2)))
    assert len(model.linears) == 3
    torch.testing.assert_close(model(x), expected, rtol=1e-13, atol=1e-14)


def test_mlp_training_lowers_the_loss_and_repeats() -> None:
    train = module_of("mlp").train
    torch.manual_seed(5)
    losses = train(8, 2, 4, 20)
    torch.manual_seed(5)
    assert torch.equal(losses, train(8, 2, 4, 20))
    assert losses.shape == (20,) and not losses.requires_grad
    assert losses[-1] < losses[0]


def layer_norm(x: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + 1e-5).sqrt() * norm.weight + norm.bias


def test_block_is_pre_norm_attention_then_feed_forward() -> None:
    case = small("transformer_block", dropout=0.0)
    block = case.build()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    (x,) = make_inputs(case, seed=6, device="cpu", requires_grad=False)

    normed = layer_norm(x, block.norm1)
    project = {n: normed @ getattr(block, n).weight.T + getattr(block, n).bias for n in ("query", "key", "value")}
    heads = []
    for h in range(3):
        q, k, v = (project[n][..., 4 * h : 4 * h + 4] for n in ("query", "key", "value"))
        weights = torch.exp(torch.einsum("bqd,bkd->bqk", q, k) / 2)
        heads.append(weights / weights.sum(-1, keepdim=True) @ v)
    y = x + torch.cat(heads, -1) @ block.out.weight.T + block.out.bias
    wide = layer_norm(y, block.norm2) @ block.up.weight.T + block.up.bias
    wide = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    expected = y + wide @ block.down.weight.T + block.down.bias

    torch.testing.assert_close(block(x), expected, rtol=1e-11, atol=1e-11)


def test_loading_allocates_nothing() -> None:
    """A case is a description: even the largest builds no module and draws no input when it is loaded."""
    script = (
        "import resource, sys, torch\n"
        "from tilewright.case_names import load_case\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for target in sys.argv[1:]: load_case(target)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    output, _ = processes.run(["-c", script, *(str(EXAMPLES / target) for target in SHIPPED)])
    assert int(output) < 8 * 1024, "kilobytes; one 4096x4096 fp32 input alone is 65536"
