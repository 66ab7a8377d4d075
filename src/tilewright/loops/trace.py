"""Runs the bodies of a set of graph nodes and records their scalar operations."""

from __future__ import annotations

import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.graph.calls import class_of, dtype_name, is_known, results, shape_of, strides_of, through
from tilewright.hardware.target import Language
from tilewright.loops.exact import CONVERSION, EXACT, feeding_discontinuous, through_moves
from tilewright.loops.sizes import are_for_all_sizes
from tilewright.operators.language import COMPUTE_DTYPE, FLOATS, Trace, Unfusable, Value
from tilewright.operators.row import Call, Row
from tilewright.operators.shapes import pointwise, reduction, same
from tilewright.operators.table import row_of
from tilewright.pytorch.state import in_real_tensors

aten = torch.ops.aten


SUPPORTED = FLOATS | {"int8", "uint8", "int16", "int32", "int64", "bool"}


SCALING = frozenset(
    {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default}
)


ROUNDED_ALIKE = frozenset(
    {"load", "const", "cast", "round", "where", "neg", "abs", "maximum", "minimum", "sign", "isnan", "isinf"}
    | {"floor", "ceil", "trunc", "round_even", "lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul"}
)
"""Operations on floats that round nothing or are rounded correctly, so that all kernels compute the same. A quotient is
not among them: that of a sum takes the sum before it is rounded. Functions are not: those of different accuracy round
differently."""


@dataclass(frozen=True)
class Traced:
    """A trace, and the value of each member and of each output node."""

    trace: Trace
    values: dict[fx.Node, Value]


@dataclass(frozen=True)
class Rounding:
    """Which members of a set are computed as exactly as eager, rounded as stored, or rounded to 16 bits afterwards.

    It is all that their kernel needs to know of the readers of their results."""

    exact: set[fx.Node]
    as_stored: set[fx.Node]
    rounded: set[fx.Node]

    @classmethod
    def of(cls, members: Sequence[fx.Node], outputs: Sequence[fx.Node], language: Language) -> Rounding:
        rounded = _rounded(members, set(outputs))
        if language == "triton":
            rounded |= _below_logarithms(members)
        return cls(feeding_discontinuous(members), _feeding_conversions(members), rounded)


def trace_nodes(
    members: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    language: Language,
    *,
    share_loads: bool,
    rounding: Rounding | None = None,
) -> Traced:
    """Run the bodies of `members` (topological order) and of the views between them and the outputs.

    Operands that no member computes are loaded from memory. With `share_loads`, all uses of a tensor share axes;
    otherwise each use gets its own, so that a tensor can be combined with its transpose. Raises `Unfusable` if the
    bodies cannot share a nest.
    """
    rounding = rounding or Rounding.of(members, outputs, language)
    return _Tracer(members, language, share_loads, rounding).run(outputs)


def is_repeatable(node: fx.Node) -> bool:
    """Whether each kernel that computes the call from equal operands computes the same bits."""
    values = [*results(node), *(value for operand in node.all_input_nodes for value in results(operand))]
    if not any(value.is_floating_point() or value.is_complex() for value in values):
        return True
    if not all(is_known(size) for value in values for size in value.shape):
        return False
    alone = fx.Graph()

    def known(copy: fx.Node, source: fx.Node) -> fx.Node:
        """A symbolic size counts as that of the traced call, and binds the program to nothing."""
        one = not isinstance(source.meta.get("val"), (tuple, list))
        found = [torch.empty_strided(shape_of(x), strides_of(x), dtype=x.dtype, device="meta") for x in results(source)]
        copy.meta["val"] = found[0] if one and found else tuple(found)
        return copy

    operands = {x: known(alone.placeholder(x.name), x) for x in node.all_input_nodes}
    copy = known(alone.node_copy(node, operands.__getitem__), node)
    try:
        names = {op.name for op in trace_nodes([copy], [], "c++", share_loads=True).trace.ops if op.dtype in FLOATS}
    except Unfusable:
        return False
    return names <= ROUNDED_ALIKE


class _Tracer:
    def __init__(self, members: Sequence[fx.Node], language: Language, share_loads: bool, rounding: Rounding) -> None:
        self.trace = Trace(of_any_size=are_for_all_sizes())
        self.language = language
        self.share_loads = share_loads
        self.members = members
        self.inside = set(members)
        self.values: dict[fx.Node, Any] = {}
        self.exact = rounding.exact
        self.as_stored = rounding.as_stored
        self.rounded = rounding.rounded

    def run(self, outputs: Sequence[fx.Node]) -> Traced:
        for node in self.members:
            self.values[node] = self._run(node)
        for node in outputs:
            if node not in self.values:
                self.values[node] = self._operand(node)
        return Traced(self.trace, {n: v for n, v in self.values.items() if isinstance(v, Value)})

    def _run(self, node: fx.Node) -> Any:
        row = row_of(node.target)
        if row is None or row.body is None:
            raise Unfusable(f"no kernel is generated for {node.target}")
        if row.name == "getitem":
            source, position = node.args
            assert isinstance(source, fx.Node) and isinstance(position, int)
            return self._operand(source)[position]
        first = results(node)[0]
        if row.operator_class == "pointwise":
            _refuse_overflow(node, first.dtype)
        _refuse_dtypes(node, row)
        args = fx.node.map_arg(node.args, self._operand)
        kwargs = fx.node.map_arg(node.kwargs, self._operand)
        dtype = dtype_name(first.dtype)
        sizes = tuple(int(s) for s in first.shape)
        common, in_cpp = _common_dtype(node, row, dtype), self.language == "c++"
        call = Call(self.trace, dtype, sizes, common, in_cpp, node in self.exact)
        if row.promotion != "none":
            wanted = dtype if row.promotion == "result" else call.common
            args = tuple(_converted(node, row, given, a, wanted) for given, a in zip(node.args, args, strict=True))
            kwargs = {k: a.to_compute(wanted) if isinstance(a, Value) else a for k, a in kwargs.items()}
        self.trace.exact = node.meta.get(EXACT, False)
        self.trace.approximate = node in self.rounded and node not in self.exact
        value = row.body(call, *args, **kwargs)
        self.trace.approximate = self.trace.exact = False
        return self._finish(node, value)

    def _finish(self, node: fx.Node, value: Any) -> Any:
        """Convert each result to its dtype; round it as eager does if a discontinuous operator or a cast reads it."""
        vals = node.meta["val"]
        if not isinstance(vals, (tuple, list)):
            return self._convert_result(node, value, vals)
        # Some results are empty on some devices: the buffer of log-sigmoid on a GPU.
        return tuple(
            self._convert_result(node, v, meta) if isinstance(v, Value) and 0 not in meta.shape else None
            for v, meta in zip(value, vals, strict=True)
        )

    def _convert_result(self, node: fx.Node, value: Value, meta: torch.Tensor) -> Value:
        name = dtype_name(meta.dtype)
        value = value.to_compute(name)
        if tuple(value.shape) != tuple(meta.shape):
            value = value.expand([int(s) for s in meta.shape])
        return value.rounded(name) if node in self.exact or node in self.as_stored else value

    def _operand(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        if is_view_of_member(node, self.inside):
            self.values[node] = self._run(node)
            return self.values[node]
        meta = node.meta.get("val")
        if not isinstance(meta, torch.Tensor):
            raise Unfusable(f"{node.name} is not a tensor")
        name = dtype_name(meta.dtype)
        if name not in SUPPORTED or meta.layout is not torch.strided or meta.is_conj() or meta.is_neg():
            raise Unfusable(f"loop nests do not support {name} {meta.layout} tensors")
        value = self.trace.load(node, name, [int(s) for s in meta.shape], [int(s) for s in meta.stride()])
        if self.share_loads:
            self.values[node] = value
        return value


def is_view_of_member(node: fx.Node, members: Container[fx.Node]) -> bool:
    """Whether this is a member, or a chain of views of one. Raises `Unfusable` for a view without a body."""
    in_memory: list[fx.Node] = []

    def is_between(view: fx.Node) -> bool:
        row = row_of(view.target) if view.op == "call_function" and view not in members else None
        if row is None or row.operator_class != "layout":
            return False
        if row.body is None:
            in_memory.append(view)
        return True

    if through(node, is_between) not in members:
        return False
    if in_memory:
        raise Unfusable(
            f"{in_memory[0].target} reads memory, but this value is computed inside the kernel and never stored"
        )
    return True


def _refuse_overflow(node: fx.Node, dtype: torch.dtype) -> None:
    """Numbers that an integer dtype cannot hold: PyTorch raises for some operators and wraps them for others."""
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return
    limits = torch.iinfo(dtype)
    schema = getattr(node.target, "_schema", None)
    for argument, number in zip(schema.arguments if schema else (), node.args, strict=False):
        # Others count places and elements.
        if (
            "number" in str(argument.type).lower()
            and isinstance(number, int)
            and not limits.min <= number <= limits.max
        ):
            raise Unfusable(f"{dtype_name(dtype)} cannot hold {number}")


def _refuse_dtypes(node: fx.Node, row: Row) -> None:
    """Dtypes that PyTorch's kernels refuse and its fake tensors accept, such as integers of `lerp`."""
    values = [operand.meta["val"] for operand in node.all_input_nodes]
    is_float = not row.integral and all(x.is_floating_point() for x in values if isinstance(x, torch.Tensor))
    if row.operator_class == "reduction":
        takes_one_element = row.shapes in (reduction, same)
    else:
        takes_one_element = row.shapes is pointwise and row.promotion != "none"
        is_float = is_float and bool not in map(type, node.args)
    if is_float or not takes_one_element:
        return
    with in_real_tensors(), warnings.catch_warnings(action="ignore"):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _one_element)
        try:
            node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError as error:
            raise Unfusable(f"PyTorch refuses it: {error}") from error


def _one_element(operand: fx.Node) -> torch.Tensor | int:
    """A tensor of one element, or one as a size."""
    value = operand.meta["val"]
    return torch.ones([1] * value.dim(), dtype=value.dtype) if isinstance(value, torch.Tensor) else 1


def _converted(node: fx.Node, row: Row, given: Any, value: Any, wanted: str) -> Any:
    """An operand in the operator's compute dtype; one of another dtype is rounded as PyTorch's promotion does."""
    if not isinstance(value, Value):
        return value
    value = value.to_compute(wanted)
    operand: torch.Tensor = given.meta["val"]
    if dtype_name(operand.dtype) == wanted or _is_number(node, operand):
        return value
    promotes = row.promotion == "common" or (row.operator_class == "pointwise" and not row.own)
    return value.rounded(wanted) if promotes else value


def _is_number(node: fx.Node, operand: torch.Tensor) -> bool:
    """Whether PyTorch takes this operand for a number, which has the accuracy of the compute dtype."""
    if operand.dim() or operand.device.type != "cpu":
        return operand.dtype is torch.bool
    return node.target in (aten.mul.Tensor, aten.div.Tensor) or results(node)[0].device.type != "cpu"


def _common_dtype(node: fx.Node, row: Row, dtype: str) -> str:
    """The dtype to which PyTorch promotes the first two operands."""
    if row.promotion != "common":
        return dtype
    operands: list[Any] = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args[:2]]
    return dtype_name(torch.result_type(*operands))


def _feeding_conversions(members: Sequence[fx.Node]) -> set[fx.Node]:
    """Members that a conversion of a 16-bit float to a wider one depends on, up to reductions: it reads what eager
    stores, so these are rounded one by one."""
    needed = set[fx.Node]()
    for node in reversed(members):
        users = {u for user in node.users for u in through_moves(user)}
        if any(_widens(u, node) or (u in needed and class_of(u) == "pointwise") for u in users):
            needed.add(node)
    return needed


def _widens(node: fx.Node, operand: fx.Node) -> bool:
    """Whether PyTorch converts a 16-bit operand to a wider float: by a cast, a promotion or an argument `dtype`."""
    row = row_of(node.target)
    if row is None or row.own or row.operator_class not in ("pointwise", "reduction"):
        return False
    narrow, wide = (dtype_name(results(n)[0].dtype) if results(n) else "" for n in (operand, node))
    return narrow in COMPUTE_DTYPE and wide in FLOATS - set(COMPUTE_DTYPE)


def _rounded(members: Sequence[fx.Node], outputs: set[fx.Node]) -> set[fx.Node]:
    """Members with 16-bit results, or whose only readers, all members, scale the result and round it to 16 bits."""
    found = set[fx.Node]()
    for node in reversed(members):
        readers = {u for user in node.users for u in _through_views(user)}
        operators = {u for u in readers if class_of(u) != "layout"}
        stays_here = operators <= found and not outputs & ({node} | readers - operators)
        if all(dtype_name(result.dtype) in COMPUTE_DTYPE for result in results(node)) or (
            stays_here and all(map(_scales, operators))
        ):
            found.add(node)
    return found


def _below_logarithms(members: Sequence[fx.Node]) -> set[fx.Node]:
    """The exponentials and sums of log(sum(exp(x - amax(x)))).

    A relative error e of the sum is an absolute error e of its logarithm, and the largest term is exact: 18 bits are
    enough for the others.
    """
    found = set[fx.Node]()
    for logarithm in members:
        total: Any = logarithm.args[0] if logarithm.target is aten.log.default else None
        power: Any = total.args[0] if total is not None and total.target is aten.sum.dim_IntList else None
        shifted: Any = power.args[0] if power is not None and power.target is aten.exp.default else None
        if shifted is None or shifted.target is not aten.sub.Tensor or len(total.users) + len(power.users) > 2:
            continue
        x, top = shifted.args
        below = isinstance(top, fx.Node) and top.target is aten.amax.default and top.args[:2] == (x, total.args[1])
        if below and total.meta["val"].dtype == torch.float32:
            found |= {total, power}
    return found


def _scales(node: fx.Node) -> bool:
    """Whether the result has about the relative error of its operand (a sum may have a larger one)."""
    row = row_of(node.target)
    return row is not None and (row.body is CONVERSION or node.target in SCALING)


def _through_views(node: fx.Node) -> list[fx.Node]:
    """The node; if it is a view, also its readers through views."""
    if class_of(node) != "layout":
        return [node]
    return [node, *(u for user in node.users for u in _through_views(user))]
