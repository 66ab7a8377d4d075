"""Dropout planned for a GPU: one state for neighbouring draws, and the numbers that PyTorch's generator gives there."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.node import Target

from tests.kernels import philox
from tests.passes.graphs import aten, calls
from tilewright.hardware.target import target_named
from tilewright.passes.dropout import keep_mask, split_dropout
from tilewright.passes.philox import draw_philox, keep_philox

SEED, OFFSET = 0x1234_5678_9ABC_DEF0, 4 * (2**32 - 1)
H200_BLOCKS = 132 * 8


class Drawn(fx.Interpreter):
    """Runs a graph on a CPU as if its draws were those of a GPU's generator at `SEED` and `OFFSET`."""

    offset = OFFSET

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is not draw_philox:
            return super().call_function(target, args, kwargs)
        state = torch.tensor([SEED, self.offset])
        self.offset += args[1]
        return state


def split(function: Any, *inputs: Tensor) -> tuple[fx.Graph, Any, int]:
    """The graph, its results, and by how much the generator's offset advances."""
    graph = aten(function, *inputs)
    split_dropout(graph, target_named("h200"))
    graph.lint()
    drawn = Drawn(fx.GraphModule(torch.nn.Module(), graph))
    return graph, drawn.run(*inputs), drawn.offset - OFFSET


def advance(count: int) -> int:
    """As `Dropout.cu` computes it."""
    grid = min(-(-count // 256), H200_BLOCKS)
    return ((count - 1) // (256 * grid * 4) + 1) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 10, 1001, 2052, 4104])
def test_the_numbers_are_those_of_pytorchs_kernel(count: int, dtype: torch.dtype) -> None:
    vector = philox.vector_of(count, dtype.itemsize)
    _, (kept, mask), moved = split(lambda x: torch.native_dropout(x, 0.37, True), torch.ones(count, dtype=dtype))
    expected = philox.mask(count, vector, 0.37, SEED, OFFSET, H200_BLOCKS)
    assert torch.equal(mask, expected) and torch.equal(kept != 0, expected)
    assert moved == advance(count)


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_several_steps_of_few_threads(vector: int) -> None:
    count = 3 * 512 * 8
    state = torch.tensor([-3, 12])
    found = keep_philox(state, [count], [0], 1 - 0.2, vector, 512, 40)
    assert torch.equal(found, philox.mask(count, vector, 0.2, 2**64 - 3, 52, 2))


def test_elements_are_numbered_as_they_lie_unless_there_are_gaps() -> None:
    dense, gaps = torch.ones(16, 24).t(), torch.ones(24, 20)[:, :16]
    _, (_, mask), _ = split(lambda x: torch.native_dropout(x, 0.5, True), dense)
    assert torch.equal(mask.t().flatten(), philox.mask(384, 4, 0.5, SEED, OFFSET, H200_BLOCKS))
    _, (_, mask), _ = split(lambda x: torch.native_dropout(x, 0.5, True), gaps)
    assert torch.equal(mask.flatten(), philox.mask(384, 1, 0.5, SEED, OFFSET, H200_BLOCKS))


def test_neighbouring_draws_share_a_state() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        first, second = torch.native_dropout(x, 0.1, True)[1], torch.native_dropout(y, 0.3, True)[1]
        middle = torch.rand_like(x)
        return [first, second, middle, torch.native_dropout(x, 0.2, True)[1]]

    x, y = torch.ones(1500), torch.ones(64, 80)
    graph, (first, second, _, third), moved = split(program, x, y)
    order = [name for name in calls(graph) if "draw_philox" in name or "rand_like" in name]
    assert [name.split(".")[0] for name in order] == ["tilewright", "rand_like", "tilewright"]
    after_first, after_second = OFFSET + advance(1500), OFFSET + advance(1500) + advance(5120)
    assert torch.equal(first, philox.mask(1500, 4, 0.1, SEED, OFFSET, H200_BLOCKS))
    assert torch.equal(second.flatten(), philox.mask(5120, 4, 0.3, SEED, after_first, H200_BLOCKS))
    assert torch.equal(third, philox.mask(1500, 4, 0.2, SEED, after_second, H200_BLOCKS))
    assert moved == after_second - OFFSET + advance(1500)


def test_pytorch_draws_in_fp64() -> None:
    graph = aten(lambda x: torch.native_dropout(x, 0.5, True)[0], torch.ones(9, dtype=torch.float64))
    split_dropout(graph, target_named("h200"))
    assert any(node.target is keep_mask for node in graph.nodes)
