"""Costs of a library's transforms, searches, selections and samplers in closed form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cost.counted import cost_of, program_costs
from tests.graph.captured import Program


def sampled(x: Tensor, mode: str) -> tuple[Tensor, ...]:
    """Of images or volumes at places between their elements, with the gradients of both."""
    grid = x[:, :1].movedim(1, -1).expand(*x.shape[:1], *x.shape[2:], x.dim() - 2)
    y = F.grid_sample(x, grid, mode=mode, align_corners=False)
    corners = {"bilinear": 0, "nearest": 1, "bicubic": 2}[mode], 0, False, [True, True]
    backward = getattr(torch.ops.aten, f"grid_sampler_{x.dim() - 2}d_backward")
    return y, *backward(y, x, grid, *corners)


IMAGES, VOLUMES = "float32[N,C,H,W]", "float32[N,C,H,W,D]"


@pytest.mark.parametrize(
    ("function", "inputs", "call", "flops"),
    [
        # 5 n log₂ n for n complex points, half for real ones; several transforms of several axes.
        (lambda x: torch.fft.fft(x), ["complex64[C,W]"], "_fft_c2c", 5 * 3 * 16 * 4),
        (lambda x: torch.fft.fft2(x), ["complex64[N,H,W]"], "_fft_c2c", 5 * 2 * 8 * 16 * 7),
        (lambda x: torch.fft.rfft(x), ["float32[C,W]"], "_fft_r2c", 5 * 3 * 16 * 4 // 2),
        (lambda x: torch.fft.irfft(x, 16), ["complex64[C,S]"], "_fft_c2r", 5 * 3 * 16 * 4 // 2),
        (lambda b, x: torch.searchsorted(b, x), ["float32[K]", "float32[C,H]"], "searchsorted", 3 * 8 * 4),
        (lambda b, x: torch.bucketize(x, b), ["float32[W]", "float32[C,H]"], "bucketize", 3 * 8 * 4),
        (lambda x: torch.kthvalue(x, 2), ["float32[C,H]"], "kthvalue", 3 * 8),
        (lambda x: torch.median(x), ["float32[C,H]"], "median", 3 * 8),
        (lambda x: torch.topk(x, 2), ["float32[C,H]"], "topk", 3 * 8),
        (lambda x: sampled(x, "bilinear"), [IMAGES], "grid_sampler_2d", 2 * 4 * 768),
        (lambda x: sampled(x, "bilinear"), [IMAGES], "grid_sampler_2d_backward", 2 * 4 * 3 * 768),
        (lambda x: sampled(x, "nearest"), [IMAGES], "grid_sampler_2d", 0),
        (lambda x: sampled(x, "nearest"), [IMAGES], "grid_sampler_2d_backward", 768),
        (lambda x: sampled(x, "bicubic"), [IMAGES], "grid_sampler_2d", 2 * 16 * 768),
        (lambda x: sampled(x, "bilinear"), [VOLUMES], "grid_sampler_3d", 2 * 8 * 2 * 768),
    ],
)
def test_calls_of_a_library_in_closed_form(
    function: Callable[..., Any], inputs: list[str], call: str, flops: int
) -> None:
    sizes = {"N": 2, "C": 3, "H": 8, "W": 16, "S": 9, "K": 9, "D": 2}
    used = {name: size for name, size in sizes.items() if any(name in spec.partition("[")[2] for spec in inputs)}
    cost = program_costs(Program(function, tuple(inputs)), used)[call]
    assert (cost.provenance, cost.flops, cost.transcendentals) == ("formula", flops, 0)
    assert cost.bytes_read > 0 < cost.bytes_written


def test_complex_tensors_that_are_transformed_or_only_moved_are_known() -> None:
    cost = cost_of(lambda x: torch.fft.fft(x), "complex64[N,M]", N=3, M=8)
    assert (cost.bytes_read, cost.bytes_written) == (3 * 8 * 8, 3 * 8 * 8)
    assert cost_of(lambda x: torch.cat([x, x]), "complex64[N,M]", N=3, M=8).bytes == 3 * 3 * 8 * 8
