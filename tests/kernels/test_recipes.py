"""What the recipes of operators launch: each argument by the tensor it is or its value, on a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels.registered import all_operators
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.profiles import profile_for
from tilewright.kernels import linear
from tilewright.kernels.by_recipe import RECIPES
from tilewright.kernels.cross_entropy import cuda as cross_entropy
from tilewright.kernels.dropout_add.generator import threshold
from tilewright.kernels.linear_cross_entropy import chunks
from tilewright.kernels.norm import cuda as norm
from tilewright.kernels.softmax import cuda as softmax
from tilewright.launch import builder, nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.triton import LoadedKernel
from tilewright.records.recipe import Copy, Fill, Launch, Number, Offset, Pointer, Recipe, Seed, Structure, TensorMap

pytest.importorskip("triton")
all_operators()
GPU = torch.device("cuda", 0)
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
Layout = tuple[tuple[int, ...], torch.dtype]
SUMS = ("mean", "sum", "none")


@dataclass(frozen=True)
class Built:
    """A kernel of NVRTC's that was asked for."""

    entry: str
    signature: str
    threads: int
    shared_bytes: int = 0
    function: int = 1

    def programs_at_once(self) -> int:
        return 264


def build(_: object, entry: str, signature: str, *, threads: int, shared_bytes: int = 0, **options: Any) -> Built:
    return Built(entry, signature, threads, shared_bytes)


CACHES = (
    softmax._kernel, norm._kernel, cross_entropy._forward, cross_entropy._finish,
    cross_entropy._backward, linear.cuda._built,
)  # fmt: skip


def forget() -> None:
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 for which Triton compiles, and NVRTC is only asked."""
    monkeypatch.setattr(nvrtc, "kernel", build)
    for module in (nvrtc, linear.cuda):
        monkeypatch.setattr(module, "bindings_installed", lambda: True)
    monkeypatch.setattr(linear.cuda, "kernel", build)
    monkeypatch.setattr(builder, "loaded", lambda kernel: LoadedKernel(kernel.metadata.name, 1, 128, 0))
    forget()
    with simulated(profile_for("h200"), "9.0"):
        yield
    forget()


def operand(number: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] = (), at: int = 0) -> Operand:
    dense = [1]
    for size in reversed(shape[1:]):
        dense.insert(0, dense[0] * size)
    return Operand(number, tuple(shape), tuple(strides or dense[: len(shape)]), dtype, GPU, at)


def recipe_of(name: str, *arguments: Any, compiled: bool = True) -> Recipe:
    """The recipe of `tilewright::name`; a layout among the arguments is an operand."""
    operands: list[Operand] = []
    given = []
    for argument in arguments:
        if isinstance(argument, tuple):
            operands.append(operand(len(operands), *argument))
            argument = operands[-1]
        given.append(argument)
    made = RECIPES[f"tilewright::{name}"](RecipeBuilder(name, operands, compiled=compiled), *given)
    assert made is not None
    return made


def told(recipe: Recipe) -> list[tuple[Any, ...]]:
    """Each launch: the kernel, the grid, and of each argument the tensor's number (with its offset), or its letter and
    value; None is a null pointer."""
    found: list[tuple[Any, ...]] = []
    for action in recipe.actions:
        if isinstance(action, Launch):
            name = getattr(action.kernel, "entry", None) or getattr(action.kernel, "name", None)
            found.append((name, action.grid, [_told(argument) for argument in action.arguments]))
        else:
            found.append((action,))
    return found


def _told(argument: Any) -> Any:
    match argument:
        case Pointer(tensor, 0):
            return tensor
        case Pointer(tensor, offset):
            return tensor, offset
        case Number("P", 0):
            return None
        case Number(letter, value):
            return letter, value
        case Seed():
            return "seed"
        case Offset():
            return "offset"
    return argument


def shapes(recipe: Recipe) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(recipe.buffers[number].shape, recipe.buffers[number].dtype) for number in recipe.results]


def test_softmax_by_cuda() -> None:
    recipe = recipe_of("softmax", ((2, 25, 1000), BF16), True, "auto")
    assert shapes(recipe) == [((2, 25, 1000), BF16)]
    assert told(recipe) == [("forward", (50, 1, 1), [0, 1, ("q", 50), ("i", 1000), ("q", 1000), ("q", 1000)])]
    recipe = recipe_of("softmax_backward", ((50, 1000), BF16, (2000, 1)), ((50, 1000), BF16), False, "auto")
    sizes = [("q", 50), ("i", 1000), ("q", 2000), ("q", 1000), ("q", 1000)]
    assert told(recipe) == [("backward", (50, 1, 1), [0, 1, 2, *sizes])]


def test_rows_that_lie_apart_are_copied() -> None:
    recipe = recipe_of("softmax", ((20, 30), FP32, (1, 20)), False, "auto")
    copy, (entry, _, arguments) = told(recipe)
    # 0: x, 1: the result, 2: the copy.
    assert copy == (Copy(2, 0),)
    assert (entry, arguments) == ("forward", [2, 1, ("q", 20), ("i", 30), ("q", 30), ("q", 30)])
    assert recipe.buffers[1].shape == (20, 30) and recipe.results == (0,)


def test_cross_entropy_by_cuda() -> None:
    options = (-100, 0.1, 1e-4)
    recipe = recipe_of("cross_entropy", ((100, 5000), BF16), ((100,), INT64), *options, "mean", True, "auto")
    assert shapes(recipe) == [((), FP32), ((2, 100), FP32), ((), FP32)]
    # 2: statistics, 3: sums of blocks, 4: loss, 5: weight.
    numbers = [("q", 100), ("i", 5000), ("q", 5000), ("q", -100), ("f", 0.1), ("f", 1e-4)]
    assert told(recipe) == [
        ("forward", (13, 1, 1), [0, 1, None, 2, 3, *numbers]), ("finish", (1, 1, 1), [3, ("i", 13), 4, 5, ("i", 1)])
    ]  # fmt: skip
    assert recipe.results == (2, 0, 3)
    recipe = recipe_of("cross_entropy", ((100, 5000), BF16), ((100,), INT64), *options, "none", False, "auto")
    assert shapes(recipe)[0] == ((100,), BF16) and told(recipe)[0][2][:5] == [0, 1, 3, 2, 4]
    # Operands: gradient, logits, target, statistics, weight; 5: the result.
    given = ((100,), FP32, (0,)), ((100, 5000), BF16), ((100,), INT64), ((2, 100), FP32), ((), FP32)
    recipe = recipe_of("cross_entropy_backward", *given, *options, 8, "auto")
    fill, (entry, _, arguments) = told(recipe)
    assert isinstance(fill[0], Fill) and (fill[0].target, fill[0].value, fill[0].offset) == (5, 0, 5000)
    assert fill[0].part is not None and (fill[0].part.shape, fill[0].part.strides) == ((100, 8), (5008, 1))
    assert (entry, arguments[:6]) == ("backward", [1, 2, 3, 0, 4, 5])
    pieces = arguments[8]
    strides = [("q", 5000), ("q", 5008), ("q", 0)]
    assert arguments[6:] == [("q", 100), ("i", 5000), pieces, *strides, ("q", -100), ("f", 0.1), ("f", 1e-4)]
    assert pieces[0] == "i" and shapes(recipe) == [((100, 5008), BF16)]


def test_the_parts_of_linear_cross_entropy() -> None:
    """They write to their operands: the logits, a gradient."""
    logits, target, applied = operand(0, (100, 5000), BF16), operand(1, (100,), INT64), operand(2, (), FP32)
    call = RecipeBuilder("linear_cross_entropy", (logits, target, applied), compiled=True)
    recipe = chunks.in_place(call, logits, target, applied, -100, 0.1, 1e-4, True)
    assert recipe is not None and shapes(recipe) == [((), FP32)]
    # 0: logits, 1: target, 2: the factor, 3: statistics, 4: sums of blocks, 5: loss, 6: what a row counts.
    forward, finish, backward = told(recipe)
    assert [call[0] for call in (forward, finish, backward)] == ["forward", "finish", "backward"]
    assert (forward[2][:5], finish[2]) == ([0, 1, None, 3, 4], [4, ("i", 13), 5, 6, ("i", 0)])
    assert backward[2][:6] == [0, 1, 3, 2, 6, 0]
    recipe = recipe_of("scale_gradient_", ((100, 50), BF16), ((), FP32))
    assert told(recipe) == [("_scale", (2, 1, 1), [0, 1, ("i", 5000), None, None])] and recipe.results == ()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linear layer's kernel is the faster one."""
    monkeypatch.setattr(linear.choice, "fastest", lambda *_: "fused")


def test_the_linear_layer_by_cuda(fused: None) -> None:
    recipe = recipe_of("linear_gelu", ((300, 64), BF16, (1, 300)), ((520, 64), BF16), ((520,), BF16), "tanh", True)
    assert shapes(recipe) == [((300, 520), BF16)] * 2
    # 0: x, 1: weight, 2: bias, 3: the copy of x, 4: y, 5: the value before the GELU.
    copy, (entry, grid, (x_map, weight_map, structure)) = told(recipe)
    assert (copy, entry, grid) == ((Copy(3, 0),), "linear_epilogue", (12, 1, 1))
    assert x_map == TensorMap(3, 9, (64, 300), (128,), (64, 128), 3, 3)
    assert weight_map == TensorMap(1, 9, (64, 520), (128,), (64, 128), 3, 3)
    problem = linear.cuda.Problem.from_buffer_copy(structure.data)
    assert (problem.m, problem.n, problem.k) == (300, 520, 64)
    assert patched(structure) == {"y": 4, "pre": 5, "bias": 2}


def test_the_linear_layer_with_dropout_by_cuda(fused: None) -> None:
    operands = ((300, 64), BF16), ((520, 64), BF16), None, ((300, 520), BF16)
    recipe = recipe_of("linear_dropout_add", *operands, 0.25)
    assert shapes(recipe) == [((300, 520), BF16), ((2,), INT64)] and recipe.advance == 4
    # 0: x, 1: weight, 2: residual, 3: seed and offset, 4: y.
    structure = told(recipe)[0][2][2]
    draw = linear.cuda.Problem.from_buffer_copy(structure.data).draw
    # Eager's launch has 610 blocks; a row is 65 of its threads.
    counts = draw.captured, draw.threads, draw.row_turn, draw.row_thread
    assert (draw.limit, *counts) == (threshold(0.25) - 1, 0, 610 * 256, 0, 65)
    assert patched(structure) == {"y": 4, "residual": 2, "state": 3, "seed": "seed", "offset": "offset"}
    # In a CUDA graph that is being captured, seed and offset are an operand.
    given = [operand(i, *x) for i, x in enumerate(x for x in (*operands, ((2,), INT64)) if x)]
    x, weight, residual, state = given
    call = RecipeBuilder("linear_dropout_add", given, compiled=True)
    recipe = linear.dropout_add_recipe(call, x, weight, None, residual, 0.25, state)
    structure = told(recipe)[0][2][2]
    assert linear.cuda.Problem.from_buffer_copy(structure.data).draw.captured == 1
    assert patched(structure) == {"y": 4, "residual": 2, "state": 3} and len(recipe.results) == 1
    recipe = recipe_of("linear_dropout_add", *operands, 0.0)
    assert recipe.advance == 0 and patched(told(recipe)[0][2][2]) == {"y": 4, "residual": 2}


def patched(structure: Structure) -> dict[str, Any]:
    """By field of the linear layer's structure."""
    problem, draw = linear.cuda.Problem, linear.cuda.Draw
    fields = {getattr(problem, name).offset: name for name, _ in problem._fields_ if name != "draw"}
    fields |= {problem.draw.offset + getattr(draw, name).offset: name for name, _ in draw._fields_}
    return {fields[at]: _told(patch) for at, patch in structure.patches}


HALVES = ((4, 25, 96), BF16, (4800, 192, 1))
CACHE, TOKENS, ANGLES = ((2, 2, 1024, 64), BF16), ((2, 2, 3, 64), BF16), ((2, 1, 3, 32), BF16)
Q = ((2, 8, 3, 64), BF16)
PROJECTIONS = [((n, 512), BF16) for n in (512, 128, 128)]
IN_TRITON: dict[str, list[tuple[Any, ...]]] = {
    "activation": [(HALVES, "gelu"), (((100, 96), FP32, (1, 100)), "silu")],
    "activation_backward": [(((100, 96), FP32), ((100, 96), FP32, (1, 100)), "gelu")],
    "gated_activation": [(HALVES, HALVES, "silu")],
    "gated_activation_backward": [(((4, 25, 96), BF16), HALVES, HALVES, "gelu_tanh")],
    "attention_prefix": [
        (Q, CACHE, CACHE, ((2, 1, 3, 1), INT64, (0, 0, 0, 0)), 2, False, ((4096,), torch.int32), 0.125)
    ],
    "cross_entropy": [(((100, 5000), BF16), ((100,), INT64), -100, 0.0, 0.0, how, False, "triton") for how in SUMS],
    "dropout_add": [(*[((100, 96), BF16)] * 2, p, "gelu", 16) for p in (0.5, 1.0)],
    "dropout_add_backward": [(((100, 96), BF16, (1, 100)), None, ((2,), INT64), 0.5, "none", 16)],
    "embedding_sums": [(((4000, 96), BF16), ((4000,), torch.int32), ((4000,), INT64), 50, -1)],
    "index_sums": [(((2, 60, 300), BF16), ((2, 60, 300), INT64, (60, 1, 0)), 13, True)],
    "norm": [(((50, 32), BF16, (40, 1)), ((32,), BF16), None, 1e-6, False)],
    "skinny_linear": [
        (((1, 512), BF16), ((512,), BF16), 1e-6, *PROJECTIONS, None, None, None, None, "none", None),
        (((32, 2048), BF16), None, 0.0, *[((5632, 2048), BF16)] * 2, *[None] * 5, "swiglu", ((4096,), torch.int32)),
    ],
    "softmax": [(((7, 1000), BF16, (1008, 1)), True, "triton")],
    "softmax_backward": [(*[((7, 70000), BF16)] * 2, True, "triton")],
    "weighted_sum": [(((100, 1000), BF16, (1008, 1)), ((1000,), BF16))],
    "weighted_sum_backward": [(((100,), BF16, (0,)), ((100, 1000), BF16, (1008, 1)), ((1000,), BF16), False, True)],
    "write_cache_": [
        (CACHE, CACHE, TOKENS, TOKENS, ((3,), INT64), Q, ANGLES, ANGLES),
        (CACHE, CACHE, TOKENS, TOKENS, ((3,), INT64), None, None, None),
    ],
}
"""Calls whose recipes launch Triton's kernels; what those compute is seen in Triton's interpreter."""


@pytest.mark.parametrize("name", IN_TRITON)
def test_triton_is_given_the_same_by_its_own_launcher(name: str) -> None:
    """Beside constants and what is absent, which a compiled kernel lacks, and its two areas."""
    for arguments in IN_TRITON[name]:
        one, other = (recipe_of(name, *arguments, compiled=compiled) for compiled in (True, False))
        assert (one.results, one.buffers, one.advance) == (other.results, other.buffers, other.advance)
        pairs = [pair for pair in zip(one.actions, other.actions, strict=True) if isinstance(pair[0], Launch)]
        assert pairs
        for mine, theirs in pairs:
            assert isinstance(mine, Launch) and isinstance(theirs, Launch) and mine.grid == theirs.grid
            names = theirs.kernel.kernel.arg_names
            assert set(names[len(theirs.arguments) :]) <= set(theirs.kernel.options)
            parameters = zip(theirs.arguments, theirs.kernel.kernel.params, strict=False)
            given = [_value(a) for a, p in parameters if not p.is_constexpr and a != Number("P", 0)]
            assert [_value(a) for a in mine.arguments[:-2]] == given


def _value(argument: Any) -> Any:
    return argument.value if isinstance(argument, Number) else argument


def test_norms_by_cuda() -> None:
    x, weights = ((50, 1000), BF16), ((1000,), BF16)
    recipe = recipe_of("norm", x, weights, weights, 1e-5, True)
    assert shapes(recipe) == [((50, 1000), BF16), ((50,), FP32), ((50,), FP32)]
    # 0: x, 1: weight, 2: bias, 3: y, 4: mean, 5: rstd.
    numbers = [("q", 50), ("i", 1000), ("q", 1000), ("q", 0), ("f", 1e-5)]
    ((entry, _, arguments),) = told(recipe)
    assert (entry, arguments) == ("norm_registers", [0, None, 3, None, 1, 2, 4, 5, *numbers])
    recipe = recipe_of("add_norm", ((3, 5000), BF16, (6000, 1)), ((3, 5000), BF16), None, None, 1e-6, False)
    assert shapes(recipe) == [((3, 5000), BF16), ((3, 5000), BF16), ((0,), FP32), ((3,), FP32)]
    # 0: x, 1: residual, 2: y, 3: total, 4: no means, 5: rstd.
    ((entry, _, arguments),) = told(recipe)
    numbers = [("q", 3), ("i", 5000), ("q", 6000), ("q", 5000), ("f", 1e-6)]
    assert (entry, arguments) == ("norm_registers", [0, 1, 2, 3, None, None, None, 5, *numbers])


@pytest.mark.parametrize("columns, entry", [(384, "norm_backward_short"), (5000, "norm_backward_tma")])
def test_the_backward_of_norms_by_cuda(columns: int, entry: str) -> None:
    matrix, weight, each = ((50, columns), BF16), ((columns,), FP32), ((50,), FP32)
    recipe = recipe_of("norm_backward", matrix, matrix, matrix, weight, True, each, each, True)
    assert shapes(recipe) == [((50, columns), BF16), ((columns,), FP32), ((columns,), FP32)]
    first, (name, _, arguments) = told(recipe)
    # 0: dy, 1: x, 2: dsum, 3: weight, 4: mean, 5: rstd, 6: dx, 7 and 8: gradients of weight and bias, 9: partial sums.
    sizes = [("q", 50), ("i", columns), *[("q", columns)] * 3]
    assert (first[0], first[2]) == (entry, [1, 0, 2, 6, 3, 4, 5, 9, *sizes])
    programs = arguments[3]
    assert (name, arguments) == ("column_sums", [9, 7, 8, programs, ("i", columns), None, None])
    assert recipe.buffers[3].shape == (2, programs[1], columns)
