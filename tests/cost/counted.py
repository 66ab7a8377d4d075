"""Costs of a program's operators, for the tests of this package."""

from collections.abc import Callable, Mapping

import sympy
from torch import fx

from tests.graph.captured import Program
from tilewright.cost.operators import operator_cost
from tilewright.cost.symbols import parse, total
from tilewright.graph.dims import SymbolicShapes
from tilewright.records.program import Cost

Sizes = Mapping[str, int]
COUNTS = ("reads", "writes", "unused", "flops")


def costs(shapes: SymbolicShapes) -> dict[str, Cost]:
    return {node.name: operator_cost(node, shapes) for node in shapes.graph.nodes}


def program_costs(program: Program, sizes: Sizes) -> dict[str, Cost]:
    return costs(program.shapes(program.graph(sizes), sizes))


def cost_of(function: Callable[..., object], *inputs: str, **sizes: int) -> Cost:
    return total(program_costs(Program(function, inputs), sizes).values())


def value(formula: str | None, sizes: Sizes) -> int:
    assert formula is not None
    symbols = {sympy.Symbol(name, positive=True, integer=True): size for name, size in sizes.items()}
    return int(parse(formula).subs(symbols))


def assert_formulas_hold(shapes: SymbolicShapes, sizes: Sizes, other: SymbolicShapes) -> None:
    """Every formula gives this capture's counts at `sizes` and the other capture's at its own sizes."""
    for node, partner in zip(shapes.graph.nodes, other.graph.nodes, strict=True):
        assert_formulas_hold_of(node, shapes, sizes, partner, other)


def assert_formulas_hold_of(
    node: fx.Node, shapes: SymbolicShapes, sizes: Sizes, partner: fx.Node, other: SymbolicShapes
) -> None:
    """The same of one node, and the node that stands for it in the other capture."""
    cost, expected = operator_cost(node, shapes), operator_cost(partner, other)
    assert cost.provenance == expected.provenance == "formula", node.format_node()
    for count in COUNTS:
        formula = getattr(cost, f"{count}_symbolic")
        assert value(formula, sizes) == getattr(cost, count), (node.format_node(), count)
        assert value(formula, other.sizes) == getattr(expected, count), (node.format_node(), count, formula)
