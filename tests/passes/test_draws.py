"""Dropout set apart from its draw, by a mask or by a saved state and numbers computed of it.

Against PyTorch's own draws and Python's MT19937.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.passes.graphs import aten, run
from tilewright.hardware.target import target_of
from tilewright.operators.random import STREAM, threshold
from tilewright.passes import draws, dropout
from tilewright.passes.draws import draw_stream, generator_is_known, keep
from tilewright.passes.dropout import keep_mask, split_dropout


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
    monkeypatch.setattr(draws, "threshold", lambda p: threshold(p) - 2**45)
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
