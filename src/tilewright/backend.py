"""`torch.compile(model, backend="tilewright")`: wiring of capture, passes, emission and runtime."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tilewright.emit.cpp import emit_cpp, translation_unit
from tilewright.graph.capture import Boxed, through_aot
from tilewright.passes.fusion import Fusion, fuse
from tilewright.passes.pipeline import optimise_joint, optimise_module
from tilewright.passes.recompute import values_to_save
from tilewright.passes.schedule import schedule
from tilewright.records.errors import TilewrightError
from tilewright.records.program import Decision, Fallback, GraphName
from tilewright.runtime.assemble import Scheduled, assemble
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import Executable
from tilewright.tune.settle import settle


@dataclass
class CompiledGraph:
    """One graph as it was captured and as it runs."""

    name: GraphName
    before: fx.Graph
    after: fx.Graph
    fusion: Fusion
    scheduled: Scheduled
    sources: dict[str, str]
    executable: Executable | None = None


@dataclass
class Recording:
    """What compilations inside `recording()` learned."""

    graphs: list[CompiledGraph] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)


_recording: ContextVar[Recording | None] = ContextVar("tilewright_recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Collect all graphs, decisions and fallbacks of compilations in this block."""
    record = Recording()
    token = _recording.set(record)
    try:
        yield record
    finally:
        _recording.reset(token)


def strict() -> bool:
    return os.environ.get("TILEWRIGHT_STRICT") == "1"


def backend(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """The torch.compile backend. What it cannot compile runs as PyTorch runs it, with one line that says so."""
    record = _recording.get() or Recording()
    return through_aot(_Compiler(record), module, list(inputs))


class _Compiler:
    def __init__(self, record: Recording) -> None:
        self.record = record

    def before_autograd(self, module: fx.GraphModule) -> None:
        self.record.decisions += optimise_module(module)

    def joint(self, graph: fx.Graph) -> None:
        self.record.decisions += optimise_joint(graph)

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        return values_to_save(graph, needed, forward)

    def compile_pair(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Boxed, Boxed]:
        first, second = self._compile({"forward": forward, "backward": backward})
        return first, second

    def compile_inference(self, module: fx.GraphModule) -> Boxed:
        return self._compile({"forward": module})[0]

    def _compile(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        try:
            return self._compile_all(modules)
        except (TilewrightError, NotImplementedError) as error:
            if strict():
                raise
            fallback = Fallback("+".join(modules), "graph", str(error))
            self.record.fallbacks.append(fallback)
            print(f"tilewright: {fallback.what} {fallback.where} runs as PyTorch runs it: {error}", file=sys.stderr)
            return [_interpret(module) for module in modules.values()]

    def _compile_all(self, modules: dict[GraphName, fx.GraphModule]) -> list[Boxed]:
        compiled = [_plan(name, module) for name, module in modules.items()]
        sources = [text for graph in compiled for text in graph.sources.values()]
        library = load(translation_unit(sources)) if sources else None
        for graph in compiled:
            graph.executable = assemble(graph.scheduled, library)
        self.record.graphs += compiled
        return [graph.executable for graph in compiled if graph.executable]


def _interpret(module: fx.GraphModule) -> Boxed:
    def run(args: list[Any]) -> Sequence[Any]:
        inputs = list(args)
        args.clear()
        return module(*inputs)  # type: ignore[no-any-return]

    return run


def _plan(name: GraphName, module: fx.GraphModule) -> CompiledGraph:
    fusion = settle(fuse(module.graph, name), measure=False)
    scheduled = Scheduled(module.graph, schedule(module.graph, fusion.regions))
    sources = {r.name: emit_cpp(r.lowered.nest) for r in fusion.regions}
    return CompiledGraph(name, module.graph, module.graph, fusion, scheduled, sources)



