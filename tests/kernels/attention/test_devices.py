"""Attention on GPUs that are not there: what is chosen compiles for them, and what is not says why."""

from __future__ import annotations

import pytest
import torch

from tilewright.anatomy.capture import TritonLaunch, capturing
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.architectures import architecture, limits_of
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.attention import attention
from tilewright.kernels.attention.dispatch import Choice, choose
from tilewright.kernels.attention.registered import request_of

DEVICES = [("a100", "8.0"), ("h200", "10.0"), ("h200", "12.0")]
"""A profile for what the architecture does not say, and a compute capability."""


def chosen(q: torch.Tensor, k: torch.Tensor, backward: bool) -> Choice:
    request = request_of(q, k, k, *[None] * 4, 0.125, None, 0, 0.0, 0.0, 0, 0, False)
    return choose(request, limits_of(q.device), "auto", backward)


def name_of(choice: Choice) -> str:
    return str(choice.module.__name__).partition("attention.")[2]


def assert_compiled(found: list[TritonLaunch], kernels: list[str], capability: str) -> None:
    row = architecture(capability)
    assert [one.function.fn.__name__ for one in found] == kernels
    for one in found:
        assert one.compiled.metadata.target.arch == row.number
        assert one.compiled.metadata.shared <= row.shared_bytes_per_block
        assert one.compiled.asm["cubin"]


@pytest.mark.parametrize(("profile", "capability"), DEVICES)
@pytest.mark.parametrize("head_size", [64, 256])
def test_forward_and_backward_are_portable(profile: str, capability: str, head_size: int) -> None:
    pytest.importorskip("triton")
    with simulated(profile_for(profile), capability), capturing(run=False) as found:
        q, k, v = (torch.randn(1, 2, 200, head_size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        both = [chosen(q, k, backward) for backward in (False, True)]
        out = attention(*(x.requires_grad_() for x in (q, k, v)), causal=True)
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    assert [name_of(choice) for choice in both] == ["portable.launch"] * 2
    lacking = f"needs a GPU with wgmma instructions, which compute capability {capability} lacks"
    assert f"hopper.forward: {lacking}" in both[0].refused and both[1].refused == (f"hopper.backward: {lacking}",)
    dk_dv = ["backward_dk_dv"] * (2 if head_size == 256 else 1)
    assert_compiled(found, ["forward", "backward_prepare", "backward_dq", *dk_dv], capability)


@pytest.mark.parametrize(("profile", "capability"), DEVICES)
def test_decoding_is_split_in_triton(profile: str, capability: str) -> None:
    pytest.importorskip("triton")
    with simulated(profile_for(profile), capability), capturing(run=False) as found:
        q, k = (torch.randn(1, *shape, dtype=torch.bfloat16, device="cuda") for shape in ((8, 1, 128), (2, 4096, 128)))
        choice = chosen(q, k, False)
        with torch.no_grad():
            attention(q, k, k)
    assert name_of(choice) == "decode.triton"
    assert choice.refused == ()
    assert_compiled(found, ["decode"], capability)
