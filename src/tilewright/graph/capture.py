"""Captures programs as ATen graphs. Only this room, `graph`, uses private modules of PyTorch (2.11 to 2.13).

Dynamo captures; a hook rewrites the captured graph (attention, before it is decomposed); AOTAutograd
differentiates and functionalises; the joint graph is simplified and partitioned here into forward and
backward; a compiler makes each callable. If Dynamo left sizes symbolic, `specialise.py` gives the graph
for the sizes of one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from tilewright.graph.partition import cut
from tilewright.graph.pytorch_state import compiled_autograd_is_on
from tilewright.graph.undefined import (
    BackwardByGradients,
    copied,
    expected_undefined,
    is_tangent,
    leave_undefined,
    tangents_of,
)
from tilewright.records import outcomes
from tilewright.records.errors import CaptureError, TilewrightError
from tilewright.records.outcomes import Outcome
from tilewright.records.program import GraphName

if TYPE_CHECKING:
    from tilewright.graph.program_cache import KeptProgram

Boxed = Callable[[list[Any]], Sequence[Any]]
Kind = Literal["forward", "backward", "inference"]


class Rewriter:
    """Rewrites a program at each step of its capture. This one leaves it as it is."""

    def before_autograd(self, module: fx.GraphModule) -> object:
        """Rewrite the captured torch-level graph in place."""

    def joint(self, graph: fx.Graph) -> object:
        """Rewrite the joint forward and backward graph, or one for inference, in place."""

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        """Of the forward values that backward needs, those to save; backward recomputes the others."""
        return needed

    def without_gradients(self, backward: fx.Graph, places: Sequence[int]) -> bool:
        """Take the incoming gradients at these places out of `backward`; False where it stays as it is."""
        return False


class Compiler:
    """What a backend does with the graphs of a capture, which `rewriter` rewrites. This one keeps nothing."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter

    def compile(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        """A function for each of these graphs, which are compiled together; that of inference is a forward."""
        raise NotImplementedError

    def repeated(self, graph: CallableGraph, run: Boxed) -> Boxed:
        """The function to call instead of `run`, which computes `graph`: `run` itself, or a replay of it."""
        return run

    def identity(self) -> Sequence[str] | None:
        """The cache key beside program and inputs; None to keep nothing on disk."""
        return None

    def planned(self) -> tuple[Any, Sequence[fx.Graph]] | None:
        """What was compiled last, as data over these graphs: forward and backward, or one for inference.

        Graphs with symbolic sizes are given as they were traced.
        """
        return None

    def compile_planned(self, plan: Any) -> list[Boxed]:
        """What `planned` gave, compiled: a function for each of the graphs."""
        raise NotImplementedError

    def keep_sizes(self, key: str) -> None:
        """Keep the plans for each call's sizes under this program's key."""

    def compile_lost(self, error: Exception) -> None:
        """Note that a program which was kept cannot be used."""


@dataclass(frozen=True)
class CallableGraph:
    """A compiled graph, its kind, and its static inputs."""

    module: fx.GraphModule
    kind: Kind
    static: Sequence[int]
    """Indices of inputs with the same address in every call: parameters and buffers; in backward, saved tensors."""


def through_aot(compiler: Compiler, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a captured module with `compiler`; returns a callable with autograd.

    A program in the cache (`program_cache.py`) is neither traced nor planned. Raises CaptureError if AOTAutograd or a
    rewrite cannot handle the module; TilewrightErrors of the compiler and Dynamo's control-flow errors pass through.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._dynamo.utils import flatten_graph_inputs

    from tilewright.graph import program_cache

    identity = compiler.identity()
    # Compiled autograd passes its tensors in a list.
    is_flat = not any(isinstance(x, (list, tuple, dict)) for x in inputs)
    try:
        key = program_cache.key_of(identity, module, inputs) if identity is not None and is_flat else None
        if key is not None and (loaded := _loaded(compiler, key, inputs)) is not None:
            return loaded
        with outcomes.asked() as asked:
            compiler.rewriter.before_autograd(module)
            if is_flat:
                return _traced(compiler, module, inputs, key, asked)
            through = partial(_traced, compiler)
            flat: Callable[..., Any] = flatten_graph_inputs(module, inputs, through)
            return flat
    except (TilewrightError, TorchDynamoException):
        raise
    except Exception as error:
        raise CaptureError(f"it cannot be traced: {type(error).__name__}: {first_line(error)}") from error


def _traced(
    compiler: Compiler,
    module: Any,
    inputs: Sequence[Any],
    key: str | None = None,
    asked: Mapping[str, Outcome | None] | None = None,
) -> Callable[..., Any]:
    """The module compiled by way of AOTAutograd, and kept for other processes if there is a key to keep it by."""
    # torch._dynamo.backends.common.aot_autograd would import Inductor's scheduler.
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from tilewright.graph import aot_entry, custom_operators, foreach, program_cache, size_guards

    program_cache.counts["compiled"] += 1
    pairs = _Pairs(compiler, is_kept=key is not None, is_symbolic=size_guards.are_symbolic(inputs))
    if key is None:
        functions = aot_entry.plain(pairs.forward, pairs.backward, pairs.inference)
    else:
        functions = aot_entry.compilers(pairs.forward, pairs.backward, pairs.inference)
    try:
        with aot_entry.observed() if key is not None else nullcontext(), warnings.catch_warnings():
            # A gradient that cannot be traced warns here and raises; the error has the message.
            warnings.filterwarnings("ignore", message="Error detected in .*Backward")
            compiled = aot_module_simplified(
                module,
                inputs,
                decompositions=foreach.by_tensor(),
                partition_fn=pairs.partition,
                keep_inference_input_mutations=True,
                **functions,
            )
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
        if not isinstance(module, fx.GraphModule) or not custom_operators.call_gradients(module):
            raise
        return _traced(compiler, module, inputs)
    if key is not None:
        try:
            if (program := pairs.program(compiled, asked or {})) is not None:
                program_cache.keep(key, program)
                compiler.keep_sizes(key)
        # The program is compiled all the same.
        except Exception as error:
            program_cache.counts[f"not kept: {first_line(error)}"] += 1
    return _finished(compiled, pairs.undefined)


def _loaded(compiler: Compiler, key: str, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """The program that was kept for `key`; None where there is none that can be used."""
    from tilewright.graph import aot_entry, packed, program_cache, size_guards

    program = program_cache.load(key)
    if program is None:
        return None
    if not size_guards.hold(program.guards, inputs):
        program_cache.discard(key)
        return None
    try:
        compiler.keep_sizes(key)
        pairs = _Pairs(compiler, packed=program.backward)
        runs = pairs.restored(packed.unpack(program.planned))
        compiled = aot_entry.wrapped(program.entry, runs, pairs.whole_backward if program.backward else None)
        size_guards.require(program.guards, inputs)
    # Whatever it is, the program can be compiled as if nothing had been kept.
    except Exception as error:
        program_cache.discard(key)
        compiler.compile_lost(error)
        return None
    program_cache.counts["loaded"] += 1
    return _finished(compiled, pairs.undefined)


def _finished(compiled: Callable[..., Any], undefined: Sequence[int]) -> Callable[..., Any]:
    from torch._dynamo import disable
    from torch._dynamo.utils import counters

    if undefined:
        compiled = _with_undefined_gradients(compiled)
    # Dynamo's DDPOptimizer reads here which of its buckets AOTAutograd compiled.
    counters["aot_autograd"]["total"] += 1
    untraced: Callable[..., Any] = disable(compiled, reason="it is compiled already")
    return untraced


def _with_undefined_gradients(compiled: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        results = compiled(*args)
        leave_undefined(results)
        return results

    return call


def first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


@dataclass
class _Pairs:
    """Compiles forward and backward together in AOTAutograd's partitioner; its compiler hooks then return each."""

    compiler: Compiler
    is_symbolic: bool = False
    """Whether sizes are symbolic."""
    is_kept: bool = False
    """Whether AOTAutograd's entry is kept: it reads the metadata of the backward graph that it is given."""
    compiled: Sequence[Boxed] = ()
    """Forward and backward."""
    undefined: Sequence[int] = ()
    """Places of the gradients, among the inputs of backward, that the compiled backward does without."""
    tangents: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """All gradients that come in, by place, where the compiled backward does without some."""
    backward_graph: fx.GraphModule | None = None
    """What the compiled backward computes."""
    whole: fx.GraphModule | None = None
    """The backward with all gradients, where the compiled one does without some."""
    packed: bytes | None = None
    """The backward with all gradients as it was traced."""
    static: Sequence[int] = ()

    def partition(
        self, joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.compiler.rewriter.joint(joint.graph)
        forward, backward = cut(joint, num_fwd_outputs, self.compiler.rewriter.saved)
        self.backward_graph = backward
        given = backward
        if self.is_kept:
            from tilewright.graph.packed import pack_or_none

            given = copied(backward)
            self.packed = pack_or_none(backward.graph, symbolic=self.is_symbolic)
        if undefined := [] if compiled_autograd_is_on() else expected_undefined(backward.graph):
            without = copied(backward)
            if self.compiler.rewriter.without_gradients(without.graph, undefined):
                self.undefined, self.tangents = undefined, tangents_of(backward.graph)
                self.backward_graph, self.whole = without, backward
        self.compiled = self.compiler.compile({"forward": forward, "backward": self.backward_graph})
        return forward, given

    def whole_backward(self) -> fx.GraphModule:
        """The backward with all gradients, not planned yet."""
        from tilewright.graph.packed import unpack

        if self.whole is not None:
            return self.whole
        assert self.packed is not None
        whole: fx.GraphModule = unpack(self.packed).owning_module
        return whole

    def forward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        assert self.compiled
        self.static = _static_inputs()
        _keep_saved_tensors()
        return _boxed(self.compiler.repeated(CallableGraph(gm, "forward", self.static), self.compiled[0]))

    def backward(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        from torch._dynamo import disable

        assert self.compiled and self.backward_graph is not None
        # Dynamo may be tracing the user's call of backward.
        untraced: Boxed = disable(
            self._backward(self.backward_graph, self.compiled[1]), reason="it is compiled already"
        )
        return untraced

    def _backward(self, graph: fx.GraphModule, run: Boxed) -> Boxed:
        run = self._repeated(graph, run)
        if self.undefined:
            run = BackwardByGradients(self.tangents, self.undefined, run, self._compile_whole)
        return _boxed(run)

    def _compile_whole(self) -> Boxed:
        whole = self.whole_backward()
        return self._repeated(whole, self.compiler.compile({"backward": whole})[0])

    def _repeated(self, backward: fx.GraphModule, run: Boxed) -> Boxed:
        inputs = backward.graph.find_nodes(op="placeholder")
        saved = [place for place, node in enumerate(inputs) if not is_tangent(node)]
        return self.compiler.repeated(CallableGraph(backward, "backward", saved), run)

    def inference(self, gm: fx.GraphModule, example_inputs: object) -> Boxed:
        self.compiler.rewriter.joint(gm.graph)
        (run,) = self.compiler.compile({"forward": gm})
        self.static = _static_inputs()
        return _boxed(self.compiler.repeated(CallableGraph(gm, "inference", self.static), run))

    def program(self, compiled: Any, asked: Mapping[str, Outcome | None]) -> KeptProgram | None:
        """What was compiled, to be kept; None where the compiler or AOTAutograd cannot say. Raises CaptureError."""
        from tilewright.graph import aot_entry, packed
        from tilewright.graph.program_cache import KeptProgram

        planned, made = self.compiler.planned(), aot_entry.entry_of(compiled)
        if planned is None or made is None:
            return None
        plan, graphs = planned
        entry, guards = made
        if len(graphs) > 1 and self.packed is None:
            raise CaptureError("its backward cannot be packed")
        state = plan, list(graphs), list(self.static), list(self.undefined), self.tangents
        content = packed.pack(state, graphs, symbolic=self.is_symbolic)
        return KeptProgram(entry, content, self.packed, dict(asked), guards if self.is_symbolic else None)

    def restored(self, state: Any) -> dict[Kind, Boxed]:
        """The functions of a program, from what `program` packed."""
        plan, graphs, self.static, self.undefined, self.tangents = state
        runs = self.compiler.compile_planned(plan)
        first: Kind = "inference" if len(graphs) == 1 else "forward"
        graph = CallableGraph(graphs[0].owning_module, first, self.static)
        made = {first: _boxed(self.compiler.repeated(graph, runs[0]))}
        if len(graphs) > 1:
            made["backward"] = self._backward(graphs[1].owning_module, runs[1])
        return made


def _static_inputs() -> Sequence[int]:
    """Indices of parameters and buffers among the inputs of the forward graph that is being compiled."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata.static_input_indices if context and context.fw_metadata else ()


def _keep_saved_tensors() -> None:
    """Backward overwrites nothing that forward saved: PyTorch may run it several times."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context and context.fw_metadata:
        context.fw_metadata.bw_donated_idxs = []


def _boxed(function: Boxed) -> Boxed:
    """Mark a function that takes its arguments as a list and may empty it."""

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
