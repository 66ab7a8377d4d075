"""Checks a graph after a rewrite: its structure, and that each result is what its call gives for its operands; and that
the rewrite asked no symbolic size what `calls.number` tells without a condition.

Calls that are not as they were before the rewrite, and readers of results that are not, run again on fake tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.snapshot import NodeState, Snapshot
from tilewright.graph.specialise import has_symbols
from tilewright.operators.table import row_of
from tilewright.pytorch.sizes import conditions_from

KEYS = ("val", "example_value")
"""Metadata of a node's result: of ATen operators, and of Dynamo's torch-level graphs."""
MODES = ("_enter_autocast", "_exit_autocast", "_enter_inference_mode")
"""Calls that change what other calls give."""

CHOOSES_LAYOUT = (torch.ops.aten.convolution_backward.default,)
"""Calls whose results may lie otherwise than planned: the library chooses, and they are copied when they run."""
CHOOSES_DTYPE = ("aten._fused_rms_norm_backward.default", "aten._native_batch_norm_legit_functional.default")
"""Calls that give other dtypes where they run: a formula a weight's gradient in the weight's, a GPU moments in fp32."""


OWN = f"{Path(__file__).parents[1]}/"


class VerificationFailed(AssertionError):
    """A rewrite left a graph that is not what its metadata says."""


def verify(graph: fx.Graph, before: Snapshot) -> None:
    """Raise VerificationFailed, or what `lint` raises, if `graph` is inconsistent where it differs from `before`."""
    now = Snapshot(graph)
    changed = {(old or new).node for old, new in now.changes(before)}  # type: ignore[union-attr]
    changed |= {node for node in now.nodes if _result(node) is not _result(before.nodes.get(node))}
    if asked := conditions_from(OWN, (x for node in graph.nodes for x in _tensors(_result(node)))):
        raise VerificationFailed(f"the program is captured again wherever this does not hold: {'; '.join(asked)}")
    if not changed and list(now.nodes) == list(before.nodes):
        return
    graph.lint()
    if any(getattr(node.target, "__name__", "") in MODES for node in graph.nodes):
        return
    changed |= {user for node in changed for user in node.users}
    for node in graph.nodes:
        if node in changed and node.op in ("call_function", "call_method"):
            _verify_call(node)


def _result(node: fx.Node | NodeState | None) -> Any:
    return None if node is None else next((node.meta[key] for key in KEYS if key in node.meta), None)


def _verify_call(node: fx.Node) -> None:
    expected = _result(node)
    mode = next((x.fake_mode for x in _tensors(expected) if hasattr(x, "fake_mode")), None)
    operands = [_result(operand) for operand in node.all_input_nodes]
    is_torchs = isinstance(node.target, (str, torch._ops.OpOverload)) or node.target is operator.getitem
    if mode is None or not is_torchs or any(x is None for x in operands):
        return
    if any(has_symbols(x) for value in (expected, *operands) for x in _tensors(value)):
        return
    args, kwargs = fx.map_arg((node.args, node.kwargs), _result)
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    with mode, torch.no_grad():
        given = function(*args, **kwargs)
    if str(node.target) in CHOOSES_DTYPE:
        return
    row = row_of(node.target)
    # A generated kernel writes the planned layout. Strides of a torch-level graph are the program's, until AOTAutograd
    # computes those of the rewritten one.
    keeps_layout = "val" in node.meta and node.target not in CHOOSES_LAYOUT and (row is None or row.body is None)
    describe = partial(_described, with_strides=keeps_layout)
    found = [*map(describe, _tensors(given))], [*map(describe, _tensors(expected))]
    if found[0] != found[1]:
        raise VerificationFailed(f"{node.name} = {node.format_node()} is {found[1]}, and gives {found[0]}")
    is_known = calls.is_view(node) or calls.gives_operand(node) or node.target is operator.getitem
    if "val" in node.meta and not is_known and _shares(given, operands):
        raise VerificationFailed(
            f"{node.name} = {node.format_node()} has memory of an operand and is not known as a view"
        )


def _described(x: torch.Tensor, *, with_strides: bool) -> str:
    # Along an axis of one element, and in a tensor of none, strides mean nothing.
    strides = [n for n, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    strides = strides if with_strides and x.numel() else []
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} strides {strides} on {x.device}"


def _shares(result: Any, operand: Any) -> bool:
    """Whether a result has the memory of an operand."""
    memories = {x.untyped_storage()._cdata for x in _tensors(operand)}
    return any(x.untyped_storage()._cdata in memories for x in _tensors(result))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
