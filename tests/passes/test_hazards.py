"""What reads or writes one memory keeps its order, also through views; shared zeros are those of the graph."""

import torch
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.graph.writes import hazards
from tilewright.passes.shared_zeros import MARK, is_filled, is_zeros, shared_zeros


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
