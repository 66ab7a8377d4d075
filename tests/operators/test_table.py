"""Every row of the operator table with a body, compiled and compared with eager and float64."""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from tests.operators.samples import CALLS, VIEWS, Maker, Operands, combinations
from tilewright.emit.cpp import emit_cpp, translation_unit
from tilewright.hardware.target import target_named
from tilewright.loops.lower import lower
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.reference import reference_run
from tilewright.operators import table
from tilewright.operators.axes import Unfusable
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
    "it adds up equal values|a scatter of several elements along an axis"
    "|a loss of integers|PyTorch's sixth|whole numbers between two ends|a tensor that is rolled as if it were flat"
    "|a division that is rounded, but for integers by a positive number|an average of integers"
    "|windows of different sizes|an upsampling of integers|norms of a weight's columns"
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
