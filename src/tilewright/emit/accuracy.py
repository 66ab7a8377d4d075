"""Where a kernel must be as exact as eager, and where an absolute error is as good."""

from __future__ import annotations

from tilewright.loops.nest import Nest, Step

DISCONTINUOUS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "floor", "ceil", "trunc", "round_even", "sign"})


def feeds_discontinuous(nest: Nest) -> set[int]:
    """Positions of all steps on which a discontinuous operator depends."""
    return set(nest.behind(a for step in nest.steps if _is_discontinuous(step) for a in step.args))


def absolute_accuracy(nest: Nest, *names: str) -> frozenset[int]:
    """Positions of the functions `names` in fp32 used only in sums with 1, which need only absolute accuracy."""
    steps = nest.steps
    users: dict[int, list[int]] = {}
    for place, step in enumerate(steps):
        for a in step.args:
            users.setdefault(a, []).append(place)
    found = [i for i, step in enumerate(steps) if step.name in names and step.dtype == "float32"]
    if not found:
        return frozenset()
    stored = {store.value for store in nest.stores} | feeds_discontinuous(nest)

    def is_hidden(i: int) -> bool:
        return i in users and i not in stored and all(hides(place, i) for place in users[i])

    def hides(user: int, i: int) -> bool:
        step = steps[user]
        ones = (steps[a].name == "const" and steps[a].constant == 1 for a in step.args)
        return any(ones) if step.name in ("add", "sub") else step.args == (i, i) and is_hidden(user)

    return frozenset(i for i in found if is_hidden(i))


def _is_discontinuous(step: Step) -> bool:
    return step.name in DISCONTINUOUS or (step.name == "cast" and step.dtype not in ("float32", "float64"))
