"""Attention on GPUs that are not there: what is chosen compiles for them, and what is not says why."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.emit.machine_code import usage
from tilewright.anatomy.capture import TritonLaunch, capturing
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.architectures import architecture, limits_of
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.attention import attention
from tilewright.kernels.attention.dispatch import Choice, choose
from tilewright.kernels.attention.registered import attend, request_of

pytest.importorskip("triton")
WITHOUT_WGMMA = [("a100", "8.0"), ("h200", "10.0"), ("h200", "12.0")]
"""A profile for what the architecture does not say, and a compute capability."""
HOPPER = ("h200", "9.0")
NO_OPTIONS = (None, None, 0.0, 0.0, 0, 0, False)


def drawn(queries: int, keys: int, width: int, heads: tuple[int, int] = (2, 2)) -> list[torch.Tensor]:
    shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    return [torch.randn(1, *shape, width, dtype=torch.bfloat16, device="cuda") for shape in shapes]


def chosen(q: torch.Tensor, k: torch.Tensor, backward: bool) -> Choice:
    request = request_of(q, k, k, *[None] * 4, 0.125, None, 0, 0.0, 0.0, 0, 0, False)
    return choose(request, limits_of(q.device), "auto", backward)


def name_of(choice: Choice) -> str:
    return str(choice.module.__name__).partition("attention.")[2]


@contextmanager
def device(profile: str, capability: str) -> Iterator[list[TritonLaunch]]:
    """The launches of the code inside, whose kernels fit the device."""
    with simulated(profile_for(profile), capability), capturing(run=False) as found:
        yield found
    row = architecture(capability)
    for one in found:
        assert one.compiled.metadata.target.arch == row.number
        assert one.compiled.metadata.shared <= row.shared_bytes_per_block


def kernels(found: list[TritonLaunch]) -> list[str]:
    return [one.function.fn.__name__ for one in found]


@pytest.mark.parametrize(
    ("width", "profile", "capability"),
    [(64, *HOPPER), (256, *HOPPER), (64, "a100", "8.0"), (64, "h200", "10.0"), (256, "h200", "12.0")],
)
def test_the_portable_kernels(width: int, profile: str, capability: str) -> None:
    """The widest heads also where a block has the least shared memory."""
    with device(profile, capability) as found:
        given = [x.requires_grad_() for x in drawn(200, 200, width)]
        out = attend(*given, *[None] * 4, 0.125, *NO_OPTIONS, "triton")[0]
        torch.autograd.grad(out, given, torch.zeros_like(out))
    dk_dv = ["backward_dk_dv"] * (2 if width == 256 else 1)
    assert kernels(found) == ["forward", "backward_prepare", "backward_dq", *dk_dv]
    if (profile, capability) == HOPPER:
        for one in (found[0], *found[2:]):
            assert "wgmma.mma_async" in one.compiled.asm["ptx"] and "cp.async.bulk.tensor" in one.compiled.asm["ptx"]
            assert usage(one.compiled.asm["cubin"])["spilled"] <= (64 if width == 64 else 512)


@pytest.mark.parametrize(("profile", "capability"), WITHOUT_WGMMA)
def test_without_wgmma_the_portable_kernels_are_chosen(profile: str, capability: str) -> None:
    with device(profile, capability):
        q, k, _ = drawn(200, 200, 64)
        forward, backward = (chosen(q, k, backward) for backward in (False, True))
    assert name_of(forward) == name_of(backward) == "portable.launch"
    lacking = f"needs a GPU with wgmma instructions, which compute capability {capability} lacks"
    assert f"hopper.forward: {lacking}" in forward.refused and backward.refused == (f"hopper.backward: {lacking}",)


@pytest.mark.parametrize(("profile", "capability"), WITHOUT_WGMMA)
def test_decoding_is_split_in_triton(profile: str, capability: str) -> None:
    with device(profile, capability) as found:
        q, k, v = drawn(1, 4096, 128, (8, 2))
        choice = chosen(q, k, False)
        with torch.no_grad():
            attention(q, k, v)
    assert name_of(choice) == "decode.triton" and choice.refused == () and kernels(found) == ["decode"]


@pytest.mark.parametrize(("profile", "capability"), [*WITHOUT_WGMMA, HOPPER])
def test_decoding_fits_with_the_most_queries_and_a_mask(profile: str, capability: str) -> None:
    with device(profile, capability) as found:
        mask = torch.zeros(1, 64, 1, 4096, dtype=torch.bfloat16, device="cuda")
        attend(*drawn(1, 4096, 256, (64, 1)), mask, *[None] * 3, 0.125, *NO_OPTIONS, "decode")
    assert kernels(found) == ["decode"]


def test_decoding_copies_ahead_and_is_joined_after_an_acquiring_addition() -> None:
    with device(*HOPPER) as found:
        attend(*drawn(1, 4096, 128, (8, 2)), *[None] * 4, 0.125, *NO_OPTIONS, "decode")
    (decode,) = found
    assert "cp.async.cg.shared.global" in decode.compiled.asm["ptx"]
    assert "atom.global.gpu.acq_rel.add" in decode.compiled.asm["ptx"]
