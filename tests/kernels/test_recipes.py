"""Recipes of operators on a GPU that is not there: results lie as a graph is told, and Triton's launcher agrees."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.registered import all_operators
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.profiles import profile_for
from tilewright.kernels import linear
from tilewright.kernels.by_recipe import RECIPES
from tilewright.kernels.cross_entropy import cuda as cross_entropy
from tilewright.kernels.norm import cuda as norm
from tilewright.kernels.scatter_sums import cuda as scatter_sums
from tilewright.kernels.softmax import cuda as softmax
from tilewright.launch import builder, nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.triton import LoadedKernel
from tilewright.records.recipe import Launch, Number, Recipe

pytest.importorskip("triton")
all_operators()
GPU = torch.device("cuda", 0)
FAKE = FakeTensorMode()
BF16, FP32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


@dataclass(frozen=True)
class Built:
    """A kernel of NVRTC's that was asked for; a builder checks the arguments of a launch against its signature."""

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
    cross_entropy._backward, linear.cuda._built, scatter_sums._kernel,
)  # fmt: skip


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that Triton compiles, and that NVRTC is only asked for; the fused linear layer is the faster one."""
    monkeypatch.setattr(nvrtc, "kernel", build)
    for module in (nvrtc, linear.cuda):
        monkeypatch.setattr(module, "bindings_installed", lambda: True)
    monkeypatch.setattr(linear.cuda, "kernel", build)
    monkeypatch.setattr(linear, "fastest", lambda *_: "fused")
    monkeypatch.setattr(builder, "loaded", lambda kernel: LoadedKernel(kernel.metadata.name, 1, 128, 0))
    for cache in CACHES:
        cache.cache_clear()
    yield
    for cache in CACHES:
        cache.cache_clear()


Layout = tuple[Any, ...]
"""Shape and dtype of a tensor, and its strides where it is not contiguous."""


def imaginary(layout: Layout) -> torch.Tensor:
    """A tensor on a GPU, without memory."""
    shape, dtype, *strides = layout
    dense = torch.empty(shape, device="meta").stride()
    with FAKE:
        return torch.empty_strided(shape, strides[0] if strides else dense, dtype=dtype, device=GPU)


def recipe_of(name: str, *arguments: Any, compiled: bool = True) -> Recipe | None:
    """The recipe of `tilewright::name` on an H200; a layout among the arguments is an operand."""
    operands: list[Operand] = []
    given = []
    for argument in arguments:
        if isinstance(argument, tuple):
            x = imaginary(argument)
            operands.append(Operand(len(operands), tuple(x.shape), tuple(x.stride()), x.dtype, GPU))
            argument = operands[-1]
        given.append(argument)
    with simulated(profile_for("h200"), "9.0"):
        return RECIPES[f"tilewright::{name}"](RecipeBuilder(name, operands, compiled=compiled), *given)


HALVES = ((4, 25, 96), BF16, (4800, 192, 1))
CACHE, TOKENS, ANGLES = ((2, 2, 1024, 64), BF16), ((2, 2, 3, 64), BF16), ((2, 1, 3, 32), BF16)
Q = ((2, 8, 3, 64), BF16)
PROJECTIONS = [((n, 512), BF16) for n in (512, 128, 128)]
SQUARE, EACH, NONE = ((50, 384), BF16), ((50,), FP32), ((0,), FP32)
IN_TRITON: dict[str, list[tuple[Any, ...]]] = {
    "activation": [(HALVES, "gelu"), (((100, 96), FP32, (1, 100)), "silu")],
    "activation_backward": [(((100, 96), FP32), ((100, 96), FP32, (1, 100)), "gelu")],
    "gated_activation": [(HALVES, HALVES, "silu")],
    "gated_activation_backward": [(((4, 25, 96), BF16), HALVES, HALVES, "gelu_tanh")],
    "attention_prefix": [(Q, CACHE, CACHE, ((2, 1, 3, 1), INT64, (0, 0, 0, 0)), 2, False, ((4096,), INT32), 0.125)],
    "cross_entropy": [
        (((100, 5000), BF16), ((100,), INT64), -100, 0.0, 0.0, how, False, "triton") for how in ("mean", "sum", "none")
    ],
    "dropout_add": [(*[((100, 96), BF16)] * 2, p, "gelu", 16) for p in (0.5, 1.0)],
    "dropout_add_backward": [(((100, 96), BF16, (1, 100)), None, ((2,), INT64), 0.5, "none", 16)],
    "embedding_sums": [(((4000, 96), BF16), ((4000,), INT32), ((4000,), INT64), ((51,), INT64), 50, -1)],
    "index_sums": [(((2, 60, 300), BF16), ((2, 60, 300), INT64, (60, 1, 0)), 13, True)],
    "matching_sums": [
        (*[((50, 96), BF16)] * 2, rows, ((4000,), INT32), ((4000,), INT64), ((51,), INT64))
        for rows in (None, ((50, 96), BF16))
    ],
    "norm": [(((2, 25, 1000), BF16), ((1000,), FP32), ((1000,), FP32), 1e-6, True), (HALVES, None, None, 1e-6, False)],
    "add_norm": [(((9, 384), BF16, (400, 1)), ((9, 384), BF16), ((384,), BF16), None, 1e-6, False)],
    "norm_backward": [
        (SQUARE, SQUARE, SQUARE, ((384,), FP32), True, EACH, EACH, True),
        (*[((50, 5001), BF16)] * 2, None, None, False, NONE, EACH, False),
    ],
    "row_extremes": [
        (((4000, 96), BF16), ((4000,), INT32), ((4000,), INT64), ((51,), INT64), 50, largest, 0.0, largest)
        for largest in (True, False)
    ],
    "skinny_linear": [
        (((1, 512), BF16), ((512,), BF16), 1e-6, *PROJECTIONS, None, None, None, None, "none", None),
        (((32, 2048), BF16), None, 0.0, *[((5632, 2048), BF16)] * 2, *[None] * 5, "swiglu", ((4096,), INT32)),
    ],
    "softmax": [(((7, 1000), BF16, (1008, 1)), True), (((20, 30), FP32, (1, 20)), False)],
    "softmax_backward": [
        (*[((7, 700000), BF16)] * 2, True),
        (((50, 1000), BF16, (2000, 1)), ((50, 1000), BF16), False),
    ],
    "weighted_sum": [(((100, 1000), BF16, (1008, 1)), ((1000,), BF16))],
    "weighted_sum_backward": [(((100,), BF16, (0,)), ((100, 1000), BF16, (1008, 1)), ((1000,), BF16), False, True)],
    "write_cache_": [
        (CACHE, CACHE, TOKENS, TOKENS, ((3,), INT64), Q, ANGLES, ANGLES),
        (CACHE, CACHE, TOKENS, TOKENS, ((3,), INT64), None, None, None),
    ],
}
"""Calls whose recipes launch Triton's kernels; what those compute is seen in Triton's interpreter."""
NORMED = ((50, 2000), BF16), ((2000,), BF16)
WIDE = ((50, 1536), BF16)
LOGITS, LINEAR = (((100, 5000), BF16), ((100,), INT64)), (((300, 64), BF16), ((520, 64), BF16))
IN_CUDA: dict[str, list[tuple[Any, ...]]] = {
    "softmax": [(((2, 25, 9000), BF16), True), (((20, 5000), FP32, (1, 20)), False)],
    "softmax_backward": [(((50, 9000), BF16, (18000, 1)), ((50, 9000), BF16), False)],
    "cross_entropy": [(*LOGITS, -100, 0.1, 1e-4, how, how != "none", "auto") for how in ("mean", "none")],
    "cross_entropy_backward": [
        (((100,), FP32, (0,)), *LOGITS, ((2, 100), FP32), ((), FP32), -100, 0.1, 1e-4, 8, "auto")
    ],
    "linear_gelu": [(((300, 64), BF16, (1, 300)), LINEAR[1], ((520,), BF16), "tanh", True)],
    "norm": [(*NORMED, NORMED[1], 1e-5, True)],
    "add_norm": [(((3, 5000), BF16, (6000, 1)), ((3, 5000), BF16), None, None, 1e-6, False)],
    "norm_backward": [
        (WIDE, WIDE, WIDE, ((1536,), FP32), True, EACH, EACH, True),
        (*[((50, 5000), BF16)] * 2, None, None, False, EACH, EACH, False),
    ],
    "scale_gradient_": [(((100, 50), BF16), ((), FP32))],
    "scatter_sums": [
        (((96, 512, 300), BF16), ((96, 512, 300), INT64, (0, 300, 1)), 512),
        (((6, 512, 300), BF16, (153600, 1, 512)), ((6, 512, 300), INT32, (0, 300, 1)), 77),
        (((2, 3, 40), FP32), ((2, 3, 40), INT64, (40, 80, 1)), 9),
    ],
}
"""Calls whose recipes launch kernels in CUDA C++; what those compute is seen on a GPU."""
CALLS = [(name, arguments) for calls in (IN_TRITON, IN_CUDA) for name in calls for arguments in calls[name]]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda number: f"{CALLS[number][0]} {number}")
def test_results_lie_as_a_graph_is_told(number: int) -> None:
    """Else a compiled graph would not take the recipe; Triton's own launcher is given the same."""
    name, arguments = CALLS[number]
    recipe = recipe_of(name, *arguments)
    assert recipe is not None and any(isinstance(action, Launch) for action in recipe.actions)
    metas = [imaginary(argument) if isinstance(argument, tuple) else argument for argument in arguments]
    with FAKE:
        told = getattr(torch.ops.tilewright, name).default(*metas)
    results = [told] if isinstance(told, torch.Tensor) else [*(told or ())]
    layouts = [recipe.buffers[number] for number in recipe.results]
    assert [(x.shape, x.strides, x.dtype) for x in layouts] == [(x.shape, x.stride(), x.dtype) for x in results]
    if arguments in IN_TRITON.get(name, ()):
        assert_given_alike(recipe, recipe_of(name, *arguments, compiled=False))


def assert_given_alike(one: Recipe, other: Recipe | None) -> None:
    """Beside constants and what is absent, which a compiled kernel lacks, and its two areas."""
    assert other is not None
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


@pytest.mark.parametrize("source, extent", [(((4, 40), BF16), scatter_sums.MOST + 1), (((4, 40), torch.float64), 9)])
def test_sums_that_no_kernel_takes_have_no_recipe(source: Layout, extent: int) -> None:
    assert recipe_of("scatter_sums", source, ((4, 40), INT64), extent) is None
