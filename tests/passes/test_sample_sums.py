"""Sums over samples and places of values with moments of each sample: places first where a GPU's kernel reads those."""

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run, stays
from tilewright.hardware.target import target_named
from tilewright.passes.fusion import fuse
from tilewright.passes.norm.split import sum_samples_last

H200, CPU, FP32 = target_named("h200"), target_named("cpu"), torch.float32


def image(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Channels-last, [N, C, …]."""
    generator = torch.Generator().manual_seed(5)
    samples, channels, *places = shape
    return torch.randn(samples, *places, channels, generator=generator).movedim(-1, 1).to(dtype)


def of_samples(x: Tensor) -> Tensor:
    """A mean of each sample and channel, with an axis for each place."""
    return x.float().mean(list(range(2, x.dim())), keepdim=True)


def of_norm(g: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """As an instance norm's gradient, and the bias gradient of the convolution before the norm."""
    dx = (g - mean).to(g.dtype)
    return dx, dx.sum([0, *range(2, g.dim())])


SHAPES = {"images": (3, 40, 72, 67), "volumes": (2, 32, 21, 20, 23), "sequences": (5, 24, 8191)}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*zip(SHAPES.values(), (torch.bfloat16, torch.float32, torch.float64), strict=True), (SHAPES["images"], FP32)],
    ids=str,
)
def test_the_places_of_a_sample_are_summed_first(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    g = image(*shape, dtype=dtype)
    mean = of_samples(image(*shape)).to(dtype if dtype == torch.float64 else torch.float32)
    graph = aten(of_norm, g, mean)
    stays(lambda kept: sum_samples_last(kept, CPU), of_norm, g, mean)
    sum_samples_last(graph, H200)
    assert calls(graph).count("sum.dim_IntList") == 2
    dx, db = run(graph, g, mean)
    exact = dx.double().sum([0, *range(2, g.dim())])
    assert db.dtype == dtype and db.shape == exact.shape
    torch.testing.assert_close(db.double(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_moments_are_loaded_once_a_program() -> None:
    """Sample and channel are columns of the kernel, so that each step of the moments is before the loop over rows."""
    g = image(2, 32, 64, 64, 64)
    graph = aten(of_norm, g, of_samples(g))
    sum_samples_last(graph, H200)
    nest = max(
        (region.lowered.nest for region in fuse(graph, "backward", H200).regions), key=lambda nest: nest.row_count
    )
    assert (nest.rows, nest.cols) == ((64**3,), (2, 32)) or (nest.row_count, nest.cols) == (64**3, (64,))
