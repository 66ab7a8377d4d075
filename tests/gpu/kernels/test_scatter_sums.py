"""Sums at computed places on a GPU: float64's within the dtype, the same at every run, and an index outside."""

import os
import subprocess
import sys

import pytest
import torch

from tilewright.kernels.scatter_sums import scatter_sums

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
CASES = {
    "one": ((1, 1), 1),
    "rows": ((1000, 77), 13),
    "ragged": ((3, 5, 131), 700),
    "long": ((9, 5000), 4096),
    "without places": ((8, 0), 5),
    "heads": ((9, 40, 300), 512),
}


def drawn(shape: tuple[int, ...], extent: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Some places are much asked for, as after a clamp."""
    generator = torch.Generator(GPU).manual_seed(0)
    index = torch.randint(-extent, 2 * extent, shape, generator=generator, device=GPU).clamp(0, extent - 1)
    return torch.randn(shape, generator=generator, device=GPU).to(dtype), index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lies", ["dense", "shared index", "transposed", "transposed, shared index", "32-bit index"])
def test_sums_are_those_of_float64(name: str, lies: str, dtype: torch.dtype) -> None:
    shape, extent = CASES[name]
    source, index = drawn(shape, extent, dtype)
    if "shared" in lies:
        index = index[:1].expand(shape)
    if "transposed" in lies:
        source = source.mT.contiguous().mT
    if "32" in lies:
        index = index.int()
    found = scatter_sums(source, index, extent)
    wide = torch.zeros(*shape[:-1], extent, dtype=torch.float64, device=GPU)
    true = wide.scatter_add(-1, index.long(), source.double())
    # A sum in fp32 errs by its terms; the result is rounded once.
    terms = wide.scatter_add(-1, index.long(), source.double().abs())
    allowed = terms * 2**-20 + true.abs() * torch.finfo(dtype).eps / 2
    assert ((found.double() - true).abs() <= allowed).all()
    assert all(torch.equal(scatter_sums(source, index, extent), found) for _ in range(3))


def test_an_index_outside_stops_the_device() -> None:
    program = (
        "import torch; from tilewright.kernels.scatter_sums import scatter_sums; "
        "scatter_sums(torch.ones(2, 3, device='cuda'), torch.full((2, 3), 5, device='cuda'), 5); "
        "torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode != 0
    assert "index out of bounds" in done.stdout + done.stderr
