"""The linear layer with GELU, or with dropout and residual, without a GPU: formula, registration, machine code."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.contract import broken
from tests.gpu.kernels.launching import in_turn
from tests.kernels.machine_code import compiled, spilled
from tests.kernels.nvcc import build
from tests.kernels.row_operators import layouts
from tilewright.bench.catalogue import suite
from tilewright.kernels import linear
from tilewright.kernels.linear import cuda, linear_dropout_add, linear_gelu
from tilewright.kernels.skinny_linear import WARPS, plan
from tilewright.records.outcomes import Outcome

SHAPES = [(0, 4, 5), (1, 1, 1), (7, 3, 1), (31, 24, 37)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def matrices(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, bias and residual, with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = (m, k), (n, k), (n,), (m, n)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("power", [1, 2])
def test_second_derivatives_are_eagers(power: int) -> None:
    """Also where the incoming gradient is a constant, so that all of them pass through what was saved."""
    x, weight, bias, _ = matrices(5, 4, 3, torch.float64)
    found = []
    for call in (linear_gelu, lambda *inputs: F.gelu(F.linear(*inputs))):
        end = call(x, weight, bias).pow(power).sum()
        first = torch.autograd.grad(end, (x, weight, bias), create_graph=True)
        found.append(torch.autograd.grad(sum(one.square().sum() for one in first), (x, weight, bias)))
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true)


@pytest.mark.parametrize("wide", [False, True])
def test_under_autocast_as_eager(wide: bool) -> None:
    """`wide`: the residual is fp32, and so then is what it is added to."""
    x, weight, bias, residual = matrices(5, 4, 3, torch.float32)
    residual = residual.detach().requires_grad_() if wide else residual.detach().bfloat16().requires_grad_()
    inputs = (x, weight, bias, residual)
    found = []
    for gelu, dropout_add in (
        (linear_gelu, linear_dropout_add),
        (lambda *xs: F.gelu(F.linear(*xs)), lambda x, w, b, r, p: F.dropout(F.linear(x, w, b), p) + r),
    ):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            ends = [gelu(x, weight, bias), dropout_add(x, weight, bias, residual, 0.5)]
        assert [end.dtype for end in ends] == [torch.bfloat16, torch.float32 if wide else torch.bfloat16]
        found.append([*ends, *torch.autograd.grad(ends[0].float().sum() + ends[1].float().sum(), inputs)])
    for ours, true in zip(*found, strict=True):
        torch.testing.assert_close(ours, true, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("approximate", "sizes", "dtype"), in_turn(itertools.product(["none", "tanh"], SHAPES), [tuple(DTYPES)]), ids=str
)
def test_gelu_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype, approximate: str) -> None:
    x, weight, bias, _ = matrices(*sizes, dtype)
    assert broken(suite("linear_gelu"), (x, weight, bias, approximate), linear_gelu) == []


@pytest.mark.parametrize(
    ("p", "sizes", "dtype"), in_turn(itertools.product([0.3, 1.0], SHAPES), [tuple(DTYPES)]), ids=str
)
def test_dropout_add_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype, p: float) -> None:
    if p == 1.0:
        x, weight, bias, residual = matrices(*sizes, dtype)
        assert torch.equal(linear_dropout_add(x, weight, bias, residual, p), residual)
        return
    assert broken(suite("linear_dropout_add"), (*matrices(*sizes, dtype), p), linear_dropout_add) == []


def test_any_layout_and_leading_dimensions() -> None:
    _, weight, bias, _ = matrices(1, 24, 16, torch.float32)
    for way, x in layouts(6, 16, torch.float32).items():
        expected = F.gelu(F.linear(x, weight, bias))
        torch.testing.assert_close(linear_gelu(x, weight, bias), expected, msg=way)
        batched = linear_gelu(x.view(2, 3, 16) if x.is_contiguous() else x.reshape(2, 3, 16), weight, bias)
        torch.testing.assert_close(batched, expected.view(2, 3, 24), msg=way)
    torch.testing.assert_close(linear_gelu(x[0], weight), F.gelu(F.linear(x[0], weight)))


def test_mask_and_generator_are_eagers() -> None:
    x, weight, bias, residual = matrices(9, 24, 16, torch.float32)
    torch.manual_seed(5)
    ours, after = linear_dropout_add(x, weight, bias, residual, 0.4), torch.get_rng_state()
    torch.manual_seed(5)
    torch.testing.assert_close(ours, F.dropout(F.linear(x, weight, bias), 0.4) + residual)
    assert torch.equal(after, torch.get_rng_state())


def test_nothing_is_drawn_in_inference() -> None:
    x, weight, bias, residual = matrices(9, 24, 16, torch.float32)
    before = torch.get_rng_state()
    ours = linear_dropout_add(x, weight, bias, residual, 0.4, training=False)
    torch.testing.assert_close(ours, F.linear(x, weight, bias) + residual)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("needed", range(4))
def test_a_gradient_of_one_alone(needed: int) -> None:
    tensors = [tensor.detach() for tensor in matrices(5, 8, 16, torch.float64)]
    tensors[needed].requires_grad_()
    loss, eager = linear_dropout_add(*tensors, 0.0).sum(), (F.linear(*tensors[:3]) + tensors[3]).sum()
    for ours, theirs in zip(*(torch.autograd.grad(end, tensors[needed]) for end in (loss, eager)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_hopper_kernel_says_what_it_does_not_take() -> None:
    x, weight = torch.empty(4, 16), torch.empty(8, 16)
    assert "float32 on cpu" in str(cuda.refuses(x, weight))


@pytest.fixture
def on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "none")


IMPLS = {"one": lambda *_: None, "other": lambda *_: None}


def test_without_memory_to_measure_the_first_runs(
    on_a_device: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the next call measures again."""

    def race(*_: object) -> Outcome:
        raise torch.OutOfMemoryError

    x, weight = torch.empty(4, 16), torch.empty(8, 16)
    monkeypatch.setattr("tilewright.launch.race.run", race)
    assert linear.fastest("memory", (x, weight), IMPLS) == "one"
    assert "no memory to race memory one other 4 8 16 torch.float32" in capsys.readouterr().err
    monkeypatch.setattr("tilewright.launch.race.run", lambda *_: Outcome({"one": 2.0, "other": 1.0}))
    assert linear.fastest("memory", (x, weight), IMPLS) == "other"
    monkeypatch.setattr("tilewright.launch.race.run", race)
    assert linear.fastest("memory", (x[:3], weight), IMPLS) == "other"


def test_the_operands_of_a_race_leave_the_generator_alone() -> None:
    seen: list[torch.Tensor] = []
    before = torch.get_rng_state()
    operands = torch.empty(4, 16), torch.empty(8, 16), None
    linear._alternatives(operands, {"one": lambda x, w, b: seen.append(x)})["one"]()
    assert torch.equal(torch.get_rng_state(), before) and seen[0].std() > 0


def test_nothing_is_raced_while_a_graph_is_captured(on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.launch.race.is_captured", lambda device: True)
    monkeypatch.setattr("tilewright.launch.race.run", lambda *_: pytest.fail("raced"))
    assert linear.fastest("captured", (torch.empty(4, 16), torch.empty(8, 16)), IMPLS) == "one"


@pytest.mark.parametrize(
    ("epilogue", "bias", "dtype"),
    [
        ("none", True, torch.bfloat16),
        ("gelu", True, torch.float16),
        ("gelu_tanh", False, torch.bfloat16),
    ],
)
def test_the_hopper_kernel_does_not_spill(epilogue: cuda.Epilogue, bias: bool, dtype: torch.dtype) -> None:
    found = build(cuda.SOURCE, cuda.definitions(epilogue, bias, epilogue != "none", dtype))
    assert not any(found.spilled.values()) and not found.serialized
    assert found.registers * cuda.THREADS <= 65536 and cuda.SHARED_BYTES <= 227 * 1024


def test_a_launch_has_whole_clusters() -> None:
    """One for each tile of 256 x 256, and no more than pairs of multiprocessors."""
    assert cuda.programs(1, 8, 132) == cuda.CLUSTER
    assert cuda.programs(257, 300, 132) == 4 * cuda.CLUSTER
    assert cuda.programs(8192, 16384, 132) == 132
    assert cuda.programs(8192, 16384, 133) == 132


pytest.importorskip("triton")


def code(rows: int, columns: int, outputs: Sequence[int], gated: bool = False, norm: bool = False) -> str:
    """PTX for bf16 on an H200; nothing spills, and two programs at least have room in shared memory."""
    from tilewright.kernels.skinny_linear.triton import skinny_linear

    made = plan(rows, columns, outputs, gated, 132)
    types = {name: "i32" for name in skinny_linear.arg_names} | {"scratch": "*fp32", "zeros": "*i32", "eps": "fp32"}
    types |= {name: "*bf16" for name in ("x", "gain", "residual", "b0", "b1", "b2")}
    types |= {f"{kind}{n}": "*bf16" for kind in "wy" for n in range(3)}
    absent = [*["gain"][norm:], "b0", "b1", "b2", "residual", *["scratch", "zeros"][2 * (made.splits > 1) :]]
    absent += [f"w{n}" for n in range(len(outputs) + gated, 3)] + [f"y{n}" for n in range(len(outputs), 3)]
    constants = dict.fromkeys(absent) | {
        "columns": columns, "WEIGHTS": len(outputs), "NORM": norm, "B0": False, "B1": False, "B2": False,
        "RESIDUAL": False, "KIND": "swiglu" if gated else "none",
        "ROWS": made.rows, "SPLITS": made.splits, "BLOCK_N": made.block_rows, "BLOCK_K": made.block_columns,
    }  # fmt: skip
    strides = [name for name in skinny_linear.arg_names if name.endswith("_stride")]
    found = compiled(skinny_linear, types, constants, strides, WARPS, made.stages)
    assert spilled(found) == 0 and 2 * found.metadata.shared < 227 * 1024
    return str(found.asm["ptx"])


@pytest.mark.parametrize(
    ("columns", "outputs", "gated"),
    [(2048, [2048, 512, 512], False), (8192, [2048], False), (2048, [8192], True)],
)
def test_one_row_reads_vectors(columns: int, outputs: list[int], gated: bool) -> None:
    ptx = code(1, columns, outputs, gated, norm=True)
    assert ptx.count("ld.global.v4") >= 8 and "mma" not in ptx


@pytest.mark.parametrize(
    ("rows", "columns", "outputs", "gated"),
    [(2, 2048, [512, 512], False), (32, 2048, [8192], True), (64, 2048, [512, 512], False)],
)
def test_several_rows_copy_ahead_to_tensor_cores(rows: int, columns: int, outputs: list[int], gated: bool) -> None:
    ptx = code(rows, columns, outputs, gated)
    assert "cp.async.cg.shared.global" in ptx and ("mma.sync" in ptx or "wgmma" in ptx)
