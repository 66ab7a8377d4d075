"""Programs as ATen graphs. The only file that touches PyTorch's private modules (torch 2.11 to 2.13).

Dynamo captures, a hook rewrites what it captured (attention, while it still is one), AOTAutograd
differentiates and functionalises, the joint graph is simplified and cut here into forward and
backward, and a compiler turns each into something callable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

Boxed = Callable[[list[Any]], Sequence[Any]]
Kind = Literal["forward", "backward", "inference"]


class Compiler(Protocol):
    """What a backend does at each step of a capture."""

    def before_autograd(self, module: fx.GraphModule) -> None:
        """Rewrite the captured torch-level graph in place."""

    def joint(self, graph: fx.Graph) -> None:
        """Rewrite the joint forward and backward graph in place."""

    def saved(self, graph: fx.Graph, needed: Sequence[fx.Node], forward: set[fx.Node]) -> Sequence[fx.Node]:
        """Of the forward values that backward needs, those to keep; it computes the others again."""

    def compile_pair(self, forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[Boxed, Boxed]: ...

    def compile_inference(self, module: fx.GraphModule) -> Boxed: ...


def through_aot(compiler: Compiler, module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile a captured module with `compiler`; gives a callable with autograd attached."""
    from torch._dynamo.backends.common import aot_autograd

    compiler.before_autograd(module)
    pairs = _Pairs(compiler)
    compile_with = aot_autograd(
        fw_compiler=pairs.forward,
        bw_compiler=pairs.backward,
        inference_compiler=pairs.inference,
        partition_fn=pairs.partition,
        keep_inference_input_mutations=True,
    )
    return compile_with(module, inputs)  # type: ignore[no-any-return]


@dataclass
class _Pairs:
    """Compiles forward and backward together when the joint graph is cut, and hands each out when asked."""

    compiler: Compiler
    compiled: tuple[Boxed, Boxed] | None = None

    def partition(
        self, joint: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, **_: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.compiler.joint(joint.graph)
        forward, backward = cut(joint, num_fwd_outputs, self.compiler.saved)
        self.compiled = self.compiler.compile_pair(forward, backward)
        return forward, backward

    def forward(self, _module: fx.GraphModule, _inputs: object) -> Boxed:
        assert self.compiled is not None
        return _boxed(self.compiled[0])

    def backward(self, _module: fx.GraphModule, _inputs: object) -> Boxed:
        assert self.compiled is not None
        return _boxed(self.compiled[1])

    def inference(self, module: fx.GraphModule, _inputs: object) -> Boxed:
        self.compiler.joint(module.graph)
        return _boxed(self.compiler.compile_inference(module))


def _boxed(function: Boxed) -> Boxed:
    """AOTAutograd hands a boxed function the list it may empty."""

    def call(args: list[Any]) -> Sequence[Any]:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


Saver = Callable[[fx.Graph, Sequence[fx.Node], set[fx.Node]], Sequence[fx.Node]]


def cut(joint: fx.GraphModule, num_fwd_outputs: int, saver: Saver) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph; `saver` chooses which forward values cross."""
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    graph = joint.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    tangents = {n for n in inputs if "tangents" in str(n.target)}
    results = graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    behind = _closure(tangents, lambda n: n.users)
    forward = {n for n in graph.nodes if n not in behind and n.op not in ("output",)}
    backward_results = [n for n in results[num_fwd_outputs:] if isinstance(n, fx.Node)]
    wanted = _closure(set(backward_results), lambda n: n.all_input_nodes)
    needed = [
        n
        for n in graph.nodes
        if n in forward and (n in backward_results or any(u in behind and u in wanted for u in n.users))
    ]
    kept = list(saver(graph, needed, forward))
    symbolic = [n for n in kept if not isinstance(n.meta.get("val"), torch.Tensor)]
    values = [n for n in kept if isinstance(n.meta.get("val"), torch.Tensor)]
    return _extract_fwd_bwd_modules(  # type: ignore[no-any-return]
        joint, saved_values=values, saved_sym_nodes=symbolic, num_fwd_outputs=num_fwd_outputs
    )


def _closure(start: set[fx.Node], step: Callable[[fx.Node], Any]) -> set[fx.Node]:
    found, todo = set(start), list(start)
    while todo:
        for node in step(todo.pop()):
            if node not in found:
                found.add(node)
                todo.append(node)
    return found
