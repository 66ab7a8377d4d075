"""The norms on a GPU, beside `test_rows.py`: values that hurt, weights of any kind, rows of others, runs again."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import broken
from tilewright.bench.catalogue import suite
from tilewright.kernels import norm
from tilewright.kernels.by_recipe import performed
from tilewright.kernels.norm import cuda
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.proof import tensors_of
from tilewright.records.measurement import Verified

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
aten = torch.ops.aten


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    generator = torch.Generator(GPU).manual_seed(0)
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(GPU, generator)
    return inputs


def wrong(name: str, inputs: tuple[Tensor, ...]) -> list[Verified]:
    return broken(suite(name), inputs, suite(name).variant("tilewright").function)


@pytest.mark.parametrize("columns", [64, 512, 4096, 50257, 65536])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_specials_are_where_eagers_are(name: str, value: float, columns: int) -> None:
    if name == "layer_norm" and value == 1e30 and columns < 512:
        pytest.skip("PyTorch leaves lanes without columns below 512: a square that overflows times their 0 is its NaN")
    if name == "rms_norm" and value == float("inf") and columns % 4:
        pytest.skip("PyTorch takes such rows from a running mean, where inf - inf is NaN; by the formula they are 0")
    inputs = inputs_of(name, (5, columns), "float32")
    with torch.no_grad():
        inputs[0][1, columns // 2] = value
    assert wrong(name, inputs) == []


@pytest.mark.parametrize("dtype, far", [("float32", 1000), ("bfloat16", 100)])
@pytest.mark.parametrize("columns", [4096, 32768, 50257, 65536])
def test_a_mean_far_from_zero_costs_no_more_than_eager(columns: int, dtype: str, far: int) -> None:
    """In every third row, so that programs go from rows that are looked at twice to others."""
    x, weight, bias = inputs_of("layer_norm", (200, columns), dtype)
    with torch.no_grad():
        x[::3] += far
    assert wrong("layer_norm", (x, weight, bias)) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("columns", [5, 999, 5000, 16384, 32768, 50257, 65536, 100000])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_rows_of_one_value(name: str, columns: int, dtype: str) -> None:
    """All rows, where the true result and the weight's gradient are 0 and so is what the contract leaves, and one."""
    *drawn, weight, _ = inputs_of(name, (7, columns), dtype)
    bias = torch.zeros_like(weight, requires_grad=True)
    for value in (3.7, 1000.0, 1e-3):
        for rows in (slice(None), slice(3, 4)):
            matrices = [matrix.detach().clone() for matrix in drawn]
            for number, matrix in enumerate(matrices):
                matrix[rows] = value / (1 + number)
            inputs = (*(matrix.requires_grad_() for matrix in matrices), weight, bias)
            assert wrong(name, inputs) == [], (value, rows)
        whole = [torch.full_like(matrix, value / (1 + number)) for number, matrix in enumerate(drawn)]
        leaves = [matrix.detach().requires_grad_() for matrix in whole]
        y = tensors_of(suite(name).variant("tilewright").function(*leaves, weight, bias))[0]
        (d_weight,) = torch.autograd.grad(y, weight, torch.randn_like(y))
        assert not y.any() and not d_weight.any(), value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("columns", [96, 257, 5000, 50257, 65536])
def test_a_row_does_not_depend_on_its_neighbours(columns: int, dtype: str) -> None:
    """Not on those of one value, which are looked at again, either."""
    x, weight, bias = (tensor.detach() for tensor in inputs_of("layer_norm", (400, columns), dtype))
    before = norm.layer_norm(x, weight, bias)
    x[1::2] = 3.7
    assert torch.equal(norm.layer_norm(x, weight, bias)[::2], before[::2])


def test_weights_of_another_dtype() -> None:
    x, weight, bias = inputs_of("layer_norm", (50, 1000), "bfloat16")
    wide = (weight.detach().float().requires_grad_(), bias.detach().float().requires_grad_())
    y = norm.layer_norm(x, *wide)
    true = F.layer_norm(x.double(), (1000,), *(w.double() for w in wide))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), true, rtol=2**-8, atol=2**-8)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, *wide), dy)
    for a, b in zip(ours[1:], torch.autograd.grad(true, wide, dy.double()), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("columns", [32768, 50257, 65536])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_rows_with_any_weight(columns: int, dtype: torch.dtype) -> None:
    """None, at the beginning of a tensor, behind it, of another dtype; each has a kernel of its own."""
    x = torch.randn(50, columns, device=GPU, dtype=dtype)
    drawn = torch.randn(columns + 1, device=GPU, dtype=dtype)
    for weight in (None, drawn[:-1], drawn[1:], drawn[1:].float()):
        true = F.rms_norm(x.double(), (columns,), None if weight is None else weight.double(), norm.FLOAT_EPSILON)
        y = norm.rms_norm(x, weight).double()
        assert (y - true).norm() <= torch.finfo(dtype).eps * true.norm()
        assert (y - true).abs().max() <= 2 * torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
@pytest.mark.parametrize("columns, dtype", [
    (8193, "float32"), (16411, "float32"), (25001, "float32"), (33000, "bfloat16"), (50257, "bfloat16"),
    (50257, "float16"),
])  # fmt: skip
def test_many_rows_that_begin_anywhere(columns: int, dtype: str, name: str) -> None:
    """More of them than programs run at once."""
    *drawn, weight, bias = inputs_of(name, (139, columns), dtype)
    assert wrong(name, (*drawn, weight, bias)) == []
    if name == "layer_norm":
        storage = torch.randn(139 * columns + 24, device=GPU, dtype=weight.dtype)
        x = storage[24:].view(139, columns)
        x[7] = 3.7
        # Those after the first are done as that one was.
        for _ in range(3):
            weight, bias = (torch.randn(columns, device=GPU, dtype=x.dtype) for _ in range(2))
            true = F.layer_norm(x.double(), (columns,), weight.double(), bias.double())
            # What the result lies in next.
            torch.full_like(x, torch.nan)
            y = norm.layer_norm(x, weight, bias)
            torch.testing.assert_close(y.double(), true, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-5)


def test_cuda_runs_where_it_can() -> None:
    """With clusters: rows from 2 to 128 KiB forward, and backward those of whole vectors, of fp32 to 512 KiB."""
    for columns in (256, 5000, 16384, 50257, 262144):
        for dtype in (torch.bfloat16, torch.float32):
            refusal = cuda.refusal(cuda.contiguous("forward", 2, columns, dtype, 1, 2, True), GPU)
            assert (refusal is None) == (2**11 < columns * dtype.itemsize <= 2**17)
            refusal = cuda.refusal(cuda.contiguous("backward", 2, columns, dtype, 2, 1, True), GPU)
            most = 2**19 if dtype == torch.float32 else 2**17
            assert (refusal is None) == (columns != 50257 and 2**11 < columns * dtype.itemsize <= most)


@pytest.mark.parametrize("columns", [257, 4096, 5000, 32768, 65536])
def test_gradients_are_the_same_at_every_run(columns: int) -> None:
    inputs = inputs_of("layer_norm", (500, columns), "bfloat16")
    dy = torch.randn(500, columns, device=GPU, dtype=torch.bfloat16)
    first, second = (torch.autograd.grad(norm.layer_norm(*inputs), inputs, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("centered", [True, False])
def test_gradients_of_narrow_rows(columns: int, centered: bool) -> None:
    """From the same mean and rstd, whose last bits decide what is left of such rows."""
    generator = torch.Generator(GPU).manual_seed(0)
    x, dy = (torch.randn(5000, columns, device=GPU, generator=generator) for _ in range(2))
    weight, shape = torch.randn(columns, device=GPU, generator=generator), [columns]
    if centered:
        _, mean, rstd = aten.native_layer_norm(x, shape, weight, weight, 1e-5)
    else:
        mean, rstd = x.new_empty(0), aten._fused_rms_norm(x, shape, weight, 1e-5)[1]

    def pytorchs(dtype: torch.dtype) -> Sequence[Tensor]:
        d, v, m, r, w = (tensor.to(dtype) for tensor in (dy, x, mean, rstd, weight))
        if centered:
            return aten.native_layer_norm_backward(d, v, shape, m, r, w, w, [True] * 3)  # type: ignore[no-any-return]
        return aten._fused_rms_norm_backward(d, v, shape, r, w, [True] * 2)  # type: ignore[no-any-return]

    backward = torch.ops.tilewright.norm_backward
    ours = backward(dy, x, None, weight, centered, mean.flatten(), rstd.flatten(), centered)
    for made, eager, true in zip(ours, pytorchs(torch.float32), pytorchs(torch.float64), strict=False):
        assert compare(made, eager, true).ok


@pytest.mark.parametrize("columns", [1024, 32761, 32768])
def test_past_32_bits(columns: int) -> None:
    """More than 2³¹ elements: the last rows, and a gradient that sums over all rows."""
    rows = 2**31 // columns + 3
    x = torch.randn(rows, columns, device=GPU, dtype=torch.bfloat16)
    weight = torch.randn(columns, device=GPU, dtype=torch.bfloat16)
    found = performed("add_norm", norm.add_norm_recipe, x, None, weight, None, 1e-6, False)
    assert found is not None
    y, mean, rstd = found
    true = F.rms_norm(x[-5:].double(), (columns,), weight.double(), 1e-6)
    torch.testing.assert_close(y[-5:].double(), true, rtol=2**-8, atol=2**-8)
    found = performed("norm_backward", norm.backward_recipe, x, x, None, weight, False, mean, rstd, False)
    assert found is not None
    dx, d_weight, _ = found
    tail = x[-5:].double().requires_grad_()
    (true_dx,) = torch.autograd.grad(F.rms_norm(tail, (columns,), weight.double(), 1e-6), tail, tail.detach())
    torch.testing.assert_close(dx[-5:].double(), true_dx, rtol=2**-7, atol=2**-6)
    # dy is x, so that dweight = Σ x² rstd, all of one sign.
    parts = zip(x.split(2**13), rstd.split(2**13), strict=True)
    true_weight = sum((part.double().square() * r[:, None]).sum(0) for part, r in parts)
    torch.testing.assert_close(d_weight.double(), true_weight, rtol=2**-8, atol=0)
