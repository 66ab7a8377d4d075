"""The norms without a GPU: formulas, registration, geometry, and machine code for an H200."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.nvcc import instructions, spilled
from tilewright.kernels import norm, ring
from tilewright.kernels.catalogue import suite
from tilewright.kernels.norm import cuda, geometry, reference
from tilewright.measure.truth.proof import prove

NAMES = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
SHAPES = ((7, 37), (1, 1), (5, 1), (3, 257), (64, 128))
CPU = torch.device("cpu")
SOURCES = Path(norm.__file__).parent


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(CPU, torch.Generator().manual_seed(0))
    return inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_formulas_keep_the_numbers_contract(name: str, shape: tuple[int, int], dtype: str) -> None:
    rows = prove(suite(name), suite(name).variant("tilewright").function, inputs_of(name, shape, dtype))
    assert len(rows) == (2 if name.startswith("add") else 1) + len(inputs_of(name, shape, dtype))
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [3.7, 1000.0, 1e-3])
@pytest.mark.parametrize("columns", [5, 999, 5000, 50257])
def test_rows_of_one_value(columns: int, value: float, dtype: str) -> None:
    """Where the true result and the weight's gradient are 0."""
    x, weight, _ = inputs_of("layer_norm", (3, columns), dtype)
    x, bias = torch.full_like(x, value).requires_grad_(), torch.zeros_like(weight, requires_grad=True)
    assert [row for row in prove(suite("layer_norm"), norm.layer_norm, (x, weight, bias)) if not row.ok] == []
    y = norm.layer_norm(x, weight, bias)
    (d_weight,) = torch.autograd.grad(y, weight, torch.randn_like(y))
    assert not y.any() and not d_weight.any()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_in_float64_are_slopes(name: str) -> None:
    assert torch.autograd.gradcheck(getattr(norm, name), inputs_of(name, (4, 9), "float64"))


def test_the_references_are_pytorchs_norms() -> None:
    x, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 33), (33,), (33,)))
    torch.testing.assert_close(reference.layer_norm(x, weight, bias), F.layer_norm(x, (33,), weight, bias))
    torch.testing.assert_close(reference.rms_norm(x, weight), F.rms_norm(x, (33,), weight, 1e-6))


@pytest.mark.parametrize("optional", ["all", "weight", "none"])
@pytest.mark.parametrize("centered", [True, False])
def test_operators_are_registered_well(centered: bool, optional: str) -> None:
    x, residual = (torch.randn(3, 5, 8, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, requires_grad=True) if optional != "none" else None
    bias = torch.randn(8, requires_grad=True) if optional == "all" else None
    ops = torch.ops.tilewright
    torch.library.opcheck(ops.norm.default, (x, weight, bias, 1e-5, centered))
    torch.library.opcheck(ops.add_norm.default, (x, residual, weight, bias, 1e-5, centered))
    _, mean, rstd = ops.norm(x.detach(), weight, bias, 1e-5, centered)
    arguments = (torch.randn_like(x), x.detach(), residual.detach(), weight, bias is not None, mean, rstd, centered)
    detached = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments)
    torch.library.opcheck(ops.norm_backward.default, detached)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_as_one_graph(name: str) -> None:
    function: Callable[..., object] = getattr(norm, name)
    inputs = inputs_of(name, (6, 24), "float32")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)

    def gradients(call: Callable[..., object]) -> list[Tensor]:
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return [*results, *torch.autograd.grad(sum(r.square().sum() for r in results), inputs)]

    for compiled_result, result in zip(gradients(compiled), gradients(function), strict=True):
        torch.testing.assert_close(compiled_result, result, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (2, 0, 16)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = (torch.randn(shape[-1:], requires_grad=True) for _ in range(2))
    y = norm.layer_norm(x, weight, bias)
    assert y.shape == x.shape
    y.sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert bias.grad.shape == bias.shape


def test_gradient_through_one_result_only() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    with torch.no_grad():
        x[1, 3] = torch.nan
    _, total = norm.add_rms_norm(x, residual, weight)
    ours = torch.autograd.grad(total.sum(), (x, residual, weight))
    assert [gradient.unique().tolist() for gradient in ours] == [[1.0], [1.0], [0.0]], "no NaN"
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    y, _ = norm.add_rms_norm(x, residual, weight)
    true = torch.autograd.grad(reference.rms_norm(x + residual, weight).sum(), (x, residual, weight))
    for a, b in zip(torch.autograd.grad(y.sum(), (x, residual, weight)), true, strict=True):
        torch.testing.assert_close(a, b)


def test_a_result_may_be_written_to() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    found = []
    for double in (lambda y: y.mul_(2.0), lambda y: 2.0 * y):
        ends = [double(norm.rms_norm(x, weight)), double(norm.add_rms_norm(x, residual, weight)[0])]
        found.append([*ends, *torch.autograd.grad(ends[0].sum() + ends[1].square().sum(), (x, weight))])
    for written, new in zip(*found, strict=True):
        torch.testing.assert_close(written, new)


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(norm.rms_norm(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_what_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    with pytest.raises(ValueError, match=r"layer_norm: weight \[7\] torch.float32 does not fit x \[3, 8\]"):
        norm.layer_norm(x, torch.randn(7))
    with pytest.raises(ValueError, match="rms_norm takes a tensor"):
        norm.rms_norm(x.int())
    with pytest.raises(ValueError, match=r"residual \[3, 7\] torch.float32 must be as x, \[3, 8\] torch.float32"):
        norm.add_rms_norm(x, torch.randn(3, 7))
    with pytest.raises(ValueError, match="a bias needs a weight of its dtype"):
        norm.layer_norm(x, weight, weight.half())
    with pytest.raises(ValueError, match="x is on cpu, another argument on meta"):
        norm.layer_norm(x, weight.to("meta"))


COLUMNS = (1, 2, 31, 256, 257, 1000, 1024, 4096, 4097, 5000, 8192, 16384, 32768, 50257, 65536, 131072, 262144)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inputs, sums", [(2, 1), (2, 2), (3, 2)])
def test_rings_take_every_row(inputs: int, sums: int, itemsize: int) -> None:
    for columns in COLUMNS:
        task = geometry.task_of(columns, itemsize, inputs, 1, itemsize, True)
        found = ring.plan(task, geometry.ways_of(columns, itemsize, sums))
        if found is None:
            assert (columns, itemsize, inputs) == (262144, 4, 3)
            continue
        lanes = 16 // itemsize
        # The worst place where a row can begin: after all but one element of a vector.
        assert found.width * found.cluster * found.vectors * lanes >= columns + (lanes - 1 if columns % lanes else 0)
        # Sums of a block's rows meet where the ring was, in fp32.
        assert found.groups == 1 or found.depth * inputs * 16 >= found.vectors * lanes * 4


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("itemsize, weight_size", [(2, 2), (2, 4), (4, 4), (4, 2)])
def test_slots_take_every_long_row(itemsize: int, weight_size: int, ragged: bool, residual: bool) -> None:
    lanes = 16 // itemsize
    for columns in (65544 // itemsize, 32769, 50257, 65536, 100003, 131072, 200000, 262144):
        found = geometry.streamed(columns, itemsize, ragged, 2, weight_size, residual)
        if found is None:
            assert (columns, itemsize, ragged) == (262144, 4, True)
            continue
        before = geometry.LINE // itemsize - 1 if ragged else 0
        assert found.threads * found.cluster * found.vectors * lanes >= columns + before
        # Every thread has these vectors, whole but for the first, wherever a row begins.
        assert found.full * found.threads * found.cluster * lanes <= columns
        ahead = found.rows - found.lag
        slot = found.vectors * found.threads * 16
        assert ahead >= 1 and found.shared_bytes == (found.rows + (ahead if residual else 0)) * slot
        mail = 4 * (found.cluster * found.threads // 32 * 16 + 32)
        assert found.shared_bytes + mail <= ring.LARGEST_BLOCK_BYTES
        assert found.threads % 32 == 0 and found.held * found.vectors * lanes * weight_size // 4 <= 72


def test_programs_read_their_weights_seldom() -> None:
    """Rows that begin alike are one program's, turn after turn, where that leaves next to no multiprocessor idle."""
    assert geometry.streams(66, 4096, 65536 * 2) == (66, 1)
    assert geometry.streams(66, 5341, 50257 * 2) == (64, 1)
    assert geometry.streams(30, 5341, 50257 * 4) == (30, 32)
    assert geometry.streams(30, 5341, 50256 * 4) == (30, 1)
    assert geometry.streams(66, 5, 50257 * 2) == (5, 1)


def test_registers_hold_rows() -> None:
    for vectors in (1, 3, 32, 33, 64, 65, 625, 2048, 2049, 4096):
        found = geometry.held(vectors)
        assert found is not None
        assert found.width * found.vectors >= vectors
        assert found.vectors <= 8 and found.threads % found.width == 0
        assert found.width == found.threads or 32 % found.width == 0
    assert geometry.held(4097) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("source, columns", [
    ("held", 5000), ("held", 16384), ("streamed", 50257), ("streamed", 65536),
    ("streamed", 262144), ("backward", 4096), ("backward", 262144),
])  # fmt: skip
def test_cuda_kernels_compile_without_spills(source: str, columns: int, dtype: torch.dtype) -> None:
    """Layer norm with weight and bias, which has the most to keep in registers."""
    line = 128 if columns * dtype.itemsize >= 32768 else 16
    build = cuda.Build(dtype, dtype, True, True, True, False, "RAGGED" if columns % 8 else "WHOLE", line, True)
    plan = cuda.plan(source, columns, build)  # type: ignore[arg-type]
    assert spilled(SOURCES / f"{source}.cu", (*plan.definitions(), *build.definitions())) == {f"norm_{source}": 0}


@pytest.mark.parametrize("columns, dtype", [
    (33000, torch.bfloat16), (16500, torch.float32), (100003, torch.bfloat16), (50257, torch.float32),
], ids=str)  # fmt: skip
def test_no_copy_loses_its_policy(columns: int, dtype: torch.dtype) -> None:
    """Of these rows ptxas 13.0 took the slots' addresses apart: an illegal instruction (see `copy_vector_once`)."""
    for residual in (False, True):
        build = cuda.Build(dtype, dtype, True, False, False, residual, "RAGGED", 128, True)
        code = instructions(
            SOURCES / "streamed.cu", (*cuda.plan("streamed", columns, build).definitions(), *build.definitions())
        )
        copies = [line for line in code if "LDGSTS" in line]
        assert copies and not [line for line in copies if "+UR" in line]


def test_the_sum_over_programs_compiles() -> None:
    assert spilled(SOURCES / "columns.cu", (("WEIGHT", "bf16"), ("THREADS", 256))) == {"norm_columns": 0}


@pytest.mark.parametrize("columns", [256, 16384, 65536])
def test_triton_kernels_compile_without_spills(columns: int) -> None:
    pytest.importorskip("triton")
    taken = {}
    for direction, kernels in TRITON_KERNELS.items():
        whole = columns <= triton_module().LARGEST_BLOCK[direction]
        for name in kernels[:1] if whole else kernels[1:]:
            taken[name] = triton_usage(name, direction, columns)
    assert len(taken) in (2, 3)
    assert [name for name, usage in taken.items() if usage["spilled"]] == []


TRITON_KERNELS = {
    "forward": ("forward_rows", "forward_blocks"),
    "backward": ("backward_rows", "backward_sums", "backward_columns"),
}
"""The kernel of rows that a program holds, then those of longer ones."""
FLAGS = {"CENTERED": True, "HAS_WEIGHT": True, "HAS_BIAS": True, "RESIDUAL": False}


def triton_module() -> ModuleType:
    from tilewright.kernels.norm import triton

    return triton


def triton_usage(name: str, direction: str, columns: int) -> dict[str, int]:
    """Registers and bytes spilled of a bf16 layer norm on an H200."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.emit.machine_code import usage

    kernel = getattr(triton_module(), name)
    block_rows, block, warps = triton_module()._blocks(columns, direction)
    constants = {**FLAGS, "BLOCK_ROWS": block_rows, "BLOCK": block}
    narrow = ("x", "residual", "y", "total", "weight", "bias", "dy", "dsum", "dx")
    wide = ("means", "rstds", "partial", "averages")
    types = dict.fromkeys(narrow, "*bf16") | dict.fromkeys(wide, "*fp32") | {"eps": "fp32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = [index for index, name in enumerate(kernel.arg_names) if name in types and name != "eps"]
    aligned = {(index,): [["tt.divisibility", 16]] for index in pointers}
    source = ASTSource(kernel, signature, constants, aligned)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return usage(code.asm["cubin"])
