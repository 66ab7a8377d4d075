"""Operators compiled ahead for architectures that are not there: each compiles, or takes its Triton form and says so.

Attention, norms, softmax and cross entropy have tests of their own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewright.anatomy.capture import capturing, launch_record
from tilewright.anatomy.cuda import capturing_cuda
from tilewright.anatomy.launch_targets import of_operator
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.bench.catalogue import suite
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.linear import cuda

pytest.importorskip("triton")
CAPABILITIES = ["8.0", "10.0", "12.0"]
OURS = {
    "gelu": (64, 512),
    "swiglu": (64, 512),
    "dropout_add": (64, 512),
    "weighted_sum": (64, 512),
    "linear_dropout_add": (256, 256, 64),
    "linear_cross_entropy": (64, 128, 256),
}
"""Operators with Triton kernels of their own, and small sizes."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("name", OURS)
def test_each_operator_has_kernels_for_every_architecture(name: str, capability: str) -> None:
    found = suite(name)
    subject = of_operator(found, found.workload(OURS[name], "bfloat16"), found.variants[0], "bwd")
    profile = replace(profile_for("a100"), capability=capability)
    with simulated(profile, capability), capturing(run=False) as triton, capturing_cuda(capability, run=False) as cpp:
        for _ in subject.stages(CUDA, torch.Generator()):
            pass
    records = [launch_record(captured) for captured in triton]
    assert records and {record.capability for record in records} == {capability}
    assert {record.name: record.stack_bytes for record in records if record.stack_bytes} == {}
    assert cpp == []


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_linear_layer_says_why_it_is_not_fused(capability: str) -> None:
    with simulated(replace(profile_for("a100"), capability=capability), capability):
        why = cuda.refuses(*(torch.empty(256, 64, dtype=torch.bfloat16) for _ in range(2)))
    assert why == f"compute capability {capability} lacks the matrix instructions of a warpgroup (wgmma)"
