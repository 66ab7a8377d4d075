"""What operators are predicted to take as fusion would join them, before fusion has run.

Operators with a body that read each other become one kernel, on either side of the cut; a library call stays one.
A kernel reads what it gets from outside once and writes what somebody outside reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import fx

from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.operators.table import row_of
from tilewright.passes.units import (
    behind_views,
    escaping,
    gradients,
    is_fusible,
    is_view,
    nbytes,
    readers,
    sources,
)

NEIGHBOURS = 3
"""How many operators away a kernel's neighbours reach."""
POINTWISE, ROWS, COLUMNS = 0.95, 0.70, 0.60
"""Shares of the floor that generated kernels reached in a transformer block of D 2048 on an H200, bf16: pointwise
chains, with reductions over rows (0.65 to 0.76), with sums over all rows beside them (0.54 to 0.72)."""
LIBRARY = 0.90
COLUMN_SUMS = {"aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"}
PICKED = {"aten.nll_loss_forward.default"}
"""Calls that read one element of each row of their first operand."""


class Groups:
    """The operators of one joint or inference graph, and how they would fall into kernels."""

    def __init__(self, graph: fx.Graph) -> None:
        self.backward = gradients(graph)

    def around(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """`nodes` and the pointwise operators near them that fusion could join with them."""
        found = set(nodes)
        edge = set(found)
        for _ in range(NEIGHBOURS):
            edge = {other for node in edge for other in self._beside(node)} - found
            found |= edge
        return found

    def _beside(self, node: fx.Node) -> Iterator[fx.Node]:
        side = node in self.backward
        for other in (*sources(node), *readers(node)):
            if (other in self.backward) == side and _is_pointwise(other):
                yield other

    def predicted_us(self, nodes: set[fx.Node], profile: DeviceProfile) -> float:
        """Of the kernels and library calls that `nodes` become."""
        return sum(_predicted_us(group, profile) for group in self._joined(nodes))

    def _joined(self, nodes: set[fx.Node]) -> list[list[fx.Node]]:
        """`nodes` by kernel."""
        groups: list[list[fx.Node]] = []
        left = {node for node in nodes if node.op == "call_function" and not is_view(node)}
        while left:
            group, todo = [], [left.pop()]
            while todo:
                node = todo.pop()
                group.append(node)
                if is_fusible(node) is not None:
                    continue
                for other in {*sources(node), *readers(node)} & left:
                    if is_fusible(other) is None and (other in self.backward) == (node in self.backward):
                        left.discard(other)
                        todo.append(other)
            groups.append(group)
        return groups


def _is_pointwise(node: fx.Node) -> bool:
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.operator_class == "pointwise" and is_fusible(node) is None


def _predicted_us(group: list[fx.Node], profile: DeviceProfile) -> float:
    inside = set(group)
    read = {source for node in group for source in _read(node) if source not in inside}
    bytes_read = sum(map(nbytes, read))
    bytes_written = sum(map(nbytes, escaping(group)))
    moved = bytes_read + bytes_written
    floor, _ = floor_us(moved, 0, 0, "float32", moved, profile, "pointwise", bytes_written=bytes_written)
    return floor / min(map(_share_of_floor, group))


def _read(node: fx.Node) -> Iterator[fx.Node]:
    picked = node.all_input_nodes[0] if str(node.target) in PICKED else None
    return (behind_views(operand) for operand in node.all_input_nodes if operand is not picked)


def _share_of_floor(node: fx.Node) -> float:
    if is_fusible(node) is not None:
        return LIBRARY
    row = row_of(node.target)
    if row is None or row.operator_class != "reduction":
        return POINTWISE
    return COLUMNS if row.name in COLUMN_SUMS else ROWS
