"""A plan for a GPU that is not here names the attention that PyTorch takes there, not the CPU's."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from tilewright.compile.capture import capture
from tilewright.compile.launches import works
from tilewright.compile.planner import Planner
from tilewright.hardware.target import target_named
from tilewright.records.case import Case, InputSpec


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, q[..., :1] > k[..., :1].mT)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "function", "library"),
    [
        ("h200", "bf16", 64, plain, "cudnn"),
        ("h200", "bf16", 64, masked, "cudnn"),
        ("h200", "bf16", 256, plain, "flash"),
        ("h200", "fp32", 64, plain, "efficient"),
        ("a100", "bf16", 64, plain, "flash"),
        ("a100", "bf16", 64, masked, "efficient"),
    ],
)
def test_attention_is_named_as_on_the_device(
    device: str, dtype: str, width: int, function: object, library: str
) -> None:
    target = target_named(device)
    inputs = InputSpec.parse_many(f"{dtype}[2,4,128,{width}]" + f",{dtype}[2,4,128,{width}]" * 2)
    case = Case("attention", lambda: function, inputs)  # type: ignore[arg-type,return-value]
    plan = capture(case, Planner(target, hand_written=False)).plan
    assert plan is not None
    names = [what for _, _, what in plan.launches() if "attention" in what]
    assert names == [
        f"aten._scaled_dot_product_{library}_attention.default",
        f"aten._scaled_dot_product_{library}_attention_backward.default",
    ]
    kinds = [work.kind for graph in plan.graphs for _, work in works(graph) if work and "attention" in work.kind]
    assert kinds == [f"attention, {library}", f"attention backward, {library}"]


def test_attention_of_a_cpu_keeps_its_name() -> None:
    inputs = InputSpec.parse_many("fp32[2,4,128,64],fp32[2,4,128,64],fp32[2,4,128,64]")
    plan = capture(Case("attention", lambda: plain, inputs, training=False), Planner(target_named("cpu"))).plan
    assert plan is not None
    assert [what for _, _, what in plan.launches()] == ["aten._scaled_dot_product_flash_attention_for_cpu.default"]
