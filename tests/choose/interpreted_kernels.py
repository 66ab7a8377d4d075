"""Hand-written kernels that were chosen, in Triton's interpreter: numbers, and what is kept for backward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import keeps_contract, own, targets
from tests.gpu.kernels.launching import in_turn
from tests.passes import norms
from tests.passes.losses import LOSSES, Head, inputs
from tilewright.backend import Recording, recording
from tilewright.choose import chooser
from tilewright.measure.truth.contract import compare

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def every_offer(in_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of short rows, and where small tensors make all times those of launches."""
    monkeypatch.setattr(chooser, "is_faster", lambda *_, **__: True)
    # But few rows at inference are otherwise skinny_linear's.
    monkeypatch.setattr("tilewright.choose.skinny.MOST_ROWS", 0)
    for package in ("norm", "softmax"):
        monkeypatch.setattr(f"tilewright.kernels.{package}.cuda.LONGEST_GENERATED", 0)


def check(model: nn.Module, arguments: Sequence[Any], expected: set[str], training: bool = True) -> Recording:
    """Compiled, `model` runs those operators of tilewright's and keeps the numbers contract."""
    record = keeps_contract(model, arguments, training=training)
    assert own(record) == expected
    return record


@pytest.mark.parametrize(("loss", "dtype"), in_turn(LOSSES, [(BF16, FP32)]))
def test_cross_entropy(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    record = check(Head(loss, dtype), inputs(dtype), {"cross_entropy", "cross_entropy_backward"})
    widest = max(
        value.numel() * value.element_size()
        for graph in record.graphs
        for node in graph.plan.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
    )
    # Nothing of the logits' extent is kept or made in more bytes than they have.
    assert widest <= 18 * 101 * dtype.itemsize


def test_cross_entropy_without_gradients() -> None:
    check(Head(LOSSES[0], torch.bfloat16), inputs(torch.bfloat16), {"cross_entropy"}, training=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_norm(dtype: torch.dtype) -> None:
    model = norms.Residual(dtype)
    record = check(model, norms.inputs(dtype), {"add_norm", "norm", "norm_backward"})
    check(model, norms.inputs(dtype), {"add_norm"}, training=False)
    # What the norms give is computed again: of the stream's extent only the stream and what silu reads are kept.
    forward, _ = (graph.plan.graph for graph in record.graphs)
    results = forward.output_node().all_input_nodes
    assert sum(node.op != "placeholder" and node.meta["val"].numel() == 2 * 5 * norms.WIDTH for node in results) <= 4


class Normalised(nn.Module):
    """Softmax and log-softmax of a product."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 48 * norms.WIDTH).view(48, norms.WIDTH).to(dtype))

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        result: Tensor = torch.softmax(x @ self.weight.mT, -1) + torch.log_softmax(r @ self.weight.mT, -1)
        return result


@pytest.mark.parametrize(("training", "dtype"), [(True, BF16), (False, FP32)])
def test_softmax(training: bool, dtype: torch.dtype) -> None:
    expected = {"softmax", "softmax_backward"} if training else {"softmax"}
    check(Normalised(dtype), norms.inputs(dtype), expected, training=training)


class Gelu(nn.Module):
    """A layer with GELU and the layer behind it, whose gradient reads the GELU's result."""

    def __init__(self, dtype: torch.dtype, approximate: str) -> None:
        super().__init__()
        self.up = nn.Linear(norms.WIDTH, 64, dtype=dtype)
        self.down = nn.Linear(64, norms.WIDTH, bias=False, dtype=dtype)
        self.approximate = approximate

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        result: Tensor = self.down(nn.functional.gelu(self.up(x), approximate=self.approximate)) + r
        return result


@pytest.mark.parametrize(
    ("approximate", "training", "dtype"),
    [("none", True, BF16), ("tanh", False, FP32)],
)
def test_linear_gelu(approximate: str, training: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.kernels.linear.offer._refusal", lambda *_: None)
    torch.manual_seed(0)
    record = check(Gelu(dtype, approximate), norms.inputs(dtype), {"linear_gelu"}, training=training)
    forward = record.graphs[0].plan.graph
    # The result of the GELU is not kept: backward computes it again.
    kept = [node.meta["val"] for node in forward.output_node().all_input_nodes if node.op != "placeholder"]
    assert sum(value.shape == (10, 64) or value.shape == (2, 5, 64) for value in kept) == int(training)


def test_a_norm_without_a_weight() -> None:
    check(norms.Alone(), norms.inputs(torch.float32), {"norm", "norm_backward"})


def test_norms_of_rows_that_lie_across() -> None:
    x = torch.randn(2, norms.WIDTH, 7).to(BF16).requires_grad_()
    record = check(norms.Across(BF16), [x], {"norm", "norm_backward"})
    # Generated kernels lay the rows out for the norms.
    members = [node for region in record.graphs[0].plan.fusion.regions for node in region.members]
    assert sum("clone" in str(node.target) for node in members) == 2


@pytest.mark.parametrize(("norm", "dtype"), in_turn(norms.WRITTEN, [(BF16, FP32)]))
def test_rms_norm_that_is_written_out(norm: type[nn.Module], dtype: torch.dtype) -> None:
    model = norms.Residual(dtype, norm=norm)
    record = check(model, norms.inputs(dtype), {"add_norm", "norm", "norm_backward"})
    assert sum(decision.passed_by == "rms_norm" for decision in record.decisions) == 2
    assert not any("rsqrt" in target for target in targets(record))


def test_generated_rms_norm_in_pytorchs_fused_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "is_faster", lambda *_, **__: False)
    record = check(norms.Residual(BF16, norm=norms.Llama), norms.inputs(BF16), set())
    assert [kernel for graph in record.graphs for kernel in graph.executable.kernels if "fused_rms_norm" in kernel.name]


def test_sizes_that_change_bind_no_kernel_to_the_first_of_them() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32)).bfloat16()
    run = torch.compile(model, backend="tilewright", dynamic=True)
    with recording() as record:
        for rows in (20, 24):
            x = torch.randn(2, rows, 64, dtype=torch.bfloat16, requires_grad=True)
            twin = x.detach().requires_grad_()
            y, expected = run(x), model(twin)
            y.sum().backward()
            expected.sum().backward()
            truth = model.double()(wide := x.detach().double().requires_grad_())
            truth.sum().backward()
            model.bfloat16()
            assert all(value.grad is not None for value in (x, twin, wide))
            assert compare(y, expected, truth).ok
            assert compare(x.grad, twin.grad, wide.grad).ok  # type: ignore[arg-type]
    calls = [kernel for graph in record.graphs for _, kernel in graph.plan.launches()]
    assert "tilewright.norm_backward.default" in calls and not record.fallbacks
