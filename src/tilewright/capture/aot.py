"""Captures programs as ATen graphs. Only this package, `graph`, uses private modules of PyTorch (2.11 to 2.13).

Dynamo captures; a hook rewrites the captured graph (attention, before it is decomposed); AOTAutograd
differentiates and functionalises; the joint graph is simplified and partitioned here into forward and
backward; a compiler makes each callable. If Dynamo left sizes symbolic, `specialise.py` gives the graph
for the sizes of one call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import fx

from tilewright.records import outcomes
from tilewright.records.errors import CaptureError, TilewrightError, first_line
from tilewright.records.outcomes import Outcome
from tilewright.records.program import GraphName

if TYPE_CHECKING:
    from tilewright.capture.plain_call import Called
    from tilewright.capture.program_cache import KeptProgram
    from tilewright.capture.second_derivative import SecondDerivative

Boxed = Callable[[list[Any]], Sequence[Any]]
Kind = Literal["forward", "backward", "inference"]


class Rewriter:
    """Rewrites a program at each step of its capture. This one leaves it as it is."""

    @property
    def runs_on_cpu(self) -> bool:
        """Whether kernels for CPUs lay the results out; a program that is only planned for a GPU has the GPU's."""
        return True

    def before_autograd(self, module: fx.GraphModule) -> object:
        """Rewrite the captured torch-level graph in place."""

    def joint(self, graph: fx.Graph) -> object:
        """Rewrite the joint forward and backward graph, or one for inference, in place."""

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        """The forward values to save, of those that backward needs; it recomputes the others."""
        return needed


class Compiler:
    """How a backend compiles the graphs of a capture, which `rewriter` rewrites. This one keeps nothing."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter

    def compile(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        """A function for each of these graphs, which are compiled together; an inference graph is a forward."""
        raise NotImplementedError

    def wrap_replay(self, graph: CallableGraph, run: Boxed) -> Boxed:
        """The function to call instead of `run`, which computes `graph`: `run` itself, or a replay of it."""
        return run

    def identity(self) -> Sequence[str] | None:
        """The cache key beside program and inputs; None to keep nothing on disk."""
        return None

    def plan_to_keep(self) -> tuple[Any, Sequence[fx.Graph]] | None:
        """The last plan, as data over these graphs: forward and backward, or one for inference.

        Graphs with symbolic sizes are given as they were traced.
        """
        return None

    def compile_planned(self, plan: Any) -> list[Boxed]:
        """Compile the result of `planned`: a function for each of the graphs."""
        raise NotImplementedError

    def wrap_entry(self, called: Called) -> Callable[..., Any]:
        """The function to call instead of AOTAutograd's callable."""
        return called.otherwise

    def second_derivative(self, obstacle: str) -> SecondDerivative | None:
        """What gives gradients of compiled backwards a history, unless an obstacle forbids to run the graph again."""
        return None

    def guard_written(self, called: Callable[..., Any], written: Sequence[bool]) -> Callable[..., Any]:
        """The function to call instead of `called`, which changes the `written` ones of its arguments."""
        return called

    def keep_sizes(self, key: str) -> None:
        """Keep the plans for each call's sizes under this key of the program."""

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

    from tilewright.capture import program_cache
    from tilewright.capture.input_names import named_inputs

    identity = compiler.identity()
    # Compiled autograd passes its tensors in a list.
    is_flat = not any(isinstance(x, (list, tuple, dict)) for x in inputs)
    try:
        key = program_cache.key_of(identity, module, inputs) if identity is not None and is_flat else None
        if key is not None and (loaded := _loaded(compiler, key, inputs)) is not None:
            return loaded
        with outcomes.recording() as looked_up:
            names = named_inputs(module)
            compiler.rewriter.before_autograd(module)
            if is_flat:
                return _traced(compiler, module, inputs, names, key, looked_up)
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
    names: Sequence[str] = (),
    key: str | None = None,
    looked_up: Mapping[str, Outcome | None] | None = None,
) -> Callable[..., Any]:
    """The module compiled through AOTAutograd; with a key it is also kept for other processes."""
    # torch._dynamo.backends.common.aot_autograd would import Inductor's scheduler.
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from tilewright.capture import aot_entry, custom_operators, program_cache, size_guards
    from tilewright.capture.decompositions import decompositions
    from tilewright.capture.graph_pair import GraphPair

    program_cache.counts["compiled"] += 1
    on_floats = size_guards.on_floats()
    pairs = GraphPair(compiler, len(inputs), names, size_guards.are_symbolic(inputs), is_kept=key is not None)
    if key is None:
        functions = aot_entry.plain(pairs.forward, pairs.backward, pairs.inference)
    else:
        functions = aot_entry.compilers(pairs.forward, pairs.backward, pairs.inference)
    try:
        observed = aot_entry.observed() if key is not None else nullcontext()
        with aot_entry.as_eager(), observed, warnings.catch_warnings():
            # A gradient that cannot be traced warns here and raises; the error has the message.
            warnings.filterwarnings("ignore", message="Error detected in .*Backward")
            compiled = aot_module_simplified(
                module,
                inputs,
                decompositions=decompositions(on_cpu=compiler.rewriter.runs_on_cpu),
                partition_fn=pairs.partition,
                keep_inference_input_mutations=True,
                **functions,
            )
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode):
        if not isinstance(module, fx.GraphModule) or not custom_operators.call_gradients(module):
            raise
        return _traced(compiler, module, inputs, names)
    if key is not None:
        try:
            if size_guards.on_floats() > on_floats:
                raise CaptureError("a number among its inputs is specialised")
            if (program := pairs.program(compiled, looked_up or {})) is not None:
                program_cache.keep(key, program)
                compiler.keep_sizes(_sized(key, program))
        # The program is compiled all the same.
        except Exception as error:
            program_cache.counts[f"not kept: {first_line(error)}"] += 1
    if not isinstance(module, fx.GraphModule):
        # Compiled autograd's lists were flattened: the captured module does not take these arguments.
        pairs.written = ()
    return _finished(pairs.callable_of(compiled))


def _loaded(compiler: Compiler, key: str, inputs: Sequence[Any]) -> Callable[..., Any] | None:
    """The program kept for `key`; None if there is no usable one."""
    from tilewright.capture import aot_entry, packed, program_cache, size_guards
    from tilewright.capture.graph_pair import GraphPair

    program = program_cache.load(key)
    if program is None:
        return None
    if not size_guards.hold(program.guards, inputs):
        program_cache.discard(key)
        return None
    try:
        pairs = GraphPair(compiler, len(inputs), packed=program.backward)
        runs = pairs.restored(packed.unpack(program.planned))
        compiled = aot_entry.wrapped(program.entry, runs, pairs.whole_backward if program.backward else None)
        size_guards.require(program.guards, inputs)
        compiler.keep_sizes(_sized(key, program))
    # After any error the program can be compiled as if nothing had been kept.
    except Exception as error:
        program_cache.discard(key)
        compiler.compile_lost(error)
        return None
    program_cache.counts["loaded"] += 1
    return _finished(pairs.callable_of(compiled))


def _sized(key: str, program: KeptProgram) -> str:
    """The key of a program's plans for sizes. It includes the guards, since programs with others reuse `key`."""
    return f"{key} {program.guards}"


def _finished(compiled: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo import disable
    from torch._dynamo.utils import counters

    # Dynamo's DDPOptimizer reads here which of its buckets AOTAutograd compiled.
    counters["aot_autograd"]["total"] += 1
    untraced: Callable[..., Any] = disable(compiled, reason="it is compiled already")
    return untraced
