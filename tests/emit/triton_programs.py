"""Programs for the Triton emitter, and how to run them: in its interpreter on the CPU, or on a GPU.

`PROGRAMS` cover every form a kernel takes, on shapes that hurt. `GOLDEN` are the nests whose source
is held as text and whose machine code is inspected.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.test_nests import rotary, rotary_backward
from tests.operators.samples import CALLS, VIEWS, combinations
from tests.operators.test_table import Program as Table
from tilewright.emit.triton import emit_triton
from tilewright.hardware.target import target_named
from tilewright.kernels.dropout_add.philox import keep_philox
from tilewright.launch.generated import TritonKernel, compile_together
from tilewright.loops.lower import Lowered
from tilewright.measure.truth.conditioning import other_results
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.reference import reference_run
from tilewright.passes.fusion import Region, fuse
from tilewright.passes.schedule import schedule
from tilewright.records.measurement import Verified
from tilewright.schedule.schedule import Schedule

aten = torch.ops.aten
Function = Callable[..., Any]
BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Program:
    """A function and how to draw its inputs from a generator."""

    function: Function
    draw: Callable[[torch.Generator], Sequence[torch.Tensor]]

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Always the same tensors."""
        return [placed(tensor, device) for tensor in self.draw(torch.Generator().manual_seed(3))]


def placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on another device with its strides, gaps and overlaps."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    storage = tensor.as_strided((span,), (1,)).to(device)
    return storage.as_strided(tensor.shape, tensor.stride())


def program(function: Function, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Program:
    """Normal inputs of these shapes."""
    return Program(function, lambda g: [torch.randn(s, generator=g, dtype=FP64).to(dtype) for s in shapes])


def layer_norm(columns: int) -> Function:
    return lambda x, weight, bias: aten.native_layer_norm(x, [columns], weight, bias, 1e-5)


def layer_norm_backward(columns: int) -> Function:
    def function(g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Any:
        y, mean, rstd = aten.native_layer_norm(x, [columns], weight, weight, 1e-5)
        wanted = [True, True, True]
        return y, *aten.native_layer_norm_backward(g, x, [columns], mean, rstd, weight, weight, wanted)

    return function


def gelu_dropout_add(x: torch.Tensor, mask: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return aten.native_dropout_backward(F.gelu(x), mask, 1.25) + residual


def _activation(shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    def draw(g: torch.Generator) -> list[torch.Tensor]:
        x, residual = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
        return [x, torch.rand(shape, generator=g) > 0.2, residual]

    return Program(gelu_dropout_add, draw)


def _integers(function: Function, shape: tuple[int, ...], dtype: torch.dtype) -> Program:
    return Program(function, lambda g: [torch.randint(0, 127, shape, generator=g).to(dtype) for _ in range(2)])


def _with_specials(function: Function, shape: tuple[int, ...]) -> Program:
    def draw(g: torch.Generator) -> list[torch.Tensor]:
        x = torch.randn(shape, generator=g)
        flat = x.view(-1)
        flat[3], flat[-2], flat[shape[-1] + 1] = torch.nan, torch.inf, -torch.inf
        return [x]

    return Program(function, draw)


def gelu_backward_and_sums(approximate: str) -> Function:
    def function(g: torch.Tensor, x: torch.Tensor) -> Any:
        y = aten.gelu_backward(g, x, approximate=approximate)
        return y, y.sum(0)

    return function


def _with_places(function: Function, *shapes: tuple[int, ...], below: int, dtype: torch.dtype = BF16) -> Program:
    """Normal inputs, then indices of the last of these shapes."""

    def draw(g: torch.Generator) -> list[torch.Tensor]:
        given = [torch.randn(shape, generator=g).to(dtype) for shape in shapes[:-1]]
        return [*given, torch.randint(0, below, shapes[-1], generator=g)]

    return Program(function, draw)


def biased_by_places(x: torch.Tensor, c: torch.Tensor, p: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Attention's scores with a bias of relative positions, of queries and of keys."""
    along = c.gather(-1, i.expand(len(c), -1, -1))
    across = p.gather(-1, (16 - i).clamp(0, 16).expand(len(p), -1, -1)).transpose(-1, -2)
    return (x + along / 2 + across).softmax(-1)


def integer_powers(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Powers of one number, and of many with positive and negative exponents, in every integer type."""
    kinds = [(x - 3).to(dtype) for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)]
    return [power for base in kinds for power in (2**base, base ** (y - 60).to(base.dtype))]


def _far_below_zero(function: Function) -> Program:
    """Where an activation is what is left of a difference from one."""
    return Program(function, lambda g: [torch.rand((7, 130), generator=g) * 3 - 6])


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """The same values with the second dimension contiguous in memory."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


PROGRAMS: dict[str, Program] = {
    "extremes and sums over a middle axis, unaligned": program(
        lambda x, y: (x.amin(1), (x * y).sum(1), x.sum((0, 2))), (3, 19, 133), (3, 19, 133)
    ),
    "scans": program(lambda x, y: ((x * y).cumsum(-1) - x, y.cumprod(-1).sum(-1)), (5, 33), (5, 33)),
    "a long scan and its maximum": program(lambda x: (s := x.cumsum(-1), s.amax(-1)), (3, 16500)),
    "a scan of truths, broadcast": _integers(
        lambda x, y: (x > y).cumsum(1)[:, :, None] + y[:, :, None], (7, 130), torch.int32
    ),
    "a scan of sums": program(lambda x: x.sum(-1, keepdim=True).expand(-1, 9).cumsum(1), (5, 33), dtype=BF16),
    "sums over a middle axis of four": program(lambda x: x.exp().sum(2), (2, 3, 300, 130), dtype=BF16),
    "rows that a layer norm reads across": Program(
        lambda x, w, b: aten.native_layer_norm(x, [9], w, b, 1e-5)[0],
        lambda g: [channels_last(torch.randn(2, 24, 5, 9, generator=g)), *(torch.randn(9, generator=g) for _ in "wb")],
    ),
    "windows of channels-last images, contiguous results": Program(
        lambda x: (F.max_pool2d(x, 2) + 1).clone(memory_format=torch.contiguous_format),
        lambda g: [channels_last(torch.randn(2, 24, 10, 14, generator=g))],
    ),
    "windows and a bias of channels": program(
        lambda x, b: F.avg_pool2d(x, 3, 2, 1) + b.view(-1, 1, 1), (2, 3, 9, 70), (3,)
    ),
    "rotary embedding": program(rotary, (2, 3, 7, 40), (7, 40), (7, 40), dtype=BF16),
    "gradient of rotary embedding": program(rotary_backward, (2, 3, 7, 40), (7, 40), (7, 40)),
    "softmax of two": program(lambda x, y: torch.cat([x, y.exp()], -1).softmax(-1), (9, 33), (9, 70)),
    "sums over parts": program(lambda x, y: torch.cat([x, y], 0).flip(0)[2:].sum(0), (40, 33), (9, 33)),
    # Elementwise: one axis, tiles, broadcast, strided, several dtypes.
    "numbers beside sums of columns": program(
        lambda x, y: (torch.full_like(x, 3), y.exp().expand(x.shape).clone(), x.sum(0) * 3 + y.exp()), (40, 33), (33,)
    ),
    "one element": program(lambda x: x * 2 + 1, (1,)),
    "zero-dimensional": program(lambda x, y: x.exp() * y, (), (7,)),
    "flat": program(lambda x, y: x.sigmoid() * y - 0.5, (7, 33, 13), (7, 33, 13)),
    "broadcast rows and columns": program(lambda x, r, c: (x + r) * c, (33, 130), (33, 1), (130,)),
    "broadcast in the middle": program(lambda x, y: x * y, (7, 33, 5), (7, 1, 5)),
    "transposed": program(lambda x, y: x.t() + y, (130, 33), (33, 130)),
    "permuted": program(lambda x: (x.permute(2, 0, 3, 1) * 2).contiguous(), (3, 7, 5, 33)),
    "column result beside a transposed matrix": program(
        lambda x, y, r: ((z := r * 3) * x + y.t(), z), (33, 130), (130, 33), (33, 1)
    ),
    "column result beside a matrix": program(lambda x, r: ((z := r * 3) * x, z), (33, 130), (33, 1)),
    "bf16 activation": _activation((33, 130), BF16),
    "fp16 activation": _activation((7, 33), FP16),
    "fp64 functions": program(lambda x: x.tanh() + x.abs().pow(1.3) + x.erfc(), (7, 33), dtype=FP64),
    "rounded before a comparison": program(lambda x: torch.where(x * 1.1 > x + 0.1, x, -x), (33, 7), dtype=BF16),
    "int8 wraps around": _integers(lambda x, y: x * y + 100, (7, 33), torch.int8),
    "uint8 wraps around": _integers(lambda x, y: ~(x * y - 3), (7, 33), torch.uint8),
    "integer powers": _integers(integer_powers, (7, 33), torch.int64),
    "positions": Program(lambda x: x * torch.arange(130, device=x.device), lambda _: [torch.ones(7, 130)]),
    "GELU far below zero": _far_below_zero(F.gelu),
    "GELU by tanh far below zero": _far_below_zero(lambda x: F.gelu(x, approximate="tanh")),
    "erf and tanh of small numbers": program(lambda x: ((x * 1e-4).erf(), (x * 1e-4).tanh()), (7, 33)),
    "special values": _with_specials(lambda x: x.clamp(-1, 1) + F.relu(x) * x.isnan(), (7, 33)),
    # Elements at computed places.
    "embedding": _with_places(lambda w, i: F.embedding(i, w) * 2, (50, 33), (3, 7), below=50),
    "layer norm of an embedding": _with_places(
        lambda w, g, i: F.layer_norm(F.embedding(i, w), (33,), g), (50, 33), (33,), (3, 7), below=50
    ),
    "places from the end": _with_places(lambda x, i: x[:, i - 7] + 1, (33, 9), (3, 5), below=9),
    "biased by places": _with_places(biased_by_places, (4, 33, 33), (4, 33, 17), (4, 33, 17), (33, 33), below=17),
    "one of a long row": _with_places(
        lambda x, i: x.log_softmax(-1).gather(-1, i), (3, 16411), (3, 1), below=16411, dtype=torch.float32
    ),
    "places beside zeros": _with_places(
        lambda x, i: F.pad(F.embedding(i + 1, x), [0, 0, 2, 3]) * 2, (40, 33), (7,), below=39
    ),
    "sums of rows at places": _with_places(lambda x, i: x.index_select(0, i).sum(0), (40, 33), (130,), below=40),
    "few long rows": program(
        lambda x, y: (x.sum(-1), (x * y).amax(-1), x.mean(-1)), (3, 65537), (3, 65537), dtype=BF16
    ),
    # Reductions over the columns.
    "softmax": program(lambda x: x.softmax(-1), (33, 130)),
    "softmax of one row": program(lambda x: x.softmax(-1), (130,)),
    "softmax of pairs": program(lambda x: x.softmax(-1), (130, 2), dtype=FP16),
    "softmax over rows": program(lambda x: x.softmax(0), (33, 130)),
    "log-softmax with special values": _with_specials(lambda x: x.log_softmax(-1), (7, 33)),
    "fp64 softmax": program(lambda x: x.softmax(-1), (7, 33), dtype=FP64),
    "layer norm": program(layer_norm(130), (33, 130), (130,), (130,)),
    "bf16 layer norm": program(layer_norm(33), (2, 7, 33), (33,), (33,), dtype=BF16),
    "extremes with special values": _with_specials(lambda x: (x.amax(-1), x.amin(-1), x.argmax(-1)), (7, 33)),
    "variance over outer axes": program(lambda x: x.var((0, 2)), (7, 33, 5)),
    "product": program(lambda x: x.prod(-1), (7, 33)),
    "any and all": program(lambda x: ((x > 2.5).any(-1), (x > -2.5).all(-1)), (33, 130)),
    "integer sums": _integers(lambda x, y: ((x + y).sum(-1), x.amax(-1)), (33, 130), torch.int32),
    "long rows": program(lambda x: (x.softmax(-1), x.amax(-1)), (3, 16411)),
    "long rows of several axes": program(lambda x: x - x.mean((1, 3), keepdim=True), (2, 130, 2, 131)),
    "long rows of channels": program(
        lambda x, w: ((y := x * w[:, None]) - y.mean((1, 2), keepdim=True)) * y.sum((1, 2), keepdim=True),
        (2, 3, 8100),
        (3,),
    ),
    "long rows that are partly -inf": Program(
        lambda x: (x.softmax(-1), x.log_softmax(-1)),
        lambda g: [torch.randn(3, 16500, generator=g).masked_fill(torch.arange(16500) // 64 % 2 == 0, -torch.inf)],
    ),
    "long rows of special values": Program(
        lambda x: x.softmax(-1),
        lambda g: [torch.randn(4, 16500, generator=g) + torch.tensor([[0.0], [torch.inf], [-torch.inf], [torch.nan]])],
    ),
    "long rows with special values": _with_specials(lambda x: (x.argmin(-1), x.amax(-1)), (2, 16500)),
    # Reductions over the rows, and over everything.
    "column sums": program(lambda x: x.sum(0), (390, 33)),
    "column sums of few rows": program(lambda x, w: x.sum(0) * w, (130, 333), (333,)),
    "column sums with an epilogue": program(lambda x, w: x.sum((0, 1)) * w + 1, (13, 33, 130), (130,)),
    "sums of scaled rows, scaled as the rows": program(
        lambda x, w: ((y := x * w) / y.exp().sum(-1, keepdim=True)).sum(0) * w, (130, 16), (16,)
    ),
    "column sums beside a column's own sum": program(lambda x, w: x.sum(0) * w.sum(), (33, 130), (130,)),
    "many columns and their sums": program(
        lambda x, w: ((y := x * w), y.sum(0) * w.sin() + 1), (5, 2**17 + 33), (2**17 + 33,), dtype=BF16
    ),
    "bf16 column sums": program(lambda x: x.sum(0), (390, 33), dtype=BF16),
    "column extremes": _with_specials(lambda x: (x.amax(0), x.amin(0)), (330, 130)),
    "GELU backward and column sums": program(gelu_backward_and_sums("none"), (270, 1500), (270, 1500), dtype=BF16),
    "tanh GELU backward and column sums": program(gelu_backward_and_sums("tanh"), (33, 130), (33, 130)),
    "dropout backward and column sums": Program(
        lambda g, mask: ((y := aten.native_dropout_backward(g, mask, 1.25)), y.sum(0)),
        lambda g: [torch.randn((130, 1500), generator=g).to(BF16), torch.rand((130, 1500), generator=g) > 0.2],
    ),
    "column sums beside a row's result": program(lambda x, r: (x * r, x.sum(0), r * 3), (33, 130), (33, 1)),
    "any of a column": program(lambda x: (x > 2.5).any(0), (330, 13)),
    "integer column sums": _integers(lambda x, y: (x * y).sum(0), (33, 130), torch.int64),
    "layer norm backward": program(layer_norm_backward(130), (33, 130), (33, 130), (130,)),
    "layer norm backward in three pieces": program(layer_norm_backward(96), (130, 96), (130, 96), (96,)),
    "bf16 layer norm backward": program(layer_norm_backward(33), (130, 33), (130, 33), (33,), dtype=BF16),
    "long layer norm backward": program(layer_norm_backward(4201), (5, 4201), (5, 4201), (4201,)),
    "sum of everything": program(lambda x: (x * x).sum(), (33, 130)),
    "sum of everything in rows": program(lambda x: (x * x).sum().sqrt(), (7, 33, 130)),
    "fp64 sum": program(lambda x: x.sum(), (33, 130), dtype=FP64),
    "extreme of everything": program(lambda x: x.amax(), (130, 33, 7)),
}


def _drawing(shape: tuple[int, ...], order: tuple[int, ...], vector: int, dtype: torch.dtype = BF16) -> Program:
    """Dropout of a sum with the numbers of a GPU's generator, its column sums and its row maxima; three blocks draw."""

    def function(state: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        mask = keep_philox(state, list(shape), list(order), 0.63, vector, 3 * 256, 8)
        kept = aten.native_dropout_backward(x + y, mask, 1 / 0.63)
        return kept, kept.amax(-1)

    def draw(g: torch.Generator) -> list[torch.Tensor]:
        x, y = (torch.empty_permuted(shape, order, dtype=dtype).copy_(torch.randn(shape, generator=g)) for _ in "xy")
        return [torch.tensor([0x1234_5678_9ABC_DEF0, 4 * (2**32 - 1)]), x, y]

    return Program(function, draw)


def _dropped_and_summed(vector: int) -> Program:
    def function(state: torch.Tensor, g: torch.Tensor) -> Any:
        mask = keep_philox(state, list(g.shape), [0, 1], 0.63, vector, 3 * 256, 0)
        y = aten.native_dropout_backward(g, mask, 1 / 0.63)
        return y, y.sum(0)

    return Program(function, lambda g: [torch.tensor([-5, 12]), torch.randn((130, 1500), generator=g).to(BF16)])


def _mean_and_dropped(vector: int) -> Program:
    def function(state: torch.Tensor, x: torch.Tensor) -> Any:
        mask = keep_philox(state, [x.shape[1]], [0], 0.63, vector, 3 * 256, 0)
        return aten.native_dropout_backward(x.mean(0), mask, 1 / 0.63)

    return Program(function, lambda g: [torch.tensor([-5, 12]), torch.randn((33, 1500), generator=g).to(BF16)])


DRAWS: dict[str, Program] = {
    "flat draw of eight": Program(
        lambda state, x: x * keep_philox(state, [16440], [0], 0.5, 8, 3 * 256, 0),
        lambda g: [torch.tensor([7, 0]), torch.randn(16440, generator=g).to(BF16)],
    ),
    "rows that draw, vectors of eight": _drawing((25, 264), (0, 1), 8),
    "rows that draw, vectors of four": _drawing((33, 132), (0, 1), 4, torch.float32),
    "rows that draw, halves of vectors of eight": _drawing((34, 132), (0, 1), 8),
    "rows that draw, vectors of two": _drawing((33, 130), (0, 1), 2),
    "rows that draw one by one": _drawing((11, 131), (0, 1), 1),
    "several axes that draw": _drawing((5, 7, 3, 40), (0, 2, 1, 3), 8),
    "a draw across memory": _drawing((33, 264), (1, 0), 8),
    "long rows that draw": _drawing((2, 33000), (0, 1), 8),
    "dropout backward by draws and column sums": _dropped_and_summed(4),
    "dropout of column sums": _mean_and_dropped(4),
}
"""Kernels that draw the numbers of a GPU's generator, for which there is no C++."""


def golden(n: int = 4096, m: int = 1000) -> dict[str, tuple[Function, tuple[torch.Tensor, ...]]]:
    """The seven nests that are held as text, over tensors of n × m without memory."""

    def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, y, mean, rstd = tensor(n, m), tensor(n, m), *(tensor(n, 1, dtype=torch.float32) for _ in range(2))
    weight, bias = tensor(m), tensor(m)
    wanted = [True, True, True]

    def backward(g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, w: torch.Tensor) -> Any:
        return aten.native_layer_norm_backward(g, x, [m], mean, rstd, w, w, wanted)

    return {
        "softmax": (lambda x: x.softmax(-1), (x.float(),)),
        "layer_norm": (layer_norm(m), (x, weight, bias)),
        "layer_norm_backward": (backward, (y, x, mean, rstd, weight)),
        "gelu_dropout_add": (gelu_dropout_add, (x, x.bool(), y)),
        "transposed_copy": (lambda x: (x.t() * 2).contiguous(), (x,)),
        "dropout_add": (
            lambda state, x, y: (
                aten.native_dropout_backward(x, keep_philox(state, [n, m], [0, 1], 0.9, 8, 270336, 0), 1 / 0.9) + y
            ),
            (torch.empty(2, dtype=torch.int64, device="meta"), x, y),
        ),
        "sum_of_everything": (lambda x: (x * x).sum(), (x.float(),)),
    }


def graph_of(function: Function, *inputs: torch.Tensor) -> fx.Graph:
    """The ATen graph of a function at the shapes, dtypes and strides of `inputs`."""
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def nests_of(function: Function, *inputs: torch.Tensor) -> list[Lowered]:
    """The nests that fusion makes of a function."""
    return [region.lowered for region in fuse(graph_of(function, *inputs), "forward", target_named("cpu")).regions]


Runner = Callable[[Lowered, list[torch.Tensor]], None]
"""Runs one nest over a tensor for each of its buffers."""
Choice = Callable[[Lowered], Schedule | None]


def by_triton(choose: Choice = lambda _: None) -> Runner:
    def run(lowered: Lowered, tensors: list[torch.Tensor]) -> None:
        TritonKernel(lowered.nest, emit_triton(lowered.nest)).launch(tensors, choose(lowered), lowered.numbers)

    return run


def run_graph(
    graph: fx.Graph, inputs: Sequence[torch.Tensor], device: torch.device, run: Runner, together: bool = False
) -> tuple[list[Any], dict[fx.Node, str]]:
    """All results of a graph whose regions `run` computes; and the kernel that made each value.

    `together`: Triton compiles the kernels beside each other, before the first runs.
    """
    regions = fuse(graph, "forward", target_named("cpu")).regions
    if together:
        nests = [region.lowered.nest for region in regions]
        compile_together([(TritonKernel(nest, emit_triton(nest)), device) for nest in nests])
    values: dict[fx.Node, Any] = dict(zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True))
    made: dict[fx.Node, str] = {}
    for unit in schedule(graph, regions):
        if isinstance(unit, Region):
            results = list(_results(unit.lowered, device))
            run(unit.lowered, [values[n] for n in unit.lowered.inputs] + results)
            values.update(zip(unit.lowered.outputs, results, strict=True))
            made.update(dict.fromkeys(unit.lowered.outputs, unit.name))
        else:
            args, kwargs = fx.node.map_arg((unit.args, unit.kwargs), values.__getitem__)
            values[unit] = unit.target(*args, **kwargs)  # type: ignore[operator]
    out = graph.output_node().args[0]
    wanted = out if isinstance(out, (list, tuple)) else [out]
    return [values[n] if isinstance(n, fx.Node) else n for n in wanted], made


def _results(lowered: Lowered, device: torch.device) -> Iterator[torch.Tensor]:
    """Tensors for the results of a nest, laid out as the graph says; full of NaN, so that gaps show."""
    for node in lowered.outputs:
        meta = node.meta["val"]
        empty = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)
        yield empty.fill_(torch.nan if meta.dtype.is_floating_point else 1)


def verify(graph: fx.Graph, inputs: Sequence[torch.Tensor], results: Sequence[Any]) -> list[Verified]:
    """Each result against eager and float64; where one misses, against other runs of the operators too."""
    module = fx.GraphModule(torch.nn.Module(), graph)
    pairs = reference_run(module, list(inputs))
    found = [compare(mine.cpu(), pair.eager.cpu(), pair.truth.cpu()) for mine, pair in zip(results, pairs, strict=True)]
    if all(row.ok for row in found):
        return found
    near = other_results(module, list(inputs), 0)
    return [
        row if row.ok else compare(mine.cpu(), pair.eager.cpu(), pair.truth.cpu(), [t.cpu() for t in others])
        for row, mine, pair, others in zip(found, results, pairs, near, strict=True)
    ]


def check_program(name: str, device: torch.device, run: Runner) -> None:
    """The kernels of a program of `PROGRAMS` or `DRAWS` keep the numbers contract."""
    program = (PROGRAMS | DRAWS)[name]
    inputs = program.inputs(device)
    graph = graph_of(program.function, *inputs)
    results, made = run_graph(graph, inputs, device, run)
    assert made
    assert [figures for figures in verify(graph, inputs, results) if not figures.ok] == []


class Calls(Table):
    """Calls of operators as one graph, on one device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def input(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self.moved:
            self.moved[id(tensor)] = tensor, placed(tensor, self.device)
        return super().input(self.moved[id(tensor)][1])


def operator_calls(device: torch.device) -> Calls:
    """One kind of call of every operator with a body."""
    calls = Calls(device)
    for number, (name, makers) in enumerate([*CALLS.items(), *VIEWS.items()]):
        for sample in combinations(number, 0):
            calls.add(name, f"{name} {sample.layout} {sample.dtype}", makers[0], sample, view=name in VIEWS)
    calls.graph.output(tuple(node for _, node in calls.results))
    return calls


def operators(device: torch.device) -> dict[str, list[tuple[str, Verified]]]:
    """One kind of call of every operator with a body, verified, by the name of its row."""
    calls = operator_calls(device)
    results, _ = run_graph(calls.graph, calls.tensors, device, by_triton(), together=True)
    found = defaultdict(list)
    for (label, _), figures in zip(calls.results, verify(calls.graph, calls.tensors, results), strict=True):
        found[label.split()[0]].append((label, figures))
    return found
