"""Sums at indices that repeat on a GPU: float64's within fp32, compiled gradients, and an index outside."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract, launched
from tilewright.kernels.index_sums import index_sums

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
CASES = {
    "one": ((1, 1, 1), 1),
    "rows": ((1, 5000, 300), 13),
    "rows for many": ((2, 999, 1024), 700),
    "narrow": ((3, 1000, 7), 50),
    "elements": ((1, 100000, 1), 8),
    "planes": ((40, 513, 1), 100),
    "without positions": ((2, 0, 5), 3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lies", ["an index a row", "sorted", "an index an element", "a part", "negative, 32 bits"])
def test_sums_are_those_of_float64(name: str, lies: str, dtype: torch.dtype) -> None:
    shape, extent = CASES[name]
    generator = torch.Generator(GPU).manual_seed(0)
    source = torch.randn((shape[0], shape[1], 2 * shape[2] + 1), generator=generator, device=GPU).to(dtype)
    source = source[..., 1::2] if lies == "a part" else source[..., : shape[2]].contiguous()
    drawn = shape if lies == "an index an element" else (1, shape[1], 1)
    index = torch.randint(-extent if "negative" in lies else 0, extent, drawn, generator=generator, device=GPU)
    index = index.sort(1)[0] if lies == "sorted" else index.int() if "32" in lies else index
    found = index_sums(source, index.expand(shape), extent, "negative" in lies)
    assert found.dtype == (dtype if dtype == torch.float64 else torch.float32)
    zeros, places = torch.zeros(shape[0], extent, shape[2], dtype=torch.float64, device=GPU), index.expand(shape).long()
    true = zeros.scatter_add(1, places % extent, source.double())
    terms = zeros.scatter_add(1, places % extent, source.double().abs())
    assert bool(((found.double() - true).abs() <= terms * 2**-18).all())


def places(x: Tensor, count: int) -> Tensor:
    """Each of 37 places about as often as others, in no order."""
    return torch.arange(count, device=x.device) ** 2 % 1013 % 37


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[places(x, 4000)].sin(),
    "two indices": lambda x: x[places(x, 4000) % 5, places(x, 4000).flip(0)].sin(),
    "planes": lambda x: x[:, places(x, 4000)].sin(),
    "added": lambda x: x.new_zeros(37, 64).index_add(0, places(x, 40), x * 2),
    "scattered": lambda x: x.new_zeros(9, 64).scatter_add(0, (places(x, 40) % 9).view(40, 1).expand(40, 64), x.sin()),
}


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_compiled_programs_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(40, 64, device=GPU).to(dtype).requires_grad_()
    ran = launched(keeps_contract(GRADIENTS[name], [x]))
    assert "tilewright.index_sums.default" in ran and not any("index_put" in what for what in ran)


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edges_are_sorted_once_for_all_layers(dtype: torch.dtype) -> None:
    index = torch.randint(2000, (150000,), device=GPU, generator=torch.Generator(GPU).manual_seed(0))

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.zeros_like(x).index_add(0, index, x[index].sin())
        return x

    ran = launched(keeps_contract(layers, [torch.randn(2000, 128, device=GPU).to(dtype).requires_grad_()]))
    assert "tilewright.embedding_sums.default" in ran and "tilewright.index_sums.default" not in ran


OUTSIDE = {
    "atomics": "index_sums(torch.ones(1, 3, 128, device='cuda'), torch.full((1, 3, 128), 7, device='cuda'), 7)",
    "sorted": "sums(torch.ones(3, 128, device='cuda'), torch.full((3,), 7, device='cuda').int(), order, 7, -1)",
}


@pytest.mark.parametrize("kernel", OUTSIDE)
def test_an_index_outside_stops_the_device(kernel: str) -> None:
    program = (
        "import torch, tilewright.kernels.embedding\nfrom tilewright.kernels.index_sums import index_sums\n"
        "sums, order = torch.ops.tilewright.embedding_sums, torch.arange(3, device='cuda')\n"
        f"{OUTSIDE[kernel]}\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode != 0
    assert "index out of range" in done.stdout + done.stderr
