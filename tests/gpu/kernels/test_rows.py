"""Operators of rows on a GPU: the numbers contract by every implementation, on rows of any length, layout and value."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

from tests.gpu.kernels.launching import DTYPES, in_turn
from tests.kernels.row_operators import CALLS, NORMS, OPERANDS, SPECIALS, layout, wrong
from tilewright.bench.catalogue import suite
from tilewright.kernels import activation
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
BOTH = ("tilewright-triton", "tilewright-cuda")
IMPLS = {"cross_entropy": BOTH}
"""Implementations that support rows of any layout; for other operators, the one that users get."""
ANY_LENGTH = ("softmax", "log_softmax", "cross_entropy")
COLUMNS = (
    1, 2, 3, 31, 127, 128, 256, 257, 300, 320, 379, 1000, 1024, 2056, 4096, 5000, 8192, 16384, 16411, 16416, 32768,
    33000, 50257, 65536, 131072, 262144,
)  # fmt: skip
LONG = (500000, 524289, 1048576)


LENGTHS = in_turn((name, n) for name in OPERANDS for n in (*COLUMNS, *(LONG if name in ANY_LENGTH else ())))
LAID_OUT = in_turn((name, case) for name, case in CALLS if case not in SPECIALS)
VALUES = [(name, case, dtype) for name, case in CALLS if case in SPECIALS and name not in NORMS for dtype in DTYPES]
"""Without norms, which `test_norm.py` tests: PyTorch's own kernels have exceptions there."""


def impls(name: str, rows: int, columns: int, dtype: torch.dtype) -> Iterator[str]:
    """The implementations that support contiguous rows of this many columns."""
    workload = suite(name).workload((rows, columns), str(dtype).removeprefix("torch."))
    for impl in ("tilewright", *IMPLS.get(name, ())):
        if suite(name).variant(impl).refuses(workload) is None:
            yield impl


@pytest.mark.parametrize(("name", "case", "dtype"), [*LAID_OUT, *VALUES], ids=str)
def test_every_layout(name: str, case: str, dtype: torch.dtype) -> None:
    assert wrong(name, layout(case, dtype, GPU), IMPLS.get(name, ("tilewright",))) == []


@pytest.mark.parametrize(("name", "columns", "dtype"), LENGTHS, ids=str)
def test_every_length(name: str, columns: int, dtype: torch.dtype) -> None:
    """Contiguous, and rows that begin anywhere modulo 16 bytes; few rows and many."""
    generator = torch.Generator(GPU).manual_seed(columns)
    for rows in {max(2, min(5000, 2**22 // columns)), 5}:
        storage = torch.randn(rows * (columns + 3) + 1, dtype=dtype, device=GPU, generator=generator)
        contiguous = storage[: rows * columns].view(rows, columns)
        assert wrong(name, contiguous, [*impls(name, rows, columns, dtype)]) == [], rows
        assert wrong(name, storage[1:].view(rows, columns + 3)[:, :columns]) == [], rows


PAST_32_BITS = ("gelu", "weighted_sum", "softmax")


@pytest.mark.parametrize("lies", ["dense", "in long rows", "with gaps"])
@pytest.mark.parametrize("name", PAST_32_BITS)
def test_past_32_bits(name: str, lies: str) -> None:
    """The last rows of a matrix, of which 32 bits cannot count the elements or the places, are as those rows alone."""
    shape = {"dense": (2**21 + 5, 1024), "in long rows": (2**14 + 5, 131072), "with gaps": (2**20 + 5, 2048)}[lies]
    x = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
    x = x[:, 3:1003] if lies == "with gaps" else x
    function, operands = suite(name).variant("tilewright").function, OPERANDS[name](x)
    found = []
    for matrix in (x, x[-5:]):
        leaves = [matrix.detach().requires_grad_(), *operands[1:]]
        y = function(*leaves)
        dy = torch.ones_like(y)
        dy[-1] = 2
        (dx,) = torch.autograd.grad(y, leaves[0], dy)
        found.append((y.detach()[-5:].clone(), dx[-5:].clone()))
        del y, dx, dy
    torch.testing.assert_close(*found, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_every_16_bit_number(kind: str, dtype: torch.dtype) -> None:
    """Values and slopes at all numbers of 16 bits (as fp32: at all of bf16), NaN and infinities where eager's are."""
    bits = torch.arange(2**16, device=GPU, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    dy = torch.ones_like(x)
    forward, backward = torch.ops.tilewright.activation, torch.ops.tilewright.activation_backward
    value = activation.formula(x, kind)
    for of in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of(forward(x, kind)), of(value))
        slope = activation.formula_backward(dy, x, kind)
        assert torch.equal(of(backward(dy, x, kind)), of(slope))
    # Beyond that eager's own overflow on the way differs from one spelling of the formula to another.
    x = x[x.abs() < 1e4]
    truth = activation.formula(x.double(), kind)
    assert compare(forward(x, kind), activation.formula(x, kind), truth).ok
    dy = torch.randn(x.shape, device=GPU).to(dtype)
    truth = activation.formula_backward(dy.double(), x.double(), kind)
    assert compare(backward(dy, x, kind), activation.formula_backward(dy, x, kind), truth).ok


def test_float64_is_pytorchs() -> None:
    x = torch.randn(33, device=GPU, dtype=torch.float64)
    assert torch.equal(activation.gelu(x), F.gelu(x))
    assert torch.equal(activation.swiglu(x, x), F.silu(x) * x)
