"""Writes through windows of a tensor, which a compiled program would get wrong.

    t.unfold(0, 2, 2).mul_(2)     of five elements: PyTorch's functionalization puts 0 in place of the fifth

It takes the gradient of `unfold` for its inverse, and that is 0 between windows.
"""

from __future__ import annotations

from torch import fx

from tilewright.graph.canonical import canonical_name, memory_of, mutates, written_by
from tilewright.hardware.target import Target
from tilewright.records.errors import CaptureError


def refuse_written_windows(graph: fx.Graph, target: Target) -> None:
    """Raise CaptureError where a call of a torch-level graph writes to windows or to a view of them."""
    windows = set[fx.Node]()
    for node in graph.nodes:
        if mutates(node) and written_by(node) in windows:
            raise CaptureError("it writes through Tensor.unfold, where PyTorch loses the elements between windows")
        first = node.args[0] if node.args else None
        if not isinstance(first, fx.Node) or (first not in windows and canonical_name(node) != "unfold"):
            continue
        if memory_of(node) == memory_of(first):
            windows.add(node)
