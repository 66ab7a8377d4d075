"""Products of few rows in compiled programs, in Triton's interpreter, against float64 and eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import called, keeps_contract
from tilewright.backend import Recording, backend, recording
from tilewright.choose import skinny as skinny_products
from tilewright.records.program import Decision


@pytest.fixture(autouse=True)
def slow_library(in_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prediction is for this machine's CPU, which has no such kernel."""
    monkeypatch.setattr(skinny_products, "_library_us", lambda product, profile: 1e9)


class Block(nn.Module):
    """Norm, three products, sum; norm, gated pair, sum; a head with a bias."""

    def __init__(self, width: int = 64, hidden: int = 136) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(hidden, width, bias=False), nn.Linear(width, 40)
        for norm in self.norms:
            nn.init.normal_(norm.weight, 1, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.o(self.q(h) * self.k(h) + self.v(h))
        h = self.norms[1](x)
        x = self.down(F.silu(self.gate(h)) * self.up(h)) + x
        return self.head(self.norms[2](x)[:, 0])


def infers(function: Callable[..., Any], x: Tensor) -> Recording:
    return keeps_contract(function, [x], training=False)


def calls(record: Recording, word: str = "skinny_linear") -> list[Any]:
    return called(record, word)


def decisions(record: Recording) -> list[Decision]:
    return [d for d in record.decisions if d.passed_by == "skinny products"]


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (40, torch.bfloat16)])
def test_a_block_is_a_few_launches(rows: int, dtype: torch.dtype) -> None:
    record = infers(Block().to(dtype), torch.randn(rows, 1, 64, dtype=dtype))
    launches = calls(record)
    assert len(launches) == 5 and not calls(record, "mm.default") and not calls(record, "silu")
    assert {d.verdict for d in decisions(record)} == {"taken"}
    three, o, pair, down, head = launches
    assert all(three.args[3:6]) and pair.args[10] == "swiglu"
    assert o.args[9] is not None and down.args[9] is not None and head.args[6] is not None
    # The norm of one row is inside, that of several is not.
    assert [launch.args[1] is not None for launch in (three, pair, head)] == [rows == 1] * 3
    assert bool(calls(record, "norm")) == (rows > 1)


def test_what_something_else_reads_is_written() -> None:
    layers = [nn.Linear(64, 48, bias=False).bfloat16() for _ in range(2)]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = F.rms_norm(x, (64,))
        gate, up = (layer(h) for layer in layers)
        return F.silu(gate) * up, gate, h

    (launch,) = calls(infers(function, torch.randn(1, 64).bfloat16()))
    assert launch.args[10] == "none" and launch.args[1] is None


def test_four_products_of_one_input_are_two_launches() -> None:
    layers = nn.ModuleList(nn.Linear(64, 16, bias=False) for _ in range(4)).bfloat16()
    record = infers(lambda x: torch.stack([layer(x) for layer in layers]), torch.randn(2, 64).bfloat16())
    assert len(calls(record)) == 2


@pytest.mark.parametrize("approximate", ["none", "tanh", "silu"])
def test_biases_and_an_activation(approximate: str) -> None:
    """As GPT-2 has them: three products with a bias each, and one with an activation."""
    three = nn.ModuleList(nn.Linear(64, 48) for _ in range(3)).bfloat16()
    up = nn.Linear(48, 72).bfloat16()

    def function(x: Tensor) -> Tensor:
        a, b, c = (layer(x) for layer in three)
        y = up(a * b + c)
        return F.silu(y) if approximate == "silu" else F.gelu(y, approximate=approximate)

    record = infers(function, torch.randn(2, 64).bfloat16())
    first, second = calls(record)
    assert all(first.args[3:9]) and not calls(record, "lu.default") and not calls(record, "mm.default")
    assert second.args[10] == {"none": "gelu", "tanh": "gelu_tanh", "silu": "silu"}[approximate]


def test_weights_that_autocast_casts_one_by_one() -> None:
    layers = nn.ModuleList(nn.Linear(64, 16) for _ in range(2))

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.stack([layer(x) for layer in layers])

    assert len(calls(infers(function, torch.randn(2, 64)))) == 2


@pytest.mark.parametrize(
    ("rows", "dtype", "trained"), [(65, torch.bfloat16, False), (1, torch.float32, False), (1, torch.bfloat16, True)]
)
def test_what_stays_with_the_library(rows: int, dtype: torch.dtype, trained: bool) -> None:
    model, x = Block().to(dtype), torch.randn(rows, 64, dtype=dtype)
    with recording() as record, torch.set_grad_enabled(trained):
        torch.compile(model, backend=backend)(x[:, None])
    assert not calls(record) and calls(record, "mm.default")


def test_the_library_stays_where_it_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_products, "_library_us", lambda product, profile: 0.0)
    record = infers(Block().bfloat16(), torch.randn(1, 1, 64).bfloat16())
    assert not calls(record) and {d.verdict for d in decisions(record)} == {"refused"}
    assert all("for generated kernels and library calls" in d.reason for d in decisions(record))
