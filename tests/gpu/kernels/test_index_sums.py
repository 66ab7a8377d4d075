"""Sums at indices that repeat on a GPU: float64's within the dtype, compiled gradients, and an index outside.

By atomics, in shared memory, and those of an embedding's gradient, sorted and the same at every run.
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract, launched
from tests.gpu.kernels.launching import FOUR, in_turn, on_a_side_stream, replayed
from tests.kernels.embeddings import assert_added, assert_extremes, assert_sums, sorted_by_index
from tilewright.kernels import segment_reduce as _defines_the_operators  # noqa: F401
from tilewright.kernels.index_sums import index_sums
from tilewright.kernels.scatter_sums import scatter_sums

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


LIES = ["an index a row", "sorted", "an index an element", "a part", "negative, 32 bits"]


@pytest.mark.parametrize(("name", "lies", "dtype"), in_turn(itertools.product(CASES, LIES), FOUR), ids=str)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_compiled_programs_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(40, 64, device=GPU).to(dtype).requires_grad_()
    ran = launched(keeps_contract(GRADIENTS[name], [x]))
    assert "tilewright.index_sums.default" in ran and not any("index_put" in what for what in ran)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edges_are_sorted_once_for_all_layers(dtype: torch.dtype) -> None:
    index = torch.randint(2000, (150000,), device=GPU, generator=torch.Generator(GPU).manual_seed(0))

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.zeros_like(x).index_add(0, index, x[index].sin())
        return x

    ran = launched(keeps_contract(layers, [torch.randn(2000, 128, device=GPU).to(dtype).requires_grad_()]))
    assert "tilewright.embedding_sums.default" in ran and "tilewright.index_sums.default" not in ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["amax", "amin", "sum"])
def test_rows_of_neighbours_are_never_written(how: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    source, to = (torch.randint(2000, (150000,), device=GPU, generator=generator) for _ in range(2))

    def layers(x: Tensor) -> Tensor:
        for _ in range(2):
            sent = x.sin()[source]
            x = torch.zeros_like(x).scatter_reduce(0, to[:, None].expand_as(sent), sent, how) + x
        return x

    ran = launched(keeps_contract(layers, [torch.randn(2000, 128, device=GPU).to(dtype).requires_grad_()]))
    ours = ["row_extremes", "matching_sums"] if how != "sum" else ["embedding_sums"]
    assert all(f"tilewright.{name}.default" in ran for name in ours) and not any("scatter" in what for what in ran)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(1000, 7, 11), (20000, 300, 128), (9000, 5, 1031)], ids=str)
def test_extremes_of_rows_and_their_gradients(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    positions, entries, columns = sizes
    generator = torch.Generator(GPU).manual_seed(0)
    table = torch.randint(-90, 90, (500, columns), device=GPU, generator=generator).to(dtype)
    table[4, 5] = torch.nan
    taken = torch.randint(500, (positions,), device=GPU, generator=generator)
    assert_extremes(table, taken, torch.randint(entries, (positions,), device=GPU, generator=generator), entries + 1)


SCATTERED = {
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


WAYS = ["dense", "shared index", "transposed", "transposed, shared index", "32-bit index"]


@pytest.mark.parametrize(("name", "lies", "dtype"), in_turn(itertools.product(SCATTERED, WAYS), FOUR), ids=str)
def test_scattered_sums_are_those_of_float64(name: str, lies: str, dtype: torch.dtype) -> None:
    shape, extent = SCATTERED[name]
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


OUTSIDE = {
    "atomics": "index_sums(torch.ones(1, 3, 128, device='cuda'), torch.full((1, 3, 128), 7, device='cuda'), 7)",
    "sorted": "torch.ops.tilewright.sorted_bounds(torch.full((3,), 7, device='cuda').int(), 7)",
    "shared memory": "scatter_sums(torch.ones(2, 3, device='cuda'), torch.full((2, 3), 5, device='cuda'), 5)",
}


@pytest.mark.parametrize("kernel", OUTSIDE)
def test_an_index_outside_stops_the_device(kernel: str) -> None:
    program = (
        "import torch, tilewright.kernels.segment_reduce\nfrom tilewright.kernels.index_sums import index_sums\n"
        "from tilewright.kernels.scatter_sums import scatter_sums\n"
        f"{OUTSIDE[kernel]}\ntorch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode != 0
    assert f"index out of {'bounds' if kernel == 'shared memory' else 'range'}" in done.stdout + done.stderr


SIZES = [
    (0, 3, 5),
    (1, 1, 1),
    (1000, 11, 7),
    (4099, 257, 1031),
    (20000, 3, 1024),
    (3000, 50257, 256),
    (20000, 2000, 128),
    (9000, 1001, 16),
]


@pytest.mark.parametrize(("sizes", "padding", "dtype"), in_turn(itertools.product(SIZES, (-1, 0)), FOUR), ids=str)
def test_sums_are_exact_but_for_one_rounding(sizes: tuple[int, int, int], padding: int, dtype: torch.dtype) -> None:
    positions, entries, columns = sizes
    dout = torch.randn(positions, columns, device=GPU).to(dtype)
    assert_sums(dout, torch.randint(entries, (positions,), device=GPU), entries, padding)


def test_streams_and_graphs_give_the_same_bits() -> None:
    keys, order, bounds = sorted_by_index(torch.randint(50, (12000,), device=GPU), 50)
    dout = torch.randn(12000, 300, device=GPU)

    def sums(dout: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.tilewright.embedding_sums(dout, keys, order, bounds, 50, -1)
        return found

    plain = sums(dout)
    for way in (on_a_side_stream, replayed):
        assert torch.equal(way(sums, [dout])[0], plain)
    assert torch.equal(sums(dout), plain)


def test_misaligned_and_strided_gradients() -> None:
    indices, drawn = torch.randint(50, (300,), device=GPU), torch.randn(300, 603, device=GPU).bfloat16()
    for dout in (drawn[:, 1:302], drawn.flatten()[1:90001].view(300, 300), drawn[:, ::2], drawn[:, :300].t()):
        assert_sums(dout, indices, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_added_in_place(dtype: torch.dtype) -> None:
    indices = torch.randint(5000, (9000,), device=GPU).clamp(max=3000)
    assert_added(torch.randn(5003, 600, device=GPU).to(dtype), torch.randn(9000, 600, device=GPU).to(dtype), indices)


def test_more_elements_than_31_bits_count() -> None:
    indices = torch.tensor([2**17, 0], device=GPU)
    dout = torch.ones(2, 2**14, device=GPU, dtype=torch.bfloat16)
    found = torch.ops.tilewright.embedding_sums(dout, *sorted_by_index(indices, 2**17 + 1), 2**17 + 1, -1)
    assert found[-1].eq(1).all() and found[0].eq(1).all() and not found[1:-1].any()
