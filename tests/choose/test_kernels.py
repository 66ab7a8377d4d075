"""Hand-written kernels in compiled programs: what is chosen for which device, and why."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes import norms
from tests.passes.losses import CLASSES, LOSSES, Head, padded
from tilewright.compile.planner import Planner
from tilewright.compile.price import PricedCase, price_case
from tilewright.hardware.target import target_named
from tilewright.records.case import Case, InputSpec
from tilewright.records.program import Decision


def priced(model: Callable[..., object], shapes: str, device: str = "h200", training: bool = True) -> PricedCase:
    case = Case("subject", lambda: model, InputSpec.parse_many(shapes), training=training)
    return price_case(case, target_named(device))


def chosen(found: PricedCase, kernel: str = "tilewright.") -> list[Decision]:
    """The decisions on hand-written kernels, or on one of them."""
    rows = [decision for decision in found.program.decisions if decision.passed_by == "candidates"]
    return [decision for decision in rows if decision.reason.startswith(kernel)]


def ours(found: PricedCase) -> list[str]:
    """Tilewright's operators that the plan launches, in order, without products."""
    names = [kernel.split(".")[1] for _, _, kernel in found.plan.launches() if kernel.startswith("tilewright.")]
    return [name for name in names if name != "product"]


# Cross entropy.


@pytest.mark.parametrize(("loss", "training"), [*((loss, True) for loss in LOSSES), (LOSSES[0], False)])
def test_cross_entropy_is_planned_for_a_gpu(loss: Callable[[Tensor, Tensor], Tensor], training: bool) -> None:
    found = priced(Head(loss, torch.float32), "fp32[64,8192,16],int64[64,8192]", training=training)
    (decision,) = chosen(found, "tilewright.cross_entropy")
    assert ours(found) == ["cross_entropy", "cross_entropy_backward"][: 1 + training]
    assert decision.verdict == "taken" and decision.predicted_us
    left = {str(node.target) for graph in found.plan.graphs for node in graph.graph.nodes}
    assert not any("log_softmax" in target or "nll_loss" in target for target in left)


def test_no_kernel_is_proposed_without_hand_written_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.compile.price.Planner", partial(Planner, hand_written=False))
    found = priced(Head(LOSSES[0], torch.float32), "fp32[64,8192,16],int64[64,8192]")
    assert ours(found) == [] and chosen(found) == []


def test_the_peak_of_training_is_the_logits_and_their_gradient() -> None:
    found = priced(Head(padded, torch.bfloat16), "bf16[64,8192,16],int64[64,8192]")
    logits = 64 * 8192 * CLASSES * 2
    peaks: dict[tuple[str, str], int] = {}
    for point in found.program.memory:
        place = (point.stage, point.graph)
        peaks[place] = max(peaks.get(place, 0), point.live_bytes)
    assert peaks["after", "forward"] < 1.2 * logits < 3 * logits <= peaks["before", "forward"]
    assert peaks["after", "backward"] < 2.3 * logits < 5 * logits <= peaks["before", "backward"]


def test_a_cpu_keeps_its_generated_kernels() -> None:
    found = priced(Head(padded, torch.float32), "fp32[8,64,16],int64[8,64]", device="cpu")
    assert ours(found) == [] and {decision.verdict for decision in chosen(found)} == {"impossible"}
    assert all("this plan is for a CPU" in decision.reason for decision in chosen(found))


def test_what_cross_entropy_does_not_take_says_why() -> None:
    def weighted(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t, x.detach()[0])

    def kept(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = x.log_softmax(-1)
        return F.nll_loss(y, t), y

    for model, shapes, why in (
        (weighted, "fp32[64,1000],int64[64]", "classes have weights"),
        (kept, "fp32[64,1000],int64[64]", "something else reads log_softmax"),
        (F.cross_entropy, "fp64[64,1000],int64[64]", "not torch.float64"),
    ):
        found = priced(model, shapes)
        (decision,) = chosen(found, "tilewright.cross_entropy")
        assert "cross_entropy" not in ours(found) and decision.verdict == "refused" and why in decision.reason


# Norms.


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(8192, 4096), (4096, 1536)])
def test_a_norm_takes_the_residual_addition(rows: int, columns: int, training: bool) -> None:
    shapes = ",".join([f"bf16[{rows},{columns}]"] * 2)
    found = priced(norms.Residual(torch.bfloat16, columns), shapes, training=training)
    assert chosen(found)[0].verdict == "taken" and ours(found)[0] == "add_norm"
    assert ("norm_backward" in ours(found)) == training
    # Backward adds the gradient of the stream.
    nodes = [node for graph in found.plan.graphs for node in graph.graph.nodes if "norm_backward" in str(node.target)]
    assert all(node.args[2] is not None for node in nodes if "tilewright" in str(node.target))


@pytest.mark.parametrize("norm", norms.WRITTEN, ids=lambda norm: norm.__name__)
def test_rms_norms_of_models_run_in_the_kernel(norm: type[torch.nn.Module]) -> None:
    found = priced(norms.Residual(torch.bfloat16, 4096, norm), "bf16[8192,4096],bf16[8192,4096]")
    assert ours(found)[0] == "add_norm" and "norm_backward" in ours(found)
    # Nothing of it is left written out.
    assert not any("rsqrt" in str(node.target) for graph in found.plan.graphs for node in graph.graph.nodes)


def partly(x: Tensor, w: Tensor) -> Tensor:
    root = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    return x * root * w + root


def of_another_axis(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(0, keepdim=True) + 1e-6) * w


def in_another_dtype(x: Tensor, w: Tensor) -> Tensor:
    return x.float() * torch.rsqrt((x.float() ** 2).mean(-1, keepdim=True) + 1e-6) * w


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    y = x.clone()
    root = torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6)
    y.mul_(2)
    return y * root * w


@pytest.mark.parametrize("function", [partly, of_another_axis, in_another_dtype, overwritten])
def test_what_is_no_rms_norm_stays_as_it_is_written(function: Callable[..., Tensor]) -> None:
    found = priced(function, "bf16[4096,4096],bf16[4096]", training=False)
    assert not [decision for decision in found.program.decisions if decision.passed_by == "rms_norm"]
    assert "aten.rsqrt.default" in {str(node.target) for graph in found.plan.graphs for node in graph.graph.nodes}


def test_norms_of_rows_that_lie_across_run_in_the_kernel() -> None:
    found = priced(norms.Across(torch.bfloat16, 512), "bf16[8,512,1500]", training=True)
    assert {decision.verdict for decision in chosen(found)} == {"taken"}


def scaled_by_its_own_mean(x: Tensor, r: Tensor) -> Tensor:
    h = x + r
    return F.layer_norm(h, h.shape[-1:], h.mean(0))


def after_a_write(x: Tensor, r: Tensor) -> Tensor:
    x.mul_(2)
    return F.rms_norm(x + r, r.shape[-1:])


def test_a_weight_that_needs_the_sum_leaves_the_sum_where_it_is() -> None:
    found = priced(scaled_by_its_own_mean, "bf16[8192,4096],bf16[8192,4096]", training=False)
    assert ours(found) == ["norm"]


def test_a_write_before_the_norm_stays() -> None:
    found = priced(after_a_write, "bf16[8192,4096],bf16[8192,4096]", training=False)
    assert [decision.verdict for decision in found.program.decisions if decision.passed_by == "rms_norm"] == ["taken"]
    assert "aten.copy_.default" in {kernel for _, _, kernel in found.plan.launches()}


# Softmax.


def of_products(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w, -1)


def of_scores(x: Tensor, m: Tensor) -> Tensor:
    return torch.softmax(x * 0.125 + m, -1)


@pytest.mark.parametrize("training", [False, True])
def test_softmax_of_long_rows_is_the_kernels_and_one_with_a_mask_before_it_generated(training: bool) -> None:
    found = priced(of_products, "bf16[4096,64],bf16[64,32000]", training=training)
    assert ours(found) == ["softmax", "softmax_backward"][: 1 + training]
    masked = priced(of_scores, "bf16[96,512,512],bf16[96,1,512]", training=False)
    assert ours(masked) == [] and [decision.verdict for decision in chosen(masked)] == ["refused"]


@pytest.mark.parametrize(
    ("model", "shapes", "device", "training", "why"),
    [
        (norms.Alone(), "fp64[64,4096],fp64[8,4096]", "h200", True, "its kernels take"),
        (norms.Alone(), "bf16[64,4096],bf16[8,4096]", "a100", True, "take thread-block clusters"),
        (norms.Alone(), "bf16[64,4096],bf16[8,4096]", "cpu", True, "on GPUs only"),
        (norms.Alone(), "bf16[64,65536],bf16[8,65536]", "h200", True, "longer than 64 KiB"),
        (norms.Alone(), "bf16[64,1024],bf16[8,1024]", "h200", True, "as fast on short rows"),
        (
            lambda x, r: F.layer_norm(x, x.shape[-2:]) + r,
            "bf16[4,64,64],bf16[64,64]",
            "h200",
            True,
            "over the last axis",
        ),
        (of_products, "fp64[64,64],fp64[64,512]", "h200", False, "its kernels take"),
        (of_products, "bf16[64,64],bf16[64,512]", "a100", False, "take thread-block clusters"),
        (of_products, "fp32[64,64],fp32[64,512]", "cpu", False, "on GPUs only"),
        (lambda x: torch.softmax(x.mT, -1), "bf16[9000,64]", "h200", False, "do not lie side by side"),
    ],
)
def test_norms_and_softmaxes_that_the_kernels_do_not_take(
    model: Callable[..., object], shapes: str, device: str, training: bool, why: str
) -> None:
    found = priced(model, shapes, device, training)
    (decision,) = chosen(found)
    assert (
        decision.verdict == ("impossible" if device == "cpu" else "refused")
        and why in decision.reason
        and ours(found) == []
    )


# Linear layers with GELU.


class Activated(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, width: int = 768) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, dtype=dtype)
        self.down = torch.nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.gelu(self.up(x)))
        return result


@pytest.mark.parametrize("training", [False, True])
def test_a_linear_layer_and_its_gelu_are_one_kernel(training: bool) -> None:
    found = priced(Activated(torch.bfloat16), "bf16[8,1024,768]", training=training)
    assert ours(found) == ["linear_gelu"]
    forward = [region.name for region in found.program.regions if region.graph == "forward"]
    assert not any("gelu" in name for name in forward)


@pytest.mark.parametrize(
    ("dtype", "shape", "device", "why"),
    [
        (torch.float32, "fp32[8,1024,768]", "h200", "16-bit floats"),
        (torch.bfloat16, "bf16[8,1024,768]", "b200", "wgmma"),
        (torch.bfloat16, "bf16[4,8,768]", "h200", "fewer tiles"),
        (torch.bfloat16, "bf16[8,1024,768]", "cpu", "on GPUs only"),
    ],
)
def test_linear_layers_that_stay_apart_from_their_gelu(dtype: torch.dtype, shape: str, device: str, why: str) -> None:
    found = priced(Activated(dtype), shape, device, training=False)
    rows = chosen(found, "tilewright.linear_gelu")
    assert "linear_gelu" not in ours(found) and all(why in row.reason for row in rows)
