"""The graphs of a case: as eager runs them, or planned for a target."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from tilewright.capture.aot import Boxed, Compiler, Rewriter, through_aot
from tilewright.capture.call_cycles import Folded, Traced, folded
from tilewright.capture.errors import capture_error, messages_ignored
from tilewright.capture.fakes import Fakes
from tilewright.capture.input_names import argument_names, set_argument_names
from tilewright.capture.recurrent_steps import write_out_steps
from tilewright.compile.plan import Plan
from tilewright.compile.planner import Eager, Planner
from tilewright.graph import calls
from tilewright.graph.source import source_line
from tilewright.graph.undefined import copied
from tilewright.hardware.target import Target
from tilewright.kernels.device import traced_for_gpu
from tilewright.measure.inputs import make_arguments, note_training_mode
from tilewright.pytorch.compiler import forget_compiled, is_compilers
from tilewright.pytorch.state import without_onednn
from tilewright.records.case import Case
from tilewright.records.errors import CaptureError, InputError, shown_cause
from tilewright.records.program import GraphName


@dataclass
class Captured:
    """The graphs of one case, and which placeholder of the forward graph is which input."""

    graphs: dict[GraphName, fx.Graph] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    """Placeholder position → position among the tensors of the case's arguments."""
    plan: Plan | None = None
    """How the graphs run; None for those of eager."""
    traced: Traced | None = None
    """The program as Dynamo captured it, or one with equal iterations left out."""

    @property
    def folded(self) -> Folded | None:
        """The program with equal iterations left out, if the graphs are those of such a one."""
        return self.traced if isinstance(self.traced, Folded) else None


def capture(
    case: Case,
    planner: Planner | None = None,
    *,
    target: Target | None = None,
    fold: bool = False,
    instead: Traced | None = None,
) -> Captured:
    """The forward graph (and, in training, the backward graph) of `case`.

    With a planner they are rewritten and planned for its target; without one they are the graphs that eager runs, on
    `target` (default: a CPU). With `fold`, equal iterations of a long program are left out. `instead` is what an
    earlier capture for this device traced: Dynamo does not run again. Raises CaptureError if the program is not one
    graph, or if its sizes depend on data, and InputError if the model rejects its inputs.
    """
    captured = Captured()
    target = planner.target if planner is not None else target
    device = "cpu" if target is None else target.tensor_device
    stands_for_gpu = target is not None and target.is_planned_gpu

    def observe(traced: Traced) -> Callable[..., Any]:
        captured.traced = traced
        captured.inputs = traced.inputs
        rewriter = planner or (Rewriter() if target is None else Eager(target))
        return through_aot(_Observer(captured, rewriter), traced.module, traced.examples)

    forget_compiled()
    try:
        with torch.set_grad_enabled(case.training), _without_log(), messages_ignored(), _traced_for(stands_for_gpu):
            if instead is None:
                _trace(case, device, fold, observe)
            else:
                observe(replace(instead, module=copied(instead.module)))
    except _Seen:
        # Not an error: `_Observer` raises it once it has the graphs.
        pass
    except Exception as error:
        # Dynamo lets some errors of operators pass, with the user's lines added to their text.
        if not is_compilers(error) and "from user code:" not in str(error):
            raise
        raise capture_error(case.name, error) from shown_cause(error)
    finally:
        forget_compiled()
    if not captured.graphs:
        raise CaptureError(f"{case.name} computes no tensor from its inputs; there is nothing to explain")
    for graph in captured.graphs.values():
        _refuse_unknown_sizes(case.name, graph)
        _refuse_mixed_products(case.name, graph)
    if planner is not None:
        captured.plan = planner.plan(captured.graphs)
    return captured


def _trace(case: Case, device: str, fold: bool, observe: Callable[[Traced], Callable[..., Any]]) -> None:
    """Let Dynamo capture `case`; `observe` gets the program, and ends the capture."""
    fakes = Fakes(device)
    function = fakes.model(case.build())
    note_training_mode(case, function)
    with fakes.making():
        arguments = make_arguments(case, seed=0, device=device, requires_grad=case.training)
    inputs = {id(x): number for number, x in enumerate(arguments.tensors)}
    names = argument_names(function, arguments.positional, arguments.keywords)

    def backend(module: fx.GraphModule, examples: Sequence[Any], **_: Any) -> Callable[..., Any]:
        known = {place: inputs[id(x)] for place, x in enumerate(examples) if id(x) in inputs}
        set_argument_names(module, {place: names[id(x)] for place, x in enumerate(examples) if id(x) in names})
        # Tensors that are no parameters, such as those of a closure, are real.
        if fold:
            write_out_steps(module)
        traced = Traced(module, fakes.tensors(examples), known)
        return observe((folded(traced, fakes.making) if fold else None) or traced)

    arguments.call(torch.compile(_called(function), backend=backend, fullgraph=True, dynamic=False))


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    def program(*inputs: Any, **keywords: Any) -> Any:
        return function(*inputs, **keywords)

    return program


class _Seen(BaseException):
    """Both graphs are known and the program need not run: a model's buffers must stay as they are.

    No Exception, since PyTorch would report that as the failure of a compiler.
    """


@contextmanager
def _traced_for(stands_for_gpu: bool) -> Iterator[None]:
    """Tensors on a CPU stand for a GPU's: what is traced has no call of a library for CPUs."""
    with traced_for_gpu(stands_for_gpu), without_onednn() if stands_for_gpu else nullcontext():
        yield


@contextmanager
def _without_log() -> Iterator[None]:
    """Suppress PyTorch's log of errors on fake tensors and Dynamo's warnings: tilewright raises errors instead."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")
            yield
    finally:
        logger.disabled = before


def _refuse_mixed_products(name: str, graph: fx.Graph) -> None:
    """Raise InputError for a product of operands of several dtypes: PyTorch refuses it, but its fake tensors do not."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            values = [value for operand in node.all_input_nodes if (value := calls.output(operand)) is not None]
            if len({value.dtype for value in values}) > 1:
                found = ", ".join(calls.dtype_name(value.dtype) for value in values)
                place = f" at {line}" if (line := source_line(node)) else ""
                operator = calls.operator_name(node.target)
                raise InputError(f"{name} does not accept its inputs{place}\n  {operator} of several dtypes: {found}")


def _refuse_unknown_sizes(name: str, graph: fx.Graph) -> None:
    for node in graph.nodes:
        try:
            for value in calls.outputs(node):
                if value is not None:
                    calls.shape_of(value)
        except CaptureError as error:
            raise CaptureError(
                f"{name} has no fixed shapes at {source_line(node) or node.name}\n  {error}; name a part without this "
                "line as the target, or record the program with `tilewright profile`"
            ) from error


class _Observer(Compiler):
    """Keeps the graphs of one capture, and ends it."""

    def __init__(self, captured: Captured, rewriter: Rewriter) -> None:
        super().__init__(rewriter)
        self.captured = captured

    def compile(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        self.captured.graphs = {name: module.graph for name, module in modules.items()}
        raise _Seen
