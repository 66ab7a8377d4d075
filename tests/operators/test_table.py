"""Every row of the operator table with a body, compiled and compared with eager and float64."""

import copy
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._inductor.inductor_prims
from torch import fx, nn

from tests.kernels.registered import all_operators
from tests.operators.pools import APART, LEFT, OVERLAPPING, image, in_layouts, library_pools
from tests.operators.samples import CALLS, VIEWS, Maker, Operands, combinations
from tilewright.backend import backend, recording
from tilewright.emit.cpp import emit_cpp, translation_unit
from tilewright.hardware.target import target_named
from tilewright.kernels.dropout_add import philox, stream
from tilewright.kernels.norm import group as group_norm
from tilewright.loops.lower import lower
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.reference import reference_run
from tilewright.measure.truth.verify import verify
from tilewright.operators import table
from tilewright.operators.axes import Unfusable
from tilewright.operators.table import rows
from tilewright.passes.fusion import fuse
from tilewright.passes.schedule import schedule
from tilewright.records.measurement import Verified
from tilewright.runtime.assemble import Scheduled, assemble
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import Executable

RMS_BACKWARD = "_fused_rms_norm_backward.default"
ONLY_ON_GPUS = (RMS_BACKWARD, "cumsum.default", "cumprod.default")
"""Not computed by C++ kernels; `tests/emit/triton_programs.py` and a test below have programs with them."""
WITH_BODY = [
    name.removeprefix("aten.")
    for name, row in table.rows().items()
    if row.body is not None and name.startswith("aten.") and name.removeprefix("aten.") not in ONLY_ON_GPUS
]
BY_PYTORCH = (
    "it adds up equal values|it scatters more than one element along the axis"
    "|a loss of integers|in float64, PyTorch multiplies by|it counts in integers|it rolls the tensor as one flat row"
    "|a rounded division is generated only for integers divided by a positive number|an average of integers"
    "|its windows differ in size|an upsampling of integers|it normalises the columns of a weight, not its rows"
)
"""The reasons for which a call of the samples may stay with PyTorch."""


@dataclass(frozen=True)
class Checked:
    """One result of one call: the node and the kernel that computed it (None: PyTorch did); its figures."""

    label: str
    node: fx.Node
    kernel: str | None
    figures: Verified


def overload(name: str) -> Any:
    return operator.attrgetter(name)(torch.ops.aten)


def compiled(graph: fx.Graph) -> tuple[Executable, dict[fx.Node, str]]:
    """A graph as the backend would run it, and the kernel that computes each value in memory."""
    fusion = fuse(graph, "forward", target_named("cpu"))
    sources = {region.name: emit_cpp(region.lowered.nest) for region in fusion.regions}
    library = load(translation_unit(list(sources.values())))
    executable = assemble(Scheduled(graph, schedule(graph, fusion.regions)), sources, library)
    return executable, {node: r.name for r in fusion.regions for node in r.lowered.outputs}


class Program:
    """Calls of many operators as one graph, so that one call of the compiler does for all."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.placeholders: dict[int, fx.Node] = {}
        self.tensors: list[torch.Tensor] = []
        self.results: list[tuple[str, fx.Node]] = []

    def input(self, tensor: torch.Tensor) -> fx.Node:
        if id(tensor) not in self.placeholders:
            node = self.graph.placeholder(f"in{len(self.tensors)}")
            node.meta["val"] = tensor
            self.placeholders[id(tensor)] = node
            self.tensors.append(tensor)
        return self.placeholders[id(tensor)]

    def node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        operands = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        value = target(*operands[0], **operands[1])
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def add(self, name: str, label: str, make: Maker, sample: Operands, view: bool) -> bool:
        """One more call; a view stands between two negations. False where PyTorch has no such call."""
        try:
            args, kwargs = fx.node.map_aggregate(
                make(sample), lambda a: self.input(a) if isinstance(a, torch.Tensor) else a
            )
            if view:
                args = (self.node(torch.ops.aten.neg.default, args[:1], {}), *args[1:])
            node = self.node(overload(name), args, kwargs)
            if view and isinstance(node.meta["val"], torch.Tensor):
                node = self.node(torch.ops.aten.neg.default, (node,), {})
        except (RuntimeError, IndexError, NotImplementedError):
            return False
        if isinstance(node.meta["val"], torch.Tensor):
            if node.meta["val"].numel():
                self.results.append((label, node))
        else:
            for i, value in enumerate(node.meta["val"]):
                if isinstance(value, torch.Tensor) and value.numel():
                    taken = self.node(operator.getitem, (node, i), {})
                    self.results.append((label, self.node(torch.ops.aten.neg.default, (taken,), {}) if view else taken))
        return True

    def run(self) -> list[Checked]:
        self.graph.output(tuple(node for _, node in self.results))
        executable, kernels = compiled(self.graph)
        ours = executable(list(self.tensors))
        pairs = reference_run(fx.GraphModule(torch.nn.Module(), self.graph), self.tensors)
        return [
            Checked(label, node, kernels.get(node), compare(mine, pair.eager, pair.truth))
            for (label, node), mine, pair in zip(self.results, ours, pairs, strict=True)
        ]


@pytest.fixture(scope="module")
def checked() -> Mapping[str, Sequence[Checked]]:
    """Every result by the name of its row."""
    program = Program()
    accepted: dict[str, int] = defaultdict(int)
    for number, (name, makers) in enumerate([*CALLS.items(), *VIEWS.items()]):
        for variant, make in enumerate(makers):
            for sample in combinations(number, variant):
                label = f"{name} variant {variant} {sample.layout} {sample.dtype}"
                accepted[name] += program.add(name, label, make, sample, view=name in VIEWS)
    assert [name for name in WITH_BODY if not accepted[name]] == []
    found = defaultdict(list)
    for result in program.run():
        found[result.label.split()[0]].append(result)
    return found


def test_every_row_with_a_body_has_calls() -> None:
    assert sorted(WITH_BODY) == sorted([*CALLS, *VIEWS])


@pytest.mark.parametrize("name", WITH_BODY)
def test_kernels_keep_the_numbers_contract(checked: Mapping[str, Sequence[Checked]], name: str) -> None:
    broken = [(r.label, r.figures) for r in checked[name] if not r.figures.ok]
    assert broken == []
    assert any(r.kernel for r in checked[name])
    for result in checked[name]:
        if result.kernel is None:
            call = result.node.args[0] if result.node.target is operator.getitem else result.node
            with pytest.raises(Unfusable, match=BY_PYTORCH):
                lower([call], [result.node], "alone", "c++")


def test_rms_norm_backward_against_autograd() -> None:
    """PyTorch has this operator on GPUs alone; on a CPU autograd of the formula says what it gives."""
    generator = torch.Generator().manual_seed(8)
    x, gradient, weight = (torch.randn(s, generator=generator) for s in ((6, 33), (6, 33), (33,)))

    def by_autograd(dtype: torch.dtype) -> list[torch.Tensor]:
        x_, weight_ = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        rstd = (x_.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return [*torch.autograd.grad(x_ * rstd * weight_, [x_, weight_], gradient.to(dtype)), rstd.detach()]

    dx, dw, rstd = by_autograd(torch.float32)
    program = Program()
    operands = [program.input(t) for t in (gradient, x, rstd, weight)]
    args = (*operands[:2], [33], *operands[2:], [True, True])
    call = program.graph.call_function(overload(RMS_BACKWARD), args)
    call.meta["val"] = (dx, dw)
    for i in range(2):
        node = program.graph.call_function(operator.getitem, (call, i))
        node.meta["val"] = call.meta["val"][i]
        program.results.append((RMS_BACKWARD, node))
    program.graph.output(tuple(node for _, node in program.results))
    executable, kernels = compiled(program.graph)
    assert all(node in kernels for _, node in program.results)
    for mine, eager, truth in zip(executable(program.tensors), (dx, dw), by_autograd(torch.float64), strict=False):
        figures = compare(mine, eager, truth)
        assert figures.ok, figures


RIGHT = ("atanh", "sinc", "trace", "cummax", "put", "fft_rfft", "unbind_copy", "split_with_sizes_copy", "rot90")


@pytest.mark.parametrize("name", RIGHT)
def test_samples_are_right_and_have_rows(name: str) -> None:
    # PyTorch's database takes seconds to import, and other processes import this file.
    from tests.operators.op_db import check, operator_named

    assert {call.status for call in check(operator_named(name), torch.float32)} == {"right"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quotient_is_rounded_before_its_fraction_is_cut_off(dtype: torch.dtype) -> None:
    """But not one by a number, or by a tensor of one element."""
    torch.manual_seed(0)
    x, y = (9 * torch.randn(4096)).to(dtype), (2 * torch.randn(4096)).to(dtype)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [torch.div(x, divisor, rounding_mode="trunc") for divisor in (y, 0.3, y[3], y[3:4])]

    ours = torch.compile(function, backend=backend, fullgraph=True)(x, y)
    for mine, eager in zip(ours, function(x, y), strict=True):
        assert torch.equal(mine, eager)


@pytest.mark.parametrize(("name", "layout"), in_layouts(APART, OVERLAPPING, LEFT))
def test_values_positions_and_gradients_are_eagers(name: str, layout: str) -> None:
    assert bool(library_pools(name, image(layout))) == (name not in APART and name != "max of an exponential")


def test_a_costly_operand_is_computed_once() -> None:
    """The exponential of an element would be computed for each window that reads it."""
    function = LEFT["max of an exponential"]
    with recording() as record, torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(image("NCHW"))
    kernels = [region for graph in record.graphs for region in graph.plan.fusion.regions]
    assert len(kernels) == 2


CHANGED = dict.fromkeys((f"aten.{name}.default" for name in ("cholesky", "_cdist_backward", "_pdist_backward")), "2.14")
"""The first version of PyTorch that no longer has an operator, or calls its first argument otherwise."""


def test_names_of_arguments_are_those_of_the_schemas() -> None:
    # Who defines tilewright's own operators.
    assert stream.draw_stream and philox.draw_philox and group_norm.group_norm and all_operators()
    for row in rows().values():
        changed = CHANGED.get(row.name)
        if row.name == "keep_mask" or (changed and torch.torch_version.TorchVersion(torch.__version__) >= changed):
            continue
        schema = operator.attrgetter(row.name)(torch.ops)._schema
        names = tuple(argument.name for argument in schema.arguments)
        assert row.arguments == (names[: len(row.arguments)] if "..." in row.text else names), row.name


def test_a_multiply_add_of_dynamos_is_generated() -> None:
    a, b, c = (torch.randn(7, 33) for _ in range(3))
    run = torch.compile(lambda a, b, c: torch.ops.prims.fma(a, b, c).sin(), backend=backend, fullgraph=True)
    with recording() as record:
        torch.testing.assert_close(run(a, b, c), (a * b + c).sin())
    (graph,) = record.graphs
    assert [step.generated for step in graph.executable.steps] == [True]


SHAPES = {"images": (4, 5, 3, 7), "one channel": (3, 1, 17), "rows": (33, 6), "wide": (2, 130, 1, 1)}


def model(shape: tuple[int, ...], training: bool, dtype: torch.dtype) -> nn.Module:
    """Batch norm with a weight, a bias and moments of its own, and a ReLU that can be fused."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    torch.manual_seed(2)
    norm = kind(shape[1])
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 1.5)
    return nn.Sequential(norm, nn.ReLU()).train(training).to(dtype)


@pytest.mark.parametrize(
    ("shape", "training", "dtype"),
    [
        (shape, training, (torch.float32, torch.bfloat16)[(number + training) % 2])
        for number, shape in enumerate(SHAPES.values())
        for training in (True, False)
    ],
    ids=str,
)
def test_batch_norm_keeps_the_contract_in_one_kernel(
    shape: tuple[int, ...], training: bool, dtype: torch.dtype
) -> None:
    norm, x = model(shape, training, dtype), torch.randn(shape, dtype=dtype, requires_grad=training)
    with recording() as record, torch.set_grad_enabled(training):
        rows = verify(norm, torch.compile(norm, backend=backend, fullgraph=True), [x], training=training)
    assert [row for row in rows if not row.ok] == []
    assert record.fallbacks == []
    for graph in record.graphs:
        normed = [r for r in graph.plan.fusion.regions if any("batch_norm" in member.name for member in r.members)]
        assert len(normed) == 1 and len(normed[0].members) > 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_running_moments_follow_the_batches(shape: tuple[int, ...]) -> None:
    ours, eager = model(shape, True, torch.float32), model(shape, True, torch.float32)
    truth = copy.deepcopy(eager).double()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(shape) * 2 + 1
        compiled(x), eager(x), truth(x.double())
    for (name, mine), other, true in zip(ours.named_buffers(), eager.buffers(), truth.buffers(), strict=True):
        figures = compare(mine, other, true, tensor=name)
        assert figures.ok, figures
