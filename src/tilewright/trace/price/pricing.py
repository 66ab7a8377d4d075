"""What one recorded operator call must move and compute, from the shapes and dtypes that the profiler wrote.

The counting is that of `tilewright.cost`: FLOPs and exponentials come from its table, an element counts once,
an expanded operand its own elements only. A trace tells the operands and not the results, so the shape of each
result follows from a rule in `pricing_rules`; an operator without a rule has an unknown cost, never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.cost.arithmetic import ARITHMETIC, PER_OPERAND, PER_RESULT, Count, Shape
from tilewright.records.program import Cost
from tilewright.trace.price.own_rules import ARGUMENTS as OWN_ARGUMENTS
from tilewright.trace.price.own_rules import RULES as OWN_RULES
from tilewright.trace.price.own_rules import UNTOLD as OWN_UNTOLD
from tilewright.trace.price.pricing_rules import RULES, Traffic, pointwise
from tilewright.trace.price.recorded_call import Call, Tensor


@dataclass(frozen=True)
class Price:
    """A cost, the dtype of its arithmetic, and what sets its rate: matrix units (`compute`) or not."""

    cost: Cost
    dtype: str
    kind: str


@dataclass(frozen=True)
class _Launch:
    """A call as `tilewright.cost.arithmetic` asks for it."""

    call: Call
    operands: Sequence[Tensor]
    results: Sequence[Tensor]

    def argument(self, name: str) -> object:
        if name == "approximate":
            return next((text for text in self.call.operands if text == "tanh"), "none")
        names = ARGUMENTS.get(self.call.name, ())
        found = self.call.value(names.index(name)) if name in names else None
        return OWN_UNTOLD.get((self.call.name, name)) if found is None else found

    def shape(self, name: str) -> Shape | None:
        names = ARGUMENTS.get(self.call.name, ())
        if name not in names or names.index(name) >= len(self.call.operands):
            return None
        operand = self.call.operands[names.index(name)]
        return operand.shape if isinstance(operand, Tensor) else None

    def operand(self, index: int = 0) -> Shape:
        return self.operands[index].shape

    def result(self, index: int = 0) -> Shape:
        return self.results[index].shape

    def number(self, count: Count) -> int:
        return int(count)


# The arguments that a formula asks for by name, in the order of PyTorch's schema.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "pow": ("self", "exponent"),
    "native_layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "native_layer_norm_backward": (
        *("grad_out", "input", "normalized_shape", "mean", "rstd", "weight", "bias", "output_mask"),
    ),
    "_fused_rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "_fused_rms_norm_backward": ("grad_out", "input", "normalized_shape", "rstd", "weight", "output_mask"),
    "nll_loss_forward": ("self", "target", "weight"),
    "nll_loss_backward": ("grad_output", "self", "target", "weight"),
    **OWN_ARGUMENTS,
}


def price(call: Call) -> Price | None:
    """The price of a call; None where no rule knows it."""
    inplace = call.name.endswith("_") and not call.name.endswith("__")
    name = call.name.removesuffix("_") if inplace else call.name
    rule = (
        RULES.get(call.name)
        or RULES.get(name)
        or OWN_RULES.get(call.name)
        or (pointwise if name in PER_RESULT else None)
    )
    if rule is None:
        return None
    try:
        traffic = rule(replace(call, name=name), inplace)
        if traffic is None:
            return None
        return _cost(replace(call, name=name), traffic)
    except (IndexError, KeyError, ValueError, TypeError, OverflowError):
        # The profile is somebody's file: shapes that no such operator takes have no cost.
        return None


def _cost(call: Call, traffic: Traffic) -> Price | None:
    arithmetic = traffic.arithmetic or ARITHMETIC.get(call.name)
    if arithmetic is None:
        return None
    operands = traffic.reads if traffic.operands is None else traffic.operands
    launch = _Launch(call, operands, traffic.writes)
    cost = Cost(
        reads=sum(tensor.own for tensor in traffic.reads),
        writes=sum(tensor.own for tensor in traffic.writes),
        bytes_read=sum(tensor.nbytes for tensor in traffic.reads),
        bytes_written=sum(tensor.nbytes for tensor in traffic.writes),
        flops=int(arithmetic.flops(launch)),
        transcendentals=int(arithmetic.transcendentals(launch)),
    )
    shown = next(iter([*traffic.writes, *traffic.reads]), None)
    return Price(cost, shown.dtype if shown else "", "compute" if is_product(call.name) else "pointwise")


def is_product(name: str) -> bool:
    products = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear")
    return name in (*products, *OWN_PRODUCTS) or "attention" in name


OWN_PRODUCTS = ("tilewright::linear_gelu", "tilewright::linear_dropout_add")
_WORD_COST = {**PER_RESULT, **PER_OPERAND, "gelu": (4, 1), "gelu_backward": (9, 2), "native_layer_norm": (7, 0)}
_WORD_COST["native_layer_norm_backward"] = (12, 0)


def price_generated(name: str, call: Call) -> Price | None:
    """A kernel that Inductor generated: each tensor argument moves once, which is the least it can do.

    The profile does not tell its arithmetic. What its name says of it is taken for every element of its largest
    argument: `triton_poi_fused_add_gelu_3` adds and takes the GELU.

    Source of the names: Inductor's `config.triton.descriptive_names`.
    """
    tensors = call.tensors
    if not tensors:
        return None
    text = name.split("_fused_", 1)[-1]
    largest = max(tensors, key=lambda tensor: tensor.elements)
    flops = transcendentals = 0
    for word in sorted(_WORD_COST, key=len, reverse=True):
        found = text.count(word)
        text = text.replace(word, "|")
        flops += found * _WORD_COST[word][0] * largest.elements
        transcendentals += found * _WORD_COST[word][1] * largest.elements
    moved = sum(tensor.nbytes for tensor in tensors)
    reads = sum(tensor.own for tensor in tensors)
    cost = Cost(reads=reads, bytes_read=moved, flops=flops, transcendentals=transcendentals)
    return Price(cost, largest.dtype, "pointwise")
