"""Finds the steps that must be as exact as eager, and the functions that need only a small absolute error."""

from __future__ import annotations

from tilewright.loops.nest import Nest, Step

DISCONTINUOUS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "floor", "ceil", "trunc", "round_even", "sign"})


def feeds_discontinuous(nest: Nest) -> set[int]:
    """Positions of all steps on which a discontinuous operator depends, in this nest or another."""
    operands = (a for step in nest.steps if _is_discontinuous(step) for a in step.args)
    return set(nest.behind([*operands, *(i for i, step in enumerate(nest.steps) if step.exact)]))


def absolute_accuracy(nest: Nest, *names: str) -> frozenset[int]:
    """Positions of the functions `names` in fp32, at most 1, that need only absolute accuracy.

    Only sums with 1 read such a function, or, if it is scaled by a factor, only sums with that factor.
    """
    steps = nest.steps
    users: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        for a in step.args:
            users.setdefault(a, []).append(place)
    found = [i for i, step in enumerate(steps) if step.name in names and step.dtype == "float32"]
    if not found:
        return frozenset()
    stored = {store.value for store in nest.stores} | feeds_discontinuous(nest)

    def is_hidden(i: int, factor: float = 1.0) -> bool:
        return i in users and i not in stored and all(hides(place, i, factor) for place in users[i])

    def hides(user: int, i: int, factor: float) -> bool:
        step = steps[user]
        constants = [steps[a].constant for a in step.args if steps[a].name == "const"]
        if step.name == "mul" and isinstance(scale := next(iter(constants), None), float):
            return is_hidden(user, factor * scale)
        if step.args == (i, i):
            return is_hidden(user, factor * factor)
        return step.name in ("add", "sub") and factor in constants

    return frozenset(i for i in found if is_hidden(i))


def _is_discontinuous(step: Step) -> bool:
    return step.name in DISCONTINUOUS or (step.name == "cast" and step.dtype not in ("float32", "float64"))
