"""Predicts, before fusion runs, how fusion will group operators into kernels, and the time of these.

Adjacent operators with a body become one kernel if both are in forward or both in backward; a library call is its own
launch. A kernel reads each operand once and writes the values that have a reader outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
from torch import fx

from tilewright.cost.kinds import call_work, kind_name
from tilewright.cost.operators import counted
from tilewright.cost.work import Work, predicted_us
from tilewright.graph.calls import arguments, class_of, nbytes, readers, results, shape_of, strides_of
from tilewright.graph.undefined import gradients
from tilewright.hardware.profiles import DeviceProfile
from tilewright.passes.units import behind_views, is_fusible, is_view, live_out, sources
from tilewright.records.program import Cost

NEIGHBOURS = 3
"""The largest distance, in operators, of a kernel's neighbours."""
COLUMN_SUMS = {"aten.native_layer_norm_backward.default", "aten._fused_rms_norm_backward.default"}
TWO_REDUCTIONS = {f"aten.{name}.default" for name in ("native_layer_norm", "_softmax", "_log_softmax")}
"""The second one needs the result of the first."""
PICKED = {"aten.nll_loss_forward.default"}
"""Calls that read one element of each row of their first operand."""


class Groups:
    """Predicts how the operators of one joint or inference graph would be grouped into kernels."""

    def __init__(self, graph: fx.Graph) -> None:
        self.backward = gradients(graph)
        self.kernels_before: dict[fx.Node, int] = {}
        """For each node, the least number of kernels that must end before its kernel can start."""
        for node in graph.nodes:
            above = (self.kernels_before[operand] + _ends_kernel(operand) for operand in node.all_input_nodes)
            self.kernels_before[node] = max(above, default=0)

    def around(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """`nodes` and the pointwise operators near them that fusion could join with them."""
        found = set(nodes)
        edge = set(found)
        for _ in range(NEIGHBOURS):
            edge = {other for node in edge for other in self._beside(node)} - found
            found |= edge
        return found

    def _beside(self, node: fx.Node) -> Iterator[fx.Node]:
        for other in (*sources(node), *readers(node)):
            if class_of(other) == "pointwise" and is_fusible(other) is None and self._on_one_side(node, other):
                yield other

    def _on_one_side(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether both run in forward, or both in backward, after the same number of kernels."""
        return (a in self.backward) == (b in self.backward) and self.kernels_before[a] == self.kernels_before[b]

    def predicted_us(self, nodes: set[fx.Node], profile: DeviceProfile) -> float:
        """Predicted microseconds of the kernels and library calls that `nodes` become."""
        return sum(predicted_us(work, profile) for work in self.works(nodes))

    def works(self, nodes: set[fx.Node]) -> list[Work]:
        """The work of each of these kernels and library calls."""
        return [work_of(group) for group in self._joined(nodes)]

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
                    if is_fusible(other) is None and self._on_one_side(node, other):
                        left.discard(other)
                        todo.append(other)
            groups.append(group)
        return groups


def _ends_kernel(node: fx.Node) -> bool:
    """Whether readers of the result must be in another kernel: it is a library call or a reduction over rows."""
    if node.op != "call_function" or is_view(node):
        return False
    return is_fusible(node) is not None or _reduces_rows_away(node)


def work_of(group: Sequence[fx.Node]) -> Work:
    """The work of one kernel of these operators, or of one library call."""
    inside = set(group)
    read = {source for node in group for source in _read(node) if source not in inside}
    written = live_out(group)
    flops, transcendentals = map(sum, zip(*map(counted, group), strict=True))
    moved = sum(map(nbytes, read)), sum(map(nbytes, written))
    if is_fusible(group[0]) is not None:
        cost = Cost(bytes_read=moved[0], bytes_written=moved[1], flops=flops, transcendentals=transcendentals)
        return call_work(group[0], cost)
    return Work(_kind(group), *moved, flops, transcendentals)


def _read(node: fx.Node) -> Iterator[fx.Node]:
    picked = node.all_input_nodes[0] if str(node.target) in PICKED else None
    return (behind_views(operand) for operand in node.all_input_nodes if operand is not picked)


def _kind(group: Sequence[fx.Node]) -> str:
    """The kind of the kernel that these operators become, as `cost/kinds.py` names it by the nest."""
    reductions = [node for node in group if class_of(node) == "reduction"]
    of_rows = [node for node in reductions if not _reduces_rows_away(node)]
    passes = 1 + len(of_rows) + sum(str(node.target) in TWO_REDUCTIONS for node in of_rows)
    shapes = [shape_of(value) for node in reductions for one in node.all_input_nodes for value in results(one)]
    return kind_name(
        passes=passes,
        sums_columns=any(map(_sums_columns, group)),
        columns=max((shape[-1] for shape in shapes if shape), default=1),
        transposes=any(map(_lies_across, group)),
        writes_rows=not all(map(_sums_columns, live_out(group))),
    )


def _sums_columns(node: fx.Node) -> bool:
    return str(node.target) in COLUMN_SUMS or _reduces_rows_away(node)


def _reduces_rows_away(node: fx.Node) -> bool:
    """Whether this is a reduction over axes other than the last: its result is available only after all rows."""
    axes = arguments(node).get("dim") if class_of(node) == "reduction" else None
    if not isinstance(axes, (list, tuple)) or not axes:
        return False
    return -1 not in axes and len(shape_of(results(node.all_input_nodes[0])[0])) - 1 not in axes


def _lies_across(node: fx.Node) -> bool:
    """Whether an operator's largest tensors differ in their contiguous axis, or its reduction is over another axis."""
    values = [value for one in (node, *node.all_input_nodes) for value in results(one) if value.dim() > 1]
    sizes = [prod(shape_of(value)) for value in values]
    largest = max(sizes, default=0)
    along = {-1} if class_of(node) == "reduction" else set()
    ways = {_innermost(value) for value, size in zip(values, sizes, strict=True) if size == largest}
    return len(along | ways - {None}) > 1


def _innermost(value: torch.Tensor) -> int | None:
    """The contiguous axis, counted from the last, which is -1; None if there is none."""
    sizes = [(n, stride) for n, stride in zip(shape_of(value), strides_of(value), strict=True)]
    return next((axis - len(sizes) for axis, (n, stride) in enumerate(sizes) if n > 1 and stride == 1), None)
