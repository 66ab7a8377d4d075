"""Programs for the Triton emitter, and how to run them: in its interpreter on the CPU, or on a GPU.

`triton_programs.txt` has programs for every form a kernel takes, on shapes that hurt. `golden` are the nests whose
source is held as text and whose machine code is inspected.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.loops.test_nests import rotary, rotary_backward
from tests.operators.samples import CALLS, VIEWS, combinations
from tests.operators.test_table import Program as Table
from tests.tables import rows, value
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
TABLE = Path(__file__).with_suffix(".txt")
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


NAMED = globals() | {"rotary": rotary, "rotary_backward": rotary_backward}
PROGRAMS, DRAWS = (
    {row["name"]: value(row["program"], NAMED) for row in rows(TABLE, section)} for section in ("programs", "draws")
)


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


def regions_of(graph: fx.Graph) -> list[Region]:
    """The regions that fusion makes of a graph for kernels in Triton, wherever its tensors are."""
    with mock.patch.dict(os.environ, TILEWRIGHT_TARGET="triton"):
        return list(fuse(graph, "forward", target_named("cpu")).regions)


def nests_of(function: Function, *inputs: torch.Tensor) -> list[Lowered]:
    """The nests that fusion makes of a function."""
    return [region.lowered for region in regions_of(graph_of(function, *inputs))]


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
    regions = regions_of(graph)
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
    *_, near = other_results(module, list(inputs), 0)
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


def operator_calls(device: torch.device, every: int = 1, part: int = 0) -> Calls:
    """One kind of call of every operator with a body: with its first operands and `every` so many-th of the others.

    With all, where PyTorch has no such call for any of these. Of the `every` parts of the others, which one.
    """
    calls = Calls(device)
    for number, (name, makers) in enumerate([*CALLS.items(), *VIEWS.items()]):
        samples = list(combinations(number, 0))
        few = [one for place, one in enumerate(samples) if not place or (number + place) % every == part]
        for chosen in (few, [one for one in samples if one not in few]):
            labels = [f"{name} {one.layout} {one.dtype}" for one in chosen]
            accepted = [
                calls.add(name, label, makers[0], one, view=name in VIEWS)
                for label, one in zip(labels, chosen, strict=True)
            ]
            if any(accepted):
                break
    calls.graph.output(tuple(node for _, node in calls.results))
    return calls


def operators(device: torch.device, every: int = 1) -> dict[str, list[tuple[str, Verified]]]:
    """One kind of call of every operator with a body, verified, by the name of its row."""
    calls = operator_calls(device, every)
    results, _ = run_graph(calls.graph, calls.tensors, device, by_triton(), together=True)
    found = defaultdict(list)
    for (label, _), figures in zip(calls.results, verify(calls.graph, calls.tensors, results), strict=True):
        found[label.split()[0]].append((label, figures))
    return found
