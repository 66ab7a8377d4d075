"""The Triton emitter: its text, widths of integers, approximations, and its machine code for an H200."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.emit import machine_code
from tests.emit.triton_programs import golden, nests_of
from tests.golden import check
from tests.passes.graphs import aten
from tilewright.emit.narrow_integers import ranges_of
from tilewright.emit.triton import emit_triton
from tilewright.hardware.target import target_named
from tilewright.loops.nest import Nest
from tilewright.passes.fusion import fuse
from tilewright.schedule.choose import schedule_of
from tilewright.schedule.tiles import Limits

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", golden())
def test_source_is_as_written_down(name: str) -> None:
    function, inputs = golden()[name]
    sources = [emit_triton(lowered.nest) for lowered in nests_of(function, *inputs)]
    check(HERE / "golden" / f"{name}.txt", "\n\n".join(sources))


@pytest.mark.parametrize("function", [F.gelu, lambda x: x.softmax(-1)], ids=["flat", "rows"])
def test_one_kernel_serves_any_number_of_rows(function: Callable[..., Any]) -> None:
    sources = {emit_triton(nests_of(function, torch.empty(rows, 1000, device="meta"))[0].nest) for rows in (64, 4096)}
    assert len(sources) == 1


def test_positions_beyond_32_bits_are_counted_in_64() -> None:
    wide, narrow = (
        emit_triton(nests_of(lambda x: x.sum(-1), torch.empty(n, 1000, device="meta"))[0].nest) for n in (2**22, 2**20)
    )
    assert "row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS" in wide
    assert "col = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)" in wide
    assert "int64" not in narrow


def test_as_many_tiles_are_on_their_way_as_shared_memory_holds() -> None:
    function, inputs = golden(4096, 2048)["layer_norm_backward"]
    (lowered,) = nests_of(function, *inputs)
    # Two operands of bf16, in tiles of two rows.
    tile_bytes = 2 * 2 * 2 * 2048
    for budget in (0, tile_bytes - 1, tile_bytes, 2 * tile_bytes - 1, 2 * tile_bytes, 100 * tile_bytes):
        ahead = schedule_of(lowered.nest, Limits(shared_bytes=budget)).stages
        assert ahead >= 1 and (ahead - 1) * tile_bytes <= budget
        assert ahead > 1 or budget < tile_bytes


def test_every_operators_kernels_compile() -> None:
    """The interpreter takes kernels that the compiler does not: a loop whose values change their shape."""
    found = machine_code.errors()
    assert len(found) > 400 and [error for error in found if error] == []


def test_every_architecture_has_its_machine_code() -> None:
    """Compiled for GPUs of two makers that are not there, and never run."""
    found = machine_code.kernels_of_architectures(machine_code.golden_nests(1000))
    assert sorted(found.values()) == [1, 1, 1, 2, 2, 2]


def test_no_kernel_spills_on_an_h200() -> None:
    """Six nests over rows that fit a program, and rows that some do not hold."""
    nests = [nest for columns in (1000, 16384) for nest in machine_code.golden_nests(columns)]
    kernels = [kernel for nest in nests for kernel in machine_code.compiled(nest).items()]
    assert len(kernels) >= 2 * 7
    assert [kernel for kernel in kernels if kernel[1]["spilled"]] == []


def test_windows_in_rows_do_not_spill_on_an_h200() -> None:
    """A warp's rows would be 32 elements of a thread, with 25 loads each."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.ops.tilewright.depthwise_convolution(x, weight, [1, 1], [2, 2], [1, 1])
        return F.hardswish(y).mean((2, 3))

    operands = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 960, 7, 7), (960, 1, 5, 5)))
    (found,) = machine_code.compiled(nest_of(program, *operands)).values()
    assert found["spilled"] == 0


def test_several_results_of_double_sums_compile_for_an_h200() -> None:
    """Triton 3.6 fails on the second kernel of an instance norm's moments if it stores all three at its end."""
    names = [name for nest in machine_code.moments_of_images() for name in machine_code.compiled(nest)]
    assert any(name.endswith("_after") for name in names)


@pytest.mark.parametrize("columns", [64, 200, 256, 512])
def test_warps_keep_the_rows_of_narrow_gradients(columns: int) -> None:
    """Weights loaded as one row of all warps would spread every row over them, through shared memory for each tile."""
    assert machine_code.conversions(columns) == 0


def nest_of(function: Callable[..., Any], *inputs: torch.Tensor) -> Nest:
    return fuse(aten(function, *inputs), "forward", target_named("h200")).regions[-1].lowered.nest


def test_places_of_a_pool_take_32_bits() -> None:
    text = emit_triton(nest_of(lambda x: F.avg_pool2d(x, 3, 2, 1), torch.randn(2, 3, 9, 9)))
    assert "int64" not in text


def test_what_may_overflow_takes_64() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        i = torch.arange(70_000)
        return x + i * i

    nest = nest_of(program, torch.zeros(70_000, dtype=torch.int64))
    ranges = ranges_of(nest)
    assert (0, 69_999**2) in [ranges[i] for i, step in enumerate(nest.steps) if step.name == "mul" and i in ranges]
    text = emit_triton(nest)
    assert ".to(tl.int64) * " in text


def test_indices_from_memory_take_the_bits_of_memory() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int64) + 1

    assert "tl.int32" in emit_triton(nest_of(program, torch.zeros(600, dtype=torch.int16)))
    wide = nest_of(lambda x: x + 1, torch.zeros(600, dtype=torch.int64))
    assert not [i for i in ranges_of(wide) if wide.steps[i].name in ("load", "add")]


def source(function: Callable[..., Any], dtype: torch.dtype) -> str:
    (region,) = fuse(aten(function, torch.randn(64, 96).to(dtype)), "forward", target_named("h200")).regions
    return emit_triton(region.lowered.nest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_silu_of_16_bits_takes_the_hardwares_functions(dtype: torch.dtype) -> None:
    text = source(lambda x: F.silu(x), dtype)
    assert "tw.exp_approximate(" in text and " / " in text and "div_rn" not in text


@pytest.mark.parametrize(("function", "name"), [(F.elu, "expm1"), (F.softplus, "log1p")])
def test_an_activation_of_16_bits_takes_no_function_of_libdevice(function: Callable[..., Any], name: str) -> None:
    assert f"tw.{name}_approximate(" in source(lambda x: function(x), torch.bfloat16)
    assert f"libdevice.{name}(" in source(lambda x: function(x), torch.float32)


def test_an_fp32_softmax_that_is_only_rounded_takes_them_too() -> None:
    text = source(lambda x: (2 * F.softmax(x.float(), -1)).to(x.dtype), torch.bfloat16)
    assert "tw.exp_approximate(" in text and "div_rn" not in text and "float64" not in text


def test_exponentials_of_a_shifted_sum_in_a_logarithm_take_them_too() -> None:
    def shifted(x: Tensor) -> Tensor:
        return (x - x.amax(-1, keepdim=True)).exp()

    text = source(lambda x: shifted(x).sum(-1, keepdim=True).log(), torch.float32)
    assert "tw.exp_approximate(" in text and "float64" not in text
    others: list[Callable[[Tensor], Tensor]] = [
        lambda x: shifted(x).sum(-1),
        lambda x: x.exp().sum(-1).log(),
        lambda x: (total := shifted(x).sum(-1)).log() + total,
        lambda x: ((x - x.amax()).exp()).sum(-1).log(),
        lambda x: (x - x.amin(-1, keepdim=True)).exp().sum(-1, keepdim=True).log(),
    ]
    for function in others:
        regions = fuse(aten(function, torch.randn(64, 96)), "forward", target_named("h200")).regions
        text = "".join(emit_triton(region.lowered.nest) for region in regions)
        assert "tw.exp(" in text and "approximate" not in text


@pytest.mark.parametrize(("divisor", "factor"), [(2.0, 0.5), (-0.25, -4.0), (1.0, 1.0), (3.0, 0.3333333432674408)])
def test_a_division_of_elements_by_a_number_is_a_product(divisor: float, factor: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        text = source(lambda x: x / divisor, dtype)
        assert (f"* {factor}" in text or divisor == 1.0) and "div_rn" not in text and " / " not in text


def test_only_where_eager_multiplies_by_a_reciprocal_a_quotient_is_a_product() -> None:
    """Its kernels for GPUs do so where a call divides by a number, not where a formula has one."""
    assert "tw.mean(" in source(lambda x: x.mean(-1), torch.float32)
    assert "* 0.010416666977107525" in source(lambda x: x.amax(-1) / 96, torch.float32)
    assert "* 0.1666666716337204" in source(lambda x: F.hardswish(x), torch.float32)
    backward = source(lambda x: torch.ops.aten.hardswish_backward(x, x), torch.float32)
    assert "tl.div_rn(" in backward and ", 3.0)" in backward
    assert ", 0.7)" in source(lambda x: F.softplus(x, 0.7), torch.float32)


@pytest.mark.parametrize("name", ["exp", "tanh", "sigmoid"])
def test_what_is_compared_is_computed_by_eagers_functions(name: str) -> None:
    for function in (lambda x: getattr(x, name)() > 0.5, lambda x: getattr(x, name)().floor()):
        assert "libdevice." in source(function, torch.float32)
    assert "libdevice." not in source(lambda x: getattr(x, name)() + 0.5, torch.float32)


@pytest.mark.parametrize(
    ("function", "dtype", "compared"),
    [
        (lambda x: F.silu(x), torch.float32, False),
        (lambda x: F.silu(x.float()), torch.bfloat16, False),
        (lambda x: F.silu(x) > 0.5, torch.bfloat16, True),
        (lambda x: F.silu(x) + F.silu(x.float()), torch.bfloat16, False),
        (lambda x: (F.silu(x.float()) - 1).to(x.dtype), torch.bfloat16, False),
    ],
    ids=["fp32", "widened", "compared", "shared", "subtracted"],
)
def test_other_results_are_accurate(function: Callable[..., Any], dtype: torch.dtype, compared: bool) -> None:
    text = source(function, dtype)
    exponential = "libdevice.exp(" if compared else "tw.exp("
    assert "approximate" not in text and exponential in text and "tl.div_rn(" in text


def test_tiles_with_repeated_elements_are_not_copied_ahead() -> None:
    """One number for 16 neighbouring columns, as in the gradient of a group norm, beside one for each column."""

    def program(x: torch.Tensor, of_groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * of_groups
        return y, y.sum((0, 1))

    x = torch.randn(64, 4096, 8, 16)
    for given, ahead in ((torch.randn(64, 1, 8, 1), 1), (torch.randn(64, 1, 8, 16), 3)):
        (lowered,) = nests_of(program, x, given)
        assert schedule_of(lowered.nest).stages == ahead


@pytest.mark.parametrize(("rows", "kernels"), [(2, 1), (129, 1), (256, 1), (257, 2), (4096, 2)])
def test_sums_of_few_rows_are_one_kernel(rows: int, kernels: int) -> None:
    """A program takes all rows of some columns; of more rows programs take strips, whose sums a second kernel adds."""
    (lowered,) = nests_of(lambda x: x.sum(0), torch.randn(rows, 1000))
    chosen = schedule_of(lowered.nest)
    assert 1 + (chosen.combination is not None) == kernels == emit_triton(lowered.nest).count("@triton.jit")
    across, taken = -(-1000 // chosen.cols.tile), chosen.rows.owned
    assert taken >= rows and chosen.programs == across if kernels == 1 else chosen.programs > across


def test_a_long_softmax_passes_over_its_rows_twice() -> None:
    (lowered,) = nests_of(lambda x: x.softmax(-1), torch.empty(256, 40000, device="meta"))
    assert emit_triton(lowered.nest).count("for start in range(") == 2


def test_channels_of_a_long_row_are_numbers_of_its_loop() -> None:
    function = lambda x, w: (y := x * w) - y.mean((1, 2), keepdim=True)  # noqa: E731
    given = torch.empty(256, 3, 8100, device="meta"), torch.empty(3, 1, device="meta")
    (lowered,) = nests_of(function, *given)
    text = emit_triton(lowered.nest)
    assert "tl.load(w_1_ptr + col0)" in text.replace(", mask=row_ok", "") and "// 8100" not in text


@pytest.mark.parametrize(("rows", "masked"), [(4096, 0), (4097, 1)])
def test_rows_are_masked_only_if_a_tile_has_more(rows: int, masked: int) -> None:
    (lowered,) = nests_of(lambda x: x.softmax(-1), torch.empty(rows, 512, device="meta"))
    assert schedule_of(lowered.nest).masks_rows == bool(masked)


def test_a_buffer_may_be_named_as_a_function() -> None:
    graph = aten(lambda x: x - x.sum(-1, keepdim=True) / 768, torch.randn(40, 768))
    next(iter(graph.nodes))._rename("mean")
    text = emit_triton(fuse(graph, "forward", target_named("h200")).regions[-1].lowered.nest)
    assert "mean_2of3" in text and "tw.mean(" in text and "tw.mean_" not in text


@pytest.mark.parametrize("function", [lambda x, y: x.softmax(-1) * y, lambda x, y: x * y, lambda x, y: (x * y).sum(0)])
def test_no_value_hides_a_parameter(function: Callable[..., Any]) -> None:
    for name in parameters_and_values(function, "y")[0]:
        parameters, values = parameters_and_values(function, name)
        assert not parameters & values, name


def parameters_and_values(function: Callable[..., Any], name: str) -> tuple[set[str], set[str]]:
    """Of all kernels for a function of `x` and a second input of that name."""
    graph = aten(function, *torch.empty(2, 4096, 512, device="meta"))
    for node, called in zip(graph.nodes, ("x", name), strict=False):
        node._rename(called)
    parameters, values = set[str](), set[str]()
    for region in fuse(graph, "forward", target_named("h200")).regions:
        for part in ast.walk(ast.parse(emit_triton(region.lowered.nest))):
            parameters |= {part.arg} if isinstance(part, ast.arg) else set()
            values |= {part.id} if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) else set()
    return parameters, values
