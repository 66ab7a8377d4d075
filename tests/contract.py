"""Compiled programs against the numbers contract, and what they run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.proof import exact_in_any_dtype, run, truth_of
from tilewright.measure.truth.verify import verify
from tilewright.records.measurement import Verified
from tilewright.records.suite import Suite


def recorded(function: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Recording]:
    """The function under the backend, with `options` of `torch.compile`, and what its compilations learn.

    Nothing compiled before is used; sizes are fixed and graph breaks errors unless the options say otherwise.
    """
    found = Recording()

    def noting(module: Any, inputs: Any, **rest: Any) -> Callable[..., Any]:
        with recording() as record:
            # What is compiled or decided later, too, goes to these lists.
            record.graphs, record.decisions, record.fallbacks = found.graphs, found.decisions, found.fallbacks
            return backend(module, inputs, **rest)

    torch._dynamo.reset()
    return torch.compile(function, backend=noting, **{"fullgraph": True, "dynamic": False, **options}), found


def keeps_contract(
    function: Callable[..., Any], inputs: Sequence[Any], *, training: bool = True, **options: Any
) -> Recording:
    """Compiled whole, `function` gives results and, with `training`, gradients within the contract."""
    call, record = recorded(function, **options)
    check(function, call, inputs, training=training)
    return record


def check(function: Callable[..., Any], call: Callable[..., Any], inputs: Sequence[Any], **options: Any) -> None:
    """`call`, compiled of `function`, keeps the contract on these inputs; options of `verify`."""
    assert [row for row in verify(function, call, inputs, **options) if not row.ok] == []


def nodes(record: Recording) -> list[fx.Node]:
    return [node for graph in record.graphs for node in graph.plan.graph.nodes]


def targets(record: Recording) -> list[str]:
    """The operators of all graphs, in order."""
    return [str(node.target) for node in nodes(record) if node.op == "call_function"]


def called(record: Recording, word: str) -> list[Any]:
    """The calls of operators with `word` in their names."""
    return [node for node in nodes(record) if node.op == "call_function" and word in str(node.target)]


def launched(record: Recording) -> list[str]:
    """The launches of the graphs, in order: `kernel`, or the name of a library's or hand-written operator."""
    return [what for graph in record.graphs for _, what in graph.plan.launches()]


def own(record: Recording) -> set[str]:
    """Names of the hand-written operators that are launched."""
    return {what.split(".")[1] for what in launched(record) if what.startswith("tilewright.")}


def broken(
    suite: Suite, inputs: Sequence[Any], *functions: Callable[..., Any], seed: int = 0, backward: bool = True
) -> list[Verified]:
    """The outputs of each `function(*inputs)`, and with `backward` the gradients, that break the contract.

    The truth is `suite.reference` in float64 on the same rounded inputs and random draws. The error of the suite's
    `eager` (or `torch`) variant sets the bound. All runs start from the same state of the generators. The truth runs
    last, and all results are kept: none lies where another was, which would fill its gaps.
    """
    ours = [run(function, inputs, seed, backward=backward, tangent=_tangent) for function in functions]
    truth = truth_of(suite, inputs, seed, backward=backward, tangent=_tangent)
    rows = [(number, row) for number, one in enumerate(ours) for row in truth.compare(one)]
    return [replace(row, tensor=f"{row.tensor} of function {number}") for number, row in rows if not row.ok]


def _tangent(result: torch.Tensor, index: int) -> torch.Tensor:
    """The same incoming gradient for every implementation, drawn on its device."""
    generator = torch.Generator(result.device).manual_seed(1000 + index)
    return exact_in_any_dtype(torch.randn(result.shape, generator=generator, device=result.device)).to(result)
