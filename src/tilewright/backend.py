"""`torch.compile(model, backend="tilewright")`: wiring of capture, passes, emission and runtime."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from tilewright.capture import program_cache
from tilewright.capture.aot import Boxed, CallableGraph, Compiler, through_aot
from tilewright.capture.errors import StrictError, graph_break, watch
from tilewright.capture.second_derivative import SecondDerivative
from tilewright.compile.identity import keeps_programs, versions
from tilewright.compile.plan import GraphPlan
from tilewright.compile.planner import Planner
from tilewright.compile.recording import CompiledGraph, compilation_begins, current_recording
from tilewright.compile.recording import Recording as Recording
from tilewright.compile.recording import recording as recording
from tilewright.compile.symbolic import SymbolicGraph, SymbolicProgram, symbolic_program
from tilewright.emit.cpp import translation_unit
from tilewright.graph.size_symbols import Sizes, SizeSymbols, size_symbols
from tilewright.graph.source import source_line
from tilewright.graph.specialise import counted_inputs, size_key, sizes_are_given, specialise
from tilewright.graph.undefined import left_out
from tilewright.graph.views import written
from tilewright.hardware.target import target_of
from tilewright.launch.executor import EXTENSION
from tilewright.launch.generated import compile_together, kernel_of
from tilewright.launch.triton import hash_ahead
from tilewright.loops.sizes import NotAlike
from tilewright.operators.table import row_of
from tilewright.pytorch.state import compilations
from tilewright.records import outcomes
from tilewright.records.errors import (
    CaptureError,
    KernelError,
    TilewrightError,
    first_line,
    shown_cause,
    strict,
    warn_once,
)
from tilewright.records.program import Decision, Fallback, GraphName, Verdict
from tilewright.records.progress import tell
from tilewright.report.progress import progress_of
from tilewright.runtime.assemble import Scheduled, assemble, interpreted
from tilewright.runtime.by_size import MOST_SIZES, ExecutableBySize
from tilewright.runtime.compiled_call import compiled_call
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import PlanMismatch
from tilewright.runtime.overlap import UnlessOverlapping
from tilewright.runtime.replay import Replay, asks_for_replay, obstacle
from tilewright.runtime.until_built import once_built

if TYPE_CHECKING:
    from tilewright.capture.plain_call import Called


BySize = dict[GraphName, tuple[fx.Graph, SizeSymbols | None]]
"""Graphs with symbolic sizes, and what is known of their symbols."""


def backend(
    module: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The torch.compile backend. What it cannot compile runs as PyTorch runs it, with one line that says so.

    `torch.compile(model, backend="tilewright", mode="reduce-overhead")`, or `options={"cuda_graphs": True}`:
    compiled graphs are replayed as CUDA graphs from their third call on (`runtime/replay.py`). As with PyTorch's
    own backend the results of a call are overwritten by the next one then; those to be kept must be cloned.
    `options={"hand_written": False}`: no hand-written kernel takes part, only generated ones and library calls.
    """
    compilation_begins()
    options = options or {}
    record = current_recording() or Recording()
    hand_written = options.get("hand_written", True)
    planner = Planner(target_of(_device(inputs)), hand_written=hand_written, decisions=record.decisions)
    # A rewrite that fails halfway must leave nothing of itself in what runs instead.
    untouched = fx.Graph()
    untouched.output(untouched.graph_copy(module.graph, {}))
    eager = cache(partial(fx.GraphModule, module, untouched))
    compiler = _Compiler(record, planner, asks_for_replay(mode, options), eager)
    compiler.note_limits(module)
    try:
        with progress_of(f"tilewright compiles the graph at {_place(untouched)}"):
            compiled = through_aot(compiler, module, list(inputs))
            is_recorded = current_recording() is not None
            return once_built(compiled, eager, planner.target, is_recorded) if compiler.has_compiled else compiled
    except CaptureError as error:
        compiler.leave_to_pytorch(Fallback("the graph", _place(module.graph), str(error)), error)
        return eager()


def _leave_to_pytorch(record: Recording, fallback: Fallback, error: Exception | None = None) -> None:
    """Note something that runs as PyTorch runs it; an error where TILEWRIGHT_STRICT forbids that."""
    if isinstance(error, StrictError):
        raise error
    record.fallbacks.append(fallback)
    if strict():
        raise StrictError(fallback, error) from shown_cause(error)
    warn_once(f"{fallback.what} at {fallback.where} runs as PyTorch runs it: {fallback.why}")


if torch.cuda.is_initialized():
    hash_ahead()
    # Beside the first compilation.
    EXTENSION.module()
watch(backend, lambda skipped: _leave_to_pytorch(current_recording() or Recording(), skipped))


class _Compiler(Compiler):
    def __init__(self, record: Recording, planner: Planner, replays: bool, eager: Callable[[], fx.GraphModule]) -> None:
        super().__init__(planner)
        self.record = record
        self.planner = planner
        self.replays = replays
        self.eager = eager
        """Makes the captured module, which no rewrite has changed."""
        self.replayed_forward: Replay | None = None
        self.graphs: list[GraphPlan] = []
        """As they were compiled last; none where PyTorch runs them, or their sizes are symbolic."""
        self.by_size: BySize = {}
        """The graphs with symbolic sizes, as they were traced."""
        self.sizes_kept_for: str | None = None
        """The key of the program whose plans are kept for each size of its calls."""

    @property
    def has_compiled(self) -> bool:
        """Whether not all graphs were left to PyTorch, as they are without a C++ compiler; kept programs count."""
        return bool(self.graphs or self.by_size) or current_recording() is None

    def identity(self) -> Sequence[str] | None:
        # Who records wants what only planning gives: decisions, regions, fallbacks.
        if current_recording() is not None or not keeps_programs():
            return None
        planner = self.planner
        return [*versions(), repr(planner.target), str(planner.hand_written), str(self.replays)]

    def plan_to_keep(self) -> tuple[list[GraphPlan] | BySize, list[fx.Graph]] | None:
        # A replay reads what symbolic values are, and so does a backward whose sizes depend on data.
        graphs = [graph for graph, _ in self.by_size.values()]
        if graphs and not self.replays and not any(map(counted_inputs, graphs)):
            return self.by_size, graphs
        return _bare(self.graphs)

    def compile_planned(self, plan: list[GraphPlan] | BySize) -> list[Boxed]:
        return self._compile_graphs(plan) if isinstance(plan, list) else self._compile_by_size(plan)

    def wrap_entry(self, called: Called) -> Callable[..., Any]:
        return compiled_call(called)

    def second_derivative(self, obstacle: str) -> SecondDerivative:
        device = self.planner.target.profile.device
        autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)

        def run(*args: Any) -> Any:
            with torch.autocast(*autocast):
                return self.eager()(*args)

        @cache
        def report() -> None:
            place, why = _place(self.eager().graph), "AOTAutograd differentiates a compiled graph once"
            self.leave_to_pytorch(Fallback("a second derivative of the graph", place, why))

        return SecondDerivative(run, report, obstacle)

    def guard_written(self, called: Callable[..., Any], written: Sequence[bool]) -> Callable[..., Any]:
        error = CaptureError("arguments of a call share memory that it writes")

        @cache
        def eager() -> Callable[..., Any]:
            module = self.eager()
            self.leave_to_pytorch(Fallback("a call", _place(module.graph), str(error)), error)
            return module.forward

        return UnlessOverlapping(called, eager, written)

    def keep_sizes(self, key: str) -> None:
        self.sizes_kept_for = key

    def compile_lost(self, error: Exception) -> None:
        if strict():
            raise error
        warn_once(f"a compiled program that was kept cannot be used, and is compiled anew: {first_line(error)}")

    def wrap_replay(self, graph: CallableGraph, run: Boxed) -> Boxed:
        forward = self.replayed_forward
        backward = graph.kind == "backward"
        if not self.replays or (backward and forward is None):
            return run
        name: GraphName = "backward" if backward else "forward"
        refuse = partial(self._stays_by_calls, name, graph.module, "tried and lost")
        if why := obstacle(graph):
            self._stays_by_calls(name, graph.module, "impossible", why)
            # The replays of a forward must know of its backward all the same.
            return run if forward is None else Replay(run, graph, refuse, forward, is_refused=True)
        replay = Replay(run, graph, refuse, forward)
        if graph.kind == "forward":
            self.replayed_forward = replay
        self._note_replay(name, graph.module, "taken", "to be recorded at its third call and replayed from then on")
        return replay

    def _stays_by_calls(self, name: GraphName, module: fx.GraphModule, verdict: Verdict, why: str) -> None:
        """Note a graph that no CUDA graph replays; an error where TILEWRIGHT_STRICT forbids that."""
        self._note_replay(name, module, verdict, why)
        line = f"the {name} graph at {_place(module.graph)} is not replayed as a CUDA graph: {why}"
        if strict():
            raise CaptureError(line)
        warn_once(line)

    def _note_replay(self, name: GraphName, module: fx.GraphModule, verdict: Verdict, reason: str) -> None:
        place = _place(module.graph)
        self.record.decisions.append(
            Decision(name, "launches", "one CUDA graph", verdict, reason, source=place, passed_by="replay")
        )

    def note_limits(self, module: fx.GraphModule) -> None:
        """Say where Dynamo gave up: at a graph break, or soon because of too many variants."""
        if found := graph_break(module):
            self.leave_to_pytorch(found)
        count, limit = compilations()
        if count == limit:
            warn_once(
                f"the function at {_place(module.graph)} was compiled {count} times, as often as PyTorch allows "
                "(torch._dynamo.config.recompile_limit): further variants run as PyTorch runs them"
            )

    def leave_to_pytorch(self, fallback: Fallback, error: Exception | None = None) -> None:
        _leave_to_pytorch(self.record, fallback, error)

    def compile(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        if not any(map(sizes_are_given, modules.values())):
            compiled, self.graphs = self._try(modules)
            return compiled
        self.by_size = {name: (module.graph, size_symbols(module.graph)) for name, module in modules.items()}
        return self._compile_by_size(self.by_size)

    def _compile_by_size(self, graphs: BySize) -> list[Boxed]:
        return [
            self._sized(name, module, symbols)
            for name, (graph, symbols) in graphs.items()
            if (module := graph.owning_module) is not None
        ]

    def _sized(self, name: GraphName, module: fx.GraphModule, symbols: SizeSymbols | None) -> Boxed:
        def for_sizes_of(args: list[Any]) -> Boxed:
            key = None
            if self.sizes_kept_for is not None:
                sizes = left_out(module.graph), size_key(args, offsets=True)
                key = program_cache.key_for_sizes(self.sizes_kept_for, name, sizes)
                if (loaded := self._loaded_for_sizes(key)) is not None:
                    return loaded
            try:
                fixed = specialise(module, args)
            # After any error the graph with symbolic sizes still runs.
            except Exception as error:
                self.leave_to_pytorch(_fallback({name: module}, error), error)
                return interpreted(module.graph)
            with outcomes.recording() as looked_up:
                (run,), graphs = self._try({name: fixed})
            if key is not None and (planned := _bare(graphs)) is not None:
                program_cache.keep_plan(key, *planned, looked_up)
            return run

        def for_all_sizes(sizes: Sizes, args: list[Any]) -> SymbolicProgram | None:
            assert symbols is not None
            graph = SymbolicGraph(name, module, symbols, self.planner, self.sizes_kept_for)
            give_up = partial(self._run_by_pytorch, _place(module.graph))
            try:
                program = symbolic_program(graph, sizes, args, give_up, self.compile_lost)
            except NotAlike as error:
                reason = f"it is compiled for each of its sizes: {error}"
                decision = Decision(name, "sizes", "one program", "impossible", reason, source=_place(module.graph))
                self.record.decisions.append(decision)
                return None
            self._note_unknown(program.plan.graph)
            self.record.graphs.append(CompiledGraph(program.plan, program.example))
            return program

        limit = cache(partial(self.past_limit, _place(module.graph)))
        return ExecutableBySize(module.graph, symbols, for_all_sizes, for_sizes_of, interpreted(module.graph), limit)

    def _loaded_for_sizes(self, key: str) -> Boxed | None:
        """Compiles the kept plan for the sizes of a call; None if there is no usable one."""
        try:
            plan = program_cache.load_plan(key)
            return None if plan is None else self._compile_graphs(plan)[0]
        # After any error the sizes can be planned as if nothing had been kept.
        except Exception as error:
            program_cache.discard(key)
            self.compile_lost(error)
            return None

    def past_limit(self, place: str) -> None:
        """Say that further sizes run as PyTorch runs them."""
        error = CaptureError(f"it was compiled for {MOST_SIZES} different sizes, and this is one more")
        self.leave_to_pytorch(Fallback("the graph", place, str(error)), error)

    def _try(self, modules: dict[GraphName, fx.GraphModule]) -> tuple[list[Boxed], list[GraphPlan]]:
        """The graphs compiled, and their plans: none where PyTorch runs them."""
        try:
            plan = self.planner.plan({name: module.graph for name, module in modules.items()})
            return self._compile_graphs(plan.graphs), plan.graphs
        # A kernel that cannot be made, for whatever reason, must not take the user's program with it.
        except Exception as error:
            self.leave_to_pytorch(_fallback(modules, error), error)
            return [interpreted(module.graph) for module in modules.values()], []

    def _compile_graphs(self, graphs: Sequence[GraphPlan]) -> list[Boxed]:
        in_cpp = [
            graph.sources[region.name]
            for graph in graphs
            for region in graph.fusion.regions
            if region.language == "c++"
        ]
        tell("C++ kernels compiled", 0, len(in_cpp))
        library = load(translation_unit(list(dict.fromkeys(in_cpp)))) if in_cpp else None
        in_triton = [
            (kernel_of(region.lowered.nest, graph.sources[region.name]), region.device)
            for graph in graphs
            for region in graph.fusion.regions
            if region.device.type == "cuda"
        ]
        compile_together(in_triton)
        compiled = []
        for graph in graphs:
            compiled.append(self._assemble(graph, library))
            self._note_unknown(graph.graph)
        self.record.graphs += compiled
        return [graph.executable for graph in compiled]

    def _assemble(self, graph: GraphPlan, library: ctypes.CDLL | None) -> CompiledGraph:
        """The graph's executable; the operators of a kernel that does not compile run as PyTorch runs them."""
        while True:
            try:
                give_up = partial(self._run_by_pytorch, _place(graph.graph))
                scheduled = Scheduled(graph.graph, graph.units)
                return CompiledGraph(graph, assemble(scheduled, graph.sources, library, give_up))
            except KernelError as error:
                lost = next(region for region in graph.fusion.regions if region.kernel == error.kernel)
                place = next(filter(None, map(source_line, lost.members)), lost.name)
                self.leave_to_pytorch(Fallback(f"the kernel {lost.name}", place, first_line(error)), error)
                graph = graph.without(lost.name, first_line(error))

    def _run_by_pytorch(self, place: str, error: PlanMismatch) -> None:
        self.leave_to_pytorch(Fallback("a compiled graph", place, str(error)))

    def _note_unknown(self, graph: fx.Graph) -> None:
        """Record the operators that the table does not know; the rest of the graph is compiled all the same."""
        for node in graph.nodes:
            # A size that depends on data is read from its tensor.
            is_number = isinstance(node.meta.get("val"), torch.SymInt)
            known = not isinstance(node.target, OpOverload) or row_of(node.target) or written(node) or is_number
            if node.op == "call_function" and not known:
                why = "it has no row in the operator table"
                self.record.fallbacks.append(Fallback(str(node.target), source_line(node) or node.name, why))


def _bare(graphs: Sequence[GraphPlan]) -> tuple[list[GraphPlan], list[fx.Graph]] | None:
    return ([graph.bare() for graph in graphs], [graph.graph for graph in graphs]) if graphs else None


def _fallback(modules: dict[GraphName, fx.GraphModule], error: Exception) -> Fallback:
    why = str(error) if isinstance(error, TilewrightError) else f"{type(error).__name__}: {first_line(error)}"
    graph = next(iter(modules.values())).graph
    return Fallback(f"the {' and '.join(modules)} graph", _place(graph), why)


def _place(graph: fx.Graph) -> str:
    """The first line of the user's program that `graph` computes."""
    return next((line for node in graph.nodes if (line := source_line(node))), "an unknown place")


def _device(inputs: Sequence[Any]) -> torch.device:
    """Where a program runs: the first device among its inputs that is no CPU."""
    devices = [leaf.device for leaf in tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
