"""Captures programs as ATen graphs. Only this room, `graph`, uses private modules of PyTorch (2.11 to 2.13).

Dynamo captures; a hook rewrites the captured graph (attention, before it is decomposed); AOTAutograd
differentiates and functionalises; the joint graph is simplified and partitioned here into forward and
backward; a compiler makes each callable. If Dynamo left sizes symbolic, `specialise.py` gives the graph
for the sizes of one call.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

from tilewright.graph.undefined import (
    BackwardByGradients,
    copied,
    expected_undefined,
    is_tangent,
    leave_undefined,
)
from tilewright.records.errors import CaptureError, TilewrightError

Boxed = Callable[[list[Any]], Sequence[Any]]
Kind = Literal["forward", "backward", "inference"]


class Compiler(Protocol):
    """The hooks of a backend at each step of a capture."""

    def before_autograd(self, module: fx.GraphModule) -> None:
        """Rewrite the captured torch-level graph in place."""

    def joint(self, graph: fx.Graph) -> None:
        """Rewrite the joint forward and backward graph in place."""

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        """Of the forward values that backward needs, those to save; backward recomputes the others."""

    def without_gradients(self, backward: fx.Graph, places: Sequence[int]) -> bool:
        """Take the incoming gradients at these places out of `backward`; False where it stays as it is."""

    def compile_pair(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Boxed, Boxed]: ...

    def compile_backward(self, module: fx.GraphModule) -> Boxed: ...

    def compile_inference(self, module: fx.GraphModule) -> Boxed: ...

    def repeated(self, graph: CallableGraph, run: Boxed) -> Boxed:
        """The function to call instead of `run`, which computes `graph`: `run` itself, or a replay of it."""


@dataclass(frozen=True)
class CallableGraph:
    """A compiled graph, its kind, and its static inputs."""

    module: fx.GraphModule
    kind: Kind
    static: Sequence[int]
    """Indices of inputs with the same address in every call: parameters and buffers; in backward, saved tensors."""


def through_aot(compiler: Compiler, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a captured module with `compiler`; returns a callable with autograd.

    Raises CaptureError if AOTAutograd or a rewrite cannot handle the module. TilewrightErrors of the
    compiler and Dynamo's control-flow exceptions pass through.
    """
    # torch._dynamo.backends.common.aot_autograd would import Inductor's scheduler.
    from torch._dynamo import disable
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import GmWrapper, counters, flatten_graph_inputs
    from torch._functorch.aot_autograd import aot_module_simplified

    pairs = _Pairs(compiler)

    def through(module: fx.GraphModule | GmWrapper, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = aot_module_simplified(
            module,
            inputs,
            fw_compiler=pairs.forward,
            bw_compiler=pairs.backward,
            inference_compiler=pairs.inference,
            partition_fn=pairs.partition,
            keep_inference_input_mutations=True,
        )
        if pairs.undefined:
            compiled = _with_undefined_gradients(compiled)
        # Dynamo's DDPOptimizer reads here which of its buckets AOTAutograd compiled.
        counters["aot_autograd"]["total"] += 1
        untraced: Callable[..., Any] = disable(compiled, reason="it is compiled already")
        return untraced

    try:
        compiler.before_autograd(module)
        if any(isinstance(x, (list, tuple, dict)) for x in inputs):
            # Compiled autograd passes its tensors in a list.
            flat: Callable[..., Any] = flatten_graph_inputs(module, inputs, through)
            return flat
        return through(module, inputs)
    except (TilewrightError, TorchDynamoException):
        raise
    except Exception as error:
        raise CaptureError(f"it cannot be traced: {type(error).__name__}: {first_line(error)}") from error


def _with_undefined_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        results = compiled(*args)
        leave_undefined(results)
        return results

    return call


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


@contextmanager
def in_real_tensors() -> Iterator[None]:
    """Compute with real tensors inside, also during a capture with fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield


def watched() -> bool:
    """Whether a dispatch mode, a functorch transform or a tracer observes operator calls (autograd not counted)."""
    watching = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return bool(watching) or torch._C._functorch.peek_interpreter_stack() is not None or has_forward_level()


def compiled_autograd_is_on() -> bool:
    """Whether backward passes are traced: what autograd leaves undefined is no tensor there."""
    from torch._dynamo import compiled_autograd

    return bool(torch._dynamo.config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


def computes_nothing() -> bool:
    """Whether operators called now only say what they would give: under `FakeTensorMode` or a tracer."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _INFRASTRUCTURE)


_MODES = torch._C._TorchDispatchModeKey
_INFRASTRUCTURE = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)


def has_forward_level() -> bool:
    """Whether forward-mode differentiation is active: `torch.autograd.forward_ad.dual_level`, `torch.func.jvp`."""
    return torch.autograd.forward_ad._current_level >= 0


def carries_tangents(values: Sequence[Any]) -> bool:
    """Whether forward-mode differentiation passes through one of these values."""
    if not has_forward_level():
        return False
    unpack: Callable[..., Any] = torch.autograd.forward_ad.unpack_dual
    return any(isinstance(x, torch.Tensor) and unpack(x).tangent is not None for x in values)


def lies_in_memory(x: torch.Tensor) -> bool:
    """Whether x has an address: it is neither a fake tensor nor a functorch wrapper."""
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def functions_watched() -> bool:
    """Whether a `TorchFunctionMode` is active."""
    return bool(torch._C._len_torch_function_stack())


def profiled() -> bool:
    """Whether a profiler is recording operators."""
    return bool(torch._C._autograd._profiler_enabled())


def below_autograd() -> bool:
    """Whether this code runs inside an operator, below its autograd kernel."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def compilations() -> tuple[int, int]:
    """How often Dynamo has compiled the current function, this time included, and its recompile limit."""
    from torch._dynamo import config
    from torch._guards import CompileContext

    context = CompileContext.current_compile_id()
    return (context.frame_compile_id or 0) + 1 if context else 1, config.recompile_limit


@dataclass
class _Pairs:
    """Compiles forward and backward together when AOTAutograd partitions; returns each when AOTAutograd asks."""

    compiler: Compiler
    compiled: tuple[Boxed, Boxed] | None = None
    undefined: Sequence[int] = ()
    """Places of the gradients, among the inputs of backward, that the compiled backward does without."""
    without: fx.GraphModule | None = None

    def partition(
        self, joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.compiler.joint(joint.graph)
        forward, backward = cut(joint, num_fwd_outputs, self.compiler.saved)
        if undefined := [] if compiled_autograd_is_on() else expected_undefined(backward.graph):
            without = copied(backward)
            if self.compiler.without_gradients(without.graph, undefined):
                self.undefined, self.without = undefined, without
        self.compiled = self.compiler.compile_pair(forward, self.without or backward)
        return forward, backward

    def forward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        assert self.compiled is not None
        return _boxed(self.compiler.repeated(CallableGraph(gm, "forward", _static_inputs()), self.compiled[0]))

    def backward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        from torch._dynamo import disable

        assert self.compiled is not None
        run = self._repeated(self.without or gm, self.compiled[1])
        if self.undefined:

            def whole() -> Boxed:
                return self._repeated(gm, self.compiler.compile_backward(gm))

            run = BackwardByGradients(gm.graph, self.undefined, run, whole)
        # Dynamo may be tracing the user's call of backward.
        untraced: Boxed = disable(_boxed(run), reason="it is compiled already")
        return untraced

    def _repeated(self, backward: fx.GraphModule, run: Boxed) -> Boxed:
        inputs = backward.graph.find_nodes(op="placeholder")
        saved = [place for place, node in enumerate(inputs) if not is_tangent(node)]
        return self.compiler.repeated(CallableGraph(backward, "backward", saved), run)

    def inference(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        self.compiler.joint(gm.graph)
        run = self.compiler.compile_inference(gm)
        return _boxed(self.compiler.repeated(CallableGraph(gm, "inference", _static_inputs()), run))


def _static_inputs() -> Sequence[int]:
    """Indices of parameters and buffers among the inputs of the forward graph that is being compiled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata.static_input_indices if context and context.fw_metadata else ()


def _boxed(function: Boxed) -> Boxed:
    """Mark a function that takes its arguments as a list and may empty it."""

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


Saver = Callable[[fx.Graph, Sequence[fx.Node], set[fx.Node]], Sequence[fx.Node]]


def cut(joint: fx.GraphModule, num_fwd_outputs: int, saver: Saver) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph into forward and backward; `saver` chooses which forward values are saved."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    graph = joint.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = {n for n in inputs if is_tangent(n)}
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    _mark_overwritten(graph, inputs)
    forward_results, backward_results = (
        [n for n in part if isinstance(n, fx.Node)] for part in (results[:num_fwd_outputs], results[num_fwd_outputs:])
    )
    # Forward computes only what its results need; eager computes the rest in backward too.
    early = {n for n in graph.nodes if n.meta.get(IN_FORWARD)}
    forward = _closure({*forward_results, *inputs, *early} - tangents, lambda n: n.all_input_nodes)
    forward |= {user for n in forward for user in n.users if user.target is operator.getitem}
    backward = _closure(set(backward_results), lambda n: n.all_input_nodes) - forward
    needed = [n for n in graph.nodes if n in forward and (n in backward_results or backward & n.users.keys())]
    kept = list(saver(graph, needed, forward))
    needed_again = _closure(set(backward_results) - set(kept), lambda n: set(n.all_input_nodes) - set(kept))
    # Sizes of the views that backward makes again.
    kept += [n for n in graph.nodes if n in forward & needed_again and isinstance(n.meta.get("val"), _SYMBOLS)]
    symbolic = [n for n in kept if isinstance(n.meta.get("val"), _SYMBOLS)]
    opaque = [n for n in kept if n not in symbolic and not isinstance(n.meta.get("val"), torch.Tensor)]
    values = [n for n in kept if n not in symbolic and n not in opaque]
    # PyTorch 2.11 takes opaque values (device meshes, process groups) among the tensors and sorts them out itself.
    apart = "saved_opaque_nodes" in inspect.signature(_extract_fwd_bwd_modules).parameters
    extra: dict[str, Any] = {"saved_opaque_nodes": opaque} if apart else {}
    modules: tuple[fx.GraphModule, fx.GraphModule] = _extract_fwd_bwd_modules(
        joint,
        saved_values=values if apart else values + opaque,
        saved_sym_nodes=symbolic,
        num_fwd_outputs=num_fwd_outputs,
        **extra,
    )
    return modules


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
"""Classes of a saved number."""


IN_FORWARD = "in_forward"
"""Metadata key: forward computes this value for backward, since what it is computed from is larger."""
OVERWRITTEN = "overwritten"
"""Metadata key: the forward call writes to this input, so backward cannot recompute from its old value."""


def _mark_overwritten(graph: fx.Graph, inputs: Sequence[fx.Node]) -> None:
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    descriptions = graph.output_node().meta.get("desc", ())
    after_the_call = [d.mutated_input for d in descriptions if isinstance(d, InputMutationAOTOutput)]
    for node in inputs:
        in_the_graph = any(u.target is torch.ops.aten.copy_.default and u.args[0] is node for u in node.users)
        node.meta[OVERWRITTEN] = in_the_graph or node.meta.get("desc") in after_the_call


def _closure(start: set[fx.Node], step: Callable[[fx.Node], Any]) -> set[fx.Node]:
    found, todo = set(start), list(start)
    while todo:
        for node in step(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found
