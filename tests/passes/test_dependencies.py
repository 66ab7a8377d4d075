"""What reads or writes one memory keeps its order, also through views; shared zeros are those of the graph."""

import random

import pytest
import torch
from torch import Tensor, fx

from tests.passes.graphs import aten
from tilewright.graph.views import hazards
from tilewright.passes.units import Reachability
from tilewright.passes.zeros import MARK, is_filled, is_zeros, shared_zeros


def test_reads_and_writes_of_one_memory_keep_their_order() -> None:
    def program(x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        first, second, apart = x.sin(), x[1:].cos(), k.tan()
        x.copy_(k)
        third = x.t().exp()
        x[:1].mul_(2)
        return first, second, apart, third, x.tanh()

    graph = aten(program, torch.zeros(3, 3), torch.zeros(3, 3))
    found = {node.name: {earlier.name for earlier in before} for node, before in hazards(graph).items() if before}
    assert found == {
        "copy_": {"sin", "cos"},
        "exp": {"copy_"},
        "mul_": {"sin", "cos", "copy_", "exp"},
        "tanh": {"copy_", "mul_"},
    }


def test_zeros_are_shared_by_those_who_need_as_many() -> None:
    graph = aten(lambda x: x.sin(), torch.zeros(3))
    sin = next(node for node in graph.nodes if node.name == "sin")
    few = shared_zeros(sin, 9)
    assert shared_zeros(sin, few.meta[MARK]) is few
    many = shared_zeros(sin, few.meta[MARK] + 1)
    assert many is not few and many.meta[MARK] == many.meta["val"].numel() > few.meta[MARK]
    assert shared_zeros(sin, 9).meta[MARK] >= 9 and is_zeros(many)


def test_what_is_filled_with_a_number_is_known() -> None:
    graph = aten(lambda x: (x.new_full((3,), 1), torch.full((3,), 2.0), x.new_zeros(3), torch.ones(3)), torch.zeros(3))
    made = [node for node in graph.nodes if node.op == "call_function"]
    assert [[is_filled(node, number) for number in (0, 1)] for node in made] == [
        [False, True], [False, False], [True, False], [False, True]
    ]  # fmt: skip


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
