"""Dropout set apart from its draw, by a mask or by a saved state and numbers computed of it.

Against PyTorch's own draws and Python's MT19937; planned for a GPU, against the numbers of its generator there.
"""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import Target

from tests.kernels import philox
from tests.passes.graphs import aten, calls, run
from tilewright.hardware.target import target_named, target_of
from tilewright.kernels.dropout_add import stream
from tilewright.kernels.dropout_add.philox import draw_philox, keep_philox
from tilewright.kernels.dropout_add.stream import draw_stream, generator_is_known, keep, keep_mask
from tilewright.operators.random import STREAM, threshold
from tilewright.passes import dropout
from tilewright.passes.dropout import split_dropout


def seeded(seed: int, words: int) -> None:
    """The default generator `words` 32-bit words after its seed; an odd number puts elements across blocks."""
    torch.manual_seed(seed)
    torch.empty(words, dtype=torch.int32).random_()


def test_the_state_is_mt19937() -> None:
    """Python's own generator, put into the stream's state, gives the same words."""
    seeded(5, 77)
    stream = draw_stream([1000]).tolist()
    twin = random.Random()
    twin.setstate((3, (*(word % 2**32 for word in stream[0][1:-1]), stream[0][-1]), None))
    pairs = [(twin.getrandbits(32), twin.getrandbits(32)) for _ in range(1000)]
    expected = [((first % 2**21) * 2**32 + second) / 2**53 < 0.7 for first, second in pairs]
    assert keep(torch.tensor(stream, dtype=torch.int32), [1000], [0], 0.7).tolist() == expected


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9, 1 / 3, 1 - 2**-53, 2**-60, 1.0])
def test_the_threshold_is_exact(p: float) -> None:
    below = threshold(p)
    assert (below - 1) * 2.0**-53 < p and not (below < 2**53 and below * 2.0**-53 < p)


def test_this_pytorch_draws_as_it_is_known_to() -> None:
    before = torch.random.get_rng_state()
    generator_is_known.cache_clear()
    assert generator_is_known()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_generator_that_draws_otherwise_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "threshold", lambda p: threshold(p) - 2**45)
    generator_is_known.cache_clear()
    assert not generator_is_known()
    generator_is_known.cache_clear()


def streams(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if str(node.target) == STREAM]


def split(function: object, *inputs: Tensor) -> fx.Graph:
    graph = aten(function, *inputs)  # type: ignore[arg-type]
    split_dropout(graph, target_of(torch.device("cpu")))
    return graph


def dropped(x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False)])
def test_nothing_is_drawn_where_nothing_is_random(p: float, training: bool) -> None:
    x = torch.randn(4, 5)
    graph = split(lambda x: F.dropout(x, p, training), x)
    assert not streams(graph) and not any(node.target is keep_mask for node in graph.nodes)
    assert torch.equal(run(graph, x), F.dropout(x, p, training))


@pytest.mark.parametrize(("fewest", "reads"), [(0, []), (2**60, ["placeholder"])], ids=["stream", "mask"])
def test_a_draw_waits_for_no_computed_value(fewest: int, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "FEWEST", fewest)
    graph = split(lambda x: dropped(F.gelu(x * 2), 0.1), torch.ones(4, 6))
    (draw,) = [node for node in graph.nodes if str(node.target) == STREAM or node.target is keep_mask]
    assert [node.op for node in draw.all_input_nodes] == reads


def test_what_pytorch_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small masks, masks for Triton, and all where PyTorch draws by another generator."""
    x = torch.ones(dropout.FEWEST)
    assert len(streams(split(lambda x: dropped(x, 0.1), x))) == 1
    assert streams(split(lambda x: dropped(x, 0.1), x[1:])) == []
    with monkeypatch.context() as changed:
        changed.setenv("TILEWRIGHT_TARGET", "triton")
        assert streams(split(lambda x: dropped(x, 0.1), x)) == []
    monkeypatch.setattr(dropout, "generator_is_known", lambda: False)
    assert streams(split(lambda x: dropped(x, 0.1), x)) == []


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


def drawn(function: Any, *inputs: Tensor) -> tuple[fx.Graph, Any, int]:
    """The graph, its results, and by how much the generator's offset advances."""
    graph = aten(function, *inputs)
    split_dropout(graph, target_named("h200"))
    graph.lint()
    there = Drawn(fx.GraphModule(torch.nn.Module(), graph))
    return graph, there.run(*inputs), there.offset - OFFSET


def advance(count: int) -> int:
    """As `Dropout.cu` computes it."""
    grid = min(-(-count // 256), H200_BLOCKS)
    return ((count - 1) // (256 * grid * 4) + 1) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 10, 1001, 2052, 4104])
def test_the_numbers_are_those_of_pytorchs_kernel(count: int, dtype: torch.dtype) -> None:
    vector = philox.vector_of(count, dtype.itemsize)
    _, (kept, mask), moved = drawn(lambda x: torch.native_dropout(x, 0.37, True), torch.ones(count, dtype=dtype))
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
    _, (_, mask), _ = drawn(lambda x: torch.native_dropout(x, 0.5, True), dense)
    assert torch.equal(mask.t().flatten(), philox.mask(384, 4, 0.5, SEED, OFFSET, H200_BLOCKS))
    _, (_, mask), _ = drawn(lambda x: torch.native_dropout(x, 0.5, True), gaps)
    assert torch.equal(mask.flatten(), philox.mask(384, 1, 0.5, SEED, OFFSET, H200_BLOCKS))


def test_neighbouring_draws_share_a_state() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        first, second = torch.native_dropout(x, 0.1, True)[1], torch.native_dropout(y, 0.3, True)[1]
        middle = torch.rand_like(x)
        return [first, second, middle, torch.native_dropout(x, 0.2, True)[1]]

    x, y = torch.ones(1500), torch.ones(64, 80)
    graph, (first, second, _, third), moved = drawn(program, x, y)
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
