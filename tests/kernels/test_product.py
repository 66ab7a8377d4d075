"""The product of fp32 by 16-bit matrix instructions, without a GPU: division of the work, machine code, the choice."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.nvcc import build
from tilewright.compile.price import price_case
from tilewright.hardware.target import target_named
from tilewright.kernels.product import cuda, product
from tilewright.kernels.product.offer import LEAST_FLOPS
from tilewright.launch.builder import operands_of
from tilewright.records.case import Case, InputSpec


@given(st.integers(1, 5000), st.integers(1, 500), st.integers(1, 200))
def test_shares_cover_their_tiles_once(tiles: int, steps: int, multiprocessors: int) -> None:
    """Each program has a share, which spans parts of at most two tiles beside whole ones."""
    made = cuda.divided(tiles, steps, multiprocessors)
    assert 1 <= made.programs <= min(multiprocessors, max(tiles, made.shared_tiles * steps))
    assert 0 <= made.shared_tiles <= tiles
    if made.shared_tiles:
        total = made.shared_tiles * steps
        assert total <= made.programs * made.share < total + multiprocessors * made.programs
        assert (tiles - made.shared_tiles) % made.programs == 0
    else:
        assert made.programs == min(tiles, multiprocessors)


@pytest.mark.parametrize(
    ("operand", "is_copied"),
    [
        (torch.empty(8, 6), True),
        (torch.empty(8, 1).expand(8, 16), True),
        (torch.empty(8, 8), False),
        (torch.empty(8, 6).t(), True),
        (torch.empty(5, 12).t(), False),
        (torch.empty(3, 8, 16)[:, :, ::2], True),
        (torch.empty(1, 8, 8).expand(3, 8, 8), True),
        (torch.empty(3, 20, 8).mT, False),
        (torch.empty(2, 8, 16)[:, :, :8], False),
        (torch.empty(1, 7), False),
    ],
)
def test_layouts_that_are_copied(operand: torch.Tensor, is_copied: bool) -> None:
    assert cuda.is_copied(replace(operands_of([operand])[0], residue=0)) == is_copied


def test_elsewhere_it_is_pytorchs_product_with_its_gradients() -> None:
    for shapes in (((5, 16), (16, 8), (8,)), ((3, 5, 16), (3, 16, 8), (8,)), ((5, 16), (16, 8), None)):
        operands = [None if shape is None else torch.randn(shape).double().requires_grad_() for shape in shapes]
        given = [one for one in operands if one is not None]
        left, right, bias = operands
        assert left is not None and right is not None
        y, true = product(*operands), left @ right if bias is None else left @ right + bias
        torch.testing.assert_close(y, true)
        ours, theirs = (torch.autograd.grad(one.sin().sum(), given) for one in (y, true))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("left_along", "right_along", "bias"),
    [(True, True, True), (True, False, False), (False, True, True), (False, False, True)],
)
def test_the_hopper_kernel_does_not_spill(left_along: bool, right_along: bool, bias: bool) -> None:
    found = build(cuda.SOURCE, cuda.definitions(left_along, right_along, bias))
    assert not any(found.spilled.values()) and not found.serialized
    assert found.registers * cuda.THREADS <= 65536 and cuda.SHARED_BYTES <= 227 * 1024


def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(b, x, w).relu()


@pytest.mark.parametrize(
    ("inputs", "device", "precision", "reason"),
    [
        ("f32[4096,4096],f32[4096,4096],f32[4096]", "h200", "highest", None),
        ("f32[4096,4096],f32[4096,4096],f32[4096]", "h200", "high", "TF32"),
        ("f32[4096,4096],f32[4096,4096],f32[4096]", "a100", "highest", "wgmma"),
        ("f32[4096,4094],f32[4094,4096],f32[4096]", "h200", "highest", None),
        ("f32[4096,33],f32[33,4096],f32[4096]", "a100", "highest", "wgmma"),
        ("f32[64,64],f32[64,64],f32[64]", "h200", "highest", ""),
        ("bf16[4096,4096],bf16[4096,4096],bf16[4096]", "h200", "highest", ""),
    ],
)
def test_where_it_takes_the_place_of_the_library(
    inputs: str, device: str, precision: str, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reason`: why not; empty where nothing is offered."""
    before = torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert before == "highest" and LEAST_FLOPS > 2 * 64**3
    case = Case("step", lambda: step, InputSpec.parse_many(inputs), training=False)
    found = price_case(case, target_named(device))
    decisions = [
        one for one in found.program.decisions if "tilewright.product" in one.reason and one.verdict != "impossible"
    ]
    launches = [kernel for _, _, kernel in found.plan.launches()]
    assert ("tilewright.product.default" in launches) == (reason is None)
    if reason == "":
        assert decisions == []
    else:
        (decision,) = decisions
        assert decision.verdict == ("taken" if reason is None else "refused") and (reason or "") in decision.reason
