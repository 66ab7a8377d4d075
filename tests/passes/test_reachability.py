"""Dependencies between operators while they are merged into kernels."""

import random

import pytest
import torch
from torch import Tensor, fx

from tests.passes.graphs import aten
from tilewright.passes.units import Reachability


def program(generator: random.Random, operators: int) -> fx.Graph:
    """Sums of two earlier values each."""

    def function(x: Tensor) -> list[Tensor]:
        values = [x.sin()]
        for _ in range(operators):
            values.append(generator.choice(values[-8:]) + generator.choice(values[-8:]))
        return values

    return aten(function, torch.ones(2))


def is_reached(edges: dict[int, set[int]], starts: set[int], wanted: set[int]) -> bool:
    """Whether a path leads from `starts`, which it leaves at once, to `wanted`."""
    todo = [after for start in starts for after in edges[start] if after not in wanted]
    known = set(todo)
    while todo:
        for after in edges[todo.pop()]:
            if after in wanted:
                return True
            if after not in known:
                known.add(after)
                todo.append(after)
    return False


@pytest.mark.parametrize("seed", range(6))
def test_a_cycle_is_one_of_the_graph_of_kernels(seed: int) -> None:
    generator = random.Random(seed)
    graph = program(generator, 40)
    operators = [node for node in graph.nodes if node.op == "call_function"]
    reach, kernel = Reachability(graph), {node: place for place, node in enumerate(graph.nodes)}
    outcomes = []
    for _ in range(200):
        first, second = generator.sample(operators[:-1], 2)
        joined = {kernel[first], kernel[second]}
        members = [node for node in graph.nodes if kernel[node] in joined]
        edges: dict[int, set[int]] = {place: set() for place in kernel.values()}
        for node in graph.nodes:
            for user in node.users:
                if kernel[user] != kernel[node]:
                    edges[kernel[node]].add(kernel[user])
        outcomes.append(reach.makes_cycle(members))
        assert outcomes[-1] == is_reached(edges, joined, joined)
        if not outcomes[-1]:
            reach.merge(members)
            kernel.update(dict.fromkeys(members, min(joined)))
    assert set(outcomes) == {True, False}
