"""The rotary embedding without a GPU: formula, registration, machine code for an H200."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.machine_code import compiled, spilled
from tilewright.bench.catalogue import suite
from tilewright.kernels.rotary import reference, rotary
from tilewright.measure.truth.proof import prove

SIZES = [(1, 1, 1, 1, 2), (2, 5, 3, 1, 12), (1, 3, 4, 4, 64), (0, 3, 2, 2, 8)]


def drawn(sizes: tuple[int, ...], dtype: str = "float32") -> tuple[torch.Tensor, ...]:
    inputs: tuple[torch.Tensor, ...] = (
        suite("rotary").workload(sizes, dtype).make(torch.device("cpu"), torch.Generator().manual_seed(0))
    )
    return inputs


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_contract_is_kept(sizes: tuple[int, ...], dtype: str, interleaved: bool) -> None:
    inputs = (*drawn(sizes, dtype), interleaved)
    rows = prove(suite("rotary"), lambda *given: rotary(*given[:4], interleaved=given[4]), inputs)
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("interleaved", [False, True])
def test_pairs_are_turned_as_complex_numbers_are(interleaved: bool) -> None:
    q, k, _, _ = (tensor.detach().double() for tensor in drawn((2, 5, 3, 1, 12)))
    angle = torch.rand(5, 6, dtype=torch.float64)
    turned = rotary(q, k, angle.cos(), angle.sin(), interleaved=interleaved)
    for x, y in zip((q, k), turned, strict=True):
        pairs = x.unflatten(-1, (6, 2)) if interleaved else x.unflatten(-1, (2, 6)).mT
        result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(angle / angle, angle))
        torch.testing.assert_close(y, (result if interleaved else result.mT).flatten(-2))
        torch.testing.assert_close(y, reference.rotated(x, angle.cos(), angle.sin(), interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients_of_both_orders_in_float64_are_slopes(interleaved: bool) -> None:
    inputs = drawn((1, 3, 2, 1, 4), "float64")
    function = functools.partial(rotary, interleaved=interleaved)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_operator_is_registered_well(interleaved: bool) -> None:
    q, k, cos, sin = drawn((2, 5, 3, 1, 12))
    for backward in (False, True):
        torch.library.opcheck(torch.ops.tilewright.rotary.default, (q, k, cos, sin, interleaved, backward))
        wide = torch.randn(2, 12, 3, 5).permute(0, 2, 3, 1)
        torch.library.opcheck(torch.ops.tilewright.rotary.default, (wide, k, cos, sin, interleaved, backward))


def test_layouts_are_kept_where_dense() -> None:
    q, k, cos, sin = drawn((2, 5, 3, 1, 12))
    assert [x.stride() for x in rotary(q, k, cos, sin)] == [q.stride(), k.stride()]


def test_what_does_not_fit_is_refused() -> None:
    q, k, cos, sin = (tensor.detach() for tensor in drawn((2, 5, 3, 1, 12)))
    with pytest.raises(ValueError, match=r"cos and sin \[S, D/2\], not .*\(5, 5\)"):
        rotary(q, k, cos[:, :5], sin)
    with pytest.raises(ValueError, match=r"D even, .* not \(2, 3, 5, 11\)"):
        rotary(q[..., :11], k[..., :11], cos, sin)
    with pytest.raises(ValueError, match="q and k of one dtype"):
        rotary(q, k.half(), cos, sin)
    with pytest.raises(ValueError, match="gives cos and sin no gradient"):
        rotary(q, k, cos.requires_grad_(), sin)
    with pytest.raises(TypeError, match=r"floating-point tensors, not torch\.int64"):
        rotary(q.long(), k.long(), cos, sin)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_without_spills(dtype: str, interleaved: bool) -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.rotary import triton as kernels

    types = dict.fromkeys(kernels.rotate.arg_names, "i32")
    types |= {name: f"*{dtype}" for name in ("q", "k", "q_out", "k_out", "cos", "sin")}
    constants = {"SIGN": 1.0, "HEADS": 32, "PAIRS": 64, "INTERLEAVED": interleaved}
    aligned = [name for name, kind in types.items() if kind == "i32" and name != "length"]
    code = compiled(kernels.rotate, types, constants, aligned)
    assert spilled(code) == 0
    assert "ld.global.v4.b32" in code.asm["ptx"]
