"""The product of fp32 by 16-bit matrix instructions, without a GPU: division of the work, machine code, the choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.nvcc import build
from tilewright.compile.price import price_case
from tilewright.hardware.target import target_named
from tilewright.kernels.product import cuda, product
from tilewright.kernels.product.offer import LEAST_FLOPS
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
    ("left", "right", "reason"),
    [
        (torch.empty(8, 6), torch.empty(6, 8), "16 bytes"),
        (torch.empty(8, 1).expand(8, 16), torch.empty(16, 8), "16 bytes"),
        (torch.empty(0, 8), torch.empty(8, 8), "empty"),
        (torch.empty(8, 8), torch.empty(8, 8), None),
        (torch.empty(8, 6).t(), torch.empty(8, 8), "16 bytes"),
        (torch.empty(12, 8).t(), torch.empty(5, 12).t(), None),
        (torch.empty(3, 8, 16)[:, :, ::2], torch.empty(3, 8, 8), "16 bytes"),
        (torch.empty(3, 8, 8), torch.empty(1, 8, 8).expand(3, 8, 8), "16 bytes"),
        (torch.empty(3, 8, 8), torch.empty(3, 20, 8).mT, None),
    ],
)
def test_layouts_that_it_supports(left: torch.Tensor, right: torch.Tensor, reason: str | None) -> None:
    found = cuda.layout_refusal(left, right)
    assert found is None if reason is None else found is not None and reason in found


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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("left_along", "right_along"), [(True, True), (True, False), (False, True), (False, False)])
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
        ("f32[4096,4094],f32[4094,4096],f32[4096]", "h200", "highest", "16 bytes"),
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
