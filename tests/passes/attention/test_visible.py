"""Which keys a mask shows: bands from comparisons, and tensors that stay, each against the mask that was computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from tests.passes.graphs import aten
from tilewright.passes.attention import constants
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.visible import Band, Visible, band_of, visible

B, Q, K = 2, 6, 9
LOWEST = torch.finfo(torch.float32).min


def places(size: int) -> Tensor:
    return torch.arange(size)


def rows(size: int = Q) -> Tensor:
    return places(size)[None, None, :, None]


def columns(size: int = K) -> Tensor:
    return places(size)[None, None, None, :]


def captured(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[GraphModule, Node]:
    """The torch-level graph that Dynamo makes of `function`, and its result."""
    found: list[GraphModule] = []

    def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        found.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (result,) = found[0].graph.output_node().all_input_nodes
    return found[0], result


def split(
    function: Callable[..., Tensor], *inputs: Tensor, keys: int = K, queries: int = Q
) -> list[tuple[Visible, Callable[..., Tensor]]]:
    """What the mask is made of, read from both kinds of graph; each with what computes a node of that graph."""
    gm, result = captured(function, *inputs)
    graph = aten(function, *inputs)
    (traced,) = graph.output_node().all_input_nodes

    def value(module: GraphModule, node: Node) -> Tensor:
        outputs = module.graph.output_node()
        outputs.args = (node,)
        module.recompile()
        found = module(*inputs)
        return found[0] if isinstance(found, tuple) else found

    other = GraphModule(nn.Module(), graph)
    return [
        (visible(result, Constants(gm.graph), queries, keys), lambda node: value(gm, node)),
        (visible(traced, Constants(graph), queries, keys), lambda node: value(other, node)),
    ]


def again(found: Visible, value: Callable[..., Tensor], shape: tuple[int, ...]) -> Tensor:
    """The mask that `found` says, as what is added to scores."""
    seen = found.known
    for node in found.kept:
        seen = seen & value(node)
    total = torch.zeros(shape)
    for node in found.added:
        total = total + value(node)
    return torch.where(seen.expand(shape), total, -torch.inf)


def same_softmax(mask: Tensor, other: Tensor) -> None:
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    torch.manual_seed(1)
    scores = torch.randn(B, 1, Q, K)
    torch.testing.assert_close(
        (scores + mask).softmax(-1), (scores + other).softmax(-1), rtol=0, atol=0, equal_nan=True
    )


BANDS: list[tuple[str, Callable[[], Tensor], Band]] = [
    ("causal from the start", lambda: columns() <= rows(), Band(None, Q - K)),
    ("causal to the end", lambda: columns() <= rows() + (K - Q), Band(None, 0)),
    ("turned around", lambda: ~(rows() + 3 < columns()), Band(None, 0)),
    ("everything", lambda: (rows() >= 0).expand(B, 1, Q, K), Band(None, None)),
    ("window", lambda: (columns() <= rows() + 3) & (columns() > rows()), Band(2, 0)),
    ("distance", lambda: (columns() - rows() - 3).abs() <= 2, Band(2, 2)),
    ("tril", lambda: torch.ones(Q, K, dtype=torch.bool).tril(3), Band(None, 0)),
    ("triu of -inf", lambda: torch.full((Q, K), -torch.inf).triu(4), Band(None, 0)),
    ("where", lambda: torch.where(columns() <= rows() + 3, 0.0, LOWEST), Band(None, 0)),
    ("masked_fill", lambda: torch.zeros(1, 1, Q, K).masked_fill(columns() > rows() + 3, -torch.inf), Band(None, 0)),
    ("(1 - m) * min", lambda: (1 - (columns() <= rows() + 3).float()) * LOWEST, Band(None, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "band"), [x[1:] for x in BANDS], ids=[x[0] for x in BANDS])
def test_a_band_is_read_from_what_builds_it(function: Callable[[], Tensor], band: Band) -> None:
    for found, value in split(lambda x: function(), torch.ones(1)):
        assert not found.kept and not found.added
        assert found.band(Q, K) == band
        same_softmax(function(), again(found, value, (B, 1, Q, K)))


COMPARED = [x for x in BANDS if x[0] in ("causal from the start", "turned around", "window", "where", "masked_fill")]


@pytest.mark.parametrize(("function", "band"), [x[1:] for x in COMPARED], ids=[x[0] for x in COMPARED])
def test_comparisons_too_large_to_compute_are_read(
    function: Callable[[], Tensor], band: Band, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only places, Q or K of them, may be computed; no matrix of Q·K."""
    monkeypatch.setattr(constants, "MOST_BYTES", 8 * K)
    for found, value in split(lambda x: function().expand(B, 1, Q, K), torch.ones(1)):
        assert found.known.numel() == 1 and not found.kept and not found.added and found.places == band
        assert found.band(Q, K) == band
        same_softmax(function(), again(found, value, (B, 1, Q, K)) + band_of_places(band))


def band_of_places(band: Band) -> Tensor:
    distance = columns() - (rows() + K - Q)
    seen = torch.ones(1, 1, Q, K, dtype=torch.bool)
    if band.left is not None:
        seen &= distance >= -band.left
    if band.right is not None:
        seen &= distance <= band.right
    return torch.where(seen, 0.0, -torch.inf)


def packed(x: Tensor) -> Tensor:
    """Hugging Face's mask of positions that follow one another, of which none begins a second sequence."""
    positions = places(Q)[None].expand(B, -1)
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = begins.cumsum(-1)
    batch = places(B)[:, None, None, None]
    return (columns(Q) <= rows()) & (sequence[batch, rows()] == sequence[batch, columns(Q)])


def test_positions_that_follow_one_another_are_one_sequence() -> None:
    for found, _ in split(packed, torch.ones(1), keys=Q):
        assert found.band(Q, Q) == Band(None, 0) and not found.kept


KEPT: list[tuple[str, Callable[[Tensor], Tensor], tuple[int, ...]]] = [
    ("padding", lambda p: ((rows() >= 0) & p[:, None, None, :]).expand(B, 1, Q, K), (B, 1, 1, K)),
    ("padding, added", lambda p: torch.where(p[:, None, None, :], 0.0, -torch.inf).expand(B, 1, Q, K), (B, 1, 1, K)),
    ("not dropped", lambda p: torch.zeros(B, 1, Q, K).masked_fill(~p[:, None, None, :], -torch.inf), (B, 1, 1, K)),
]


@pytest.mark.parametrize(("function", "shape"), [x[1:] for x in KEPT], ids=[x[0] for x in KEPT])
def test_padding_stays_as_small_as_it_is(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    padding = torch.tensor([[1] * 7 + [0] * 2, [1] * 9]).bool()
    for found, value in split(function, padding):
        assert found.shows_all and len(found.kept) == 1 and not found.added
        assert value(found.kept[0]).shape == shape
        same_softmax(function(padding), again(found, value, (B, 1, Q, K)))


def test_a_band_beside_padding_and_a_bias() -> None:
    padding, bias = torch.tensor([[1] * 7 + [0] * 2, [1] * 9]).bool(), torch.randn(1, 1, Q, K)

    def function(padding: Tensor, bias: Tensor) -> Tensor:
        return torch.where((columns() <= rows() + 3) & padding[:, None, None, :], bias, -torch.inf)

    for found, value in split(function, padding, bias):
        assert found.band(Q, K) == Band(None, 0)
        assert len(found.kept) == 1 and len(found.added) == 1
        same_softmax(function(padding, bias), again(found, value, (B, 1, Q, K)))


def test_rows_that_finite_numbers_hide_whole_stay_added() -> None:
    """Such a row weighs all keys alike; a row whose keys are hidden has no weight at all."""
    padding = torch.tensor([[0] * 9, [1] * 9]).bool()
    for found, _ in split(lambda p: torch.where(p[:, None, None, :], 0.0, LOWEST).expand(B, 1, Q, K), padding):
        assert not found.kept and len(found.added) == 1 and found.shows_all
    for found, _ in split(lambda p: torch.where(columns() > rows() + 8, 0.0, LOWEST) + p.new_zeros(()), padding):
        assert len(found.added) == 1 and found.shows_all


def test_what_is_written_to_is_not_known() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.ones(Q, K, dtype=torch.bool)
        mask[0, 0] = x[0] > 0
        return mask & (columns() <= rows())[0, 0]

    gm, result = captured(function, torch.ones(1))
    found = visible(result, Constants(gm.graph), Q, K)
    assert len(found.kept) == 1 and found.band(Q, K) == Band(None, Q - K)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(),
        torch.zeros(3, 3).bool(),
        torch.stack([torch.ones(3, 3).tril(), torch.ones(3, 3)]).bool()[:, None],
        torch.eye(3).bool().flip(0),
    ],
    ids=["a hole", "nothing seen", "two entries", "the other diagonal"],
)
def test_what_is_no_band(mask: Tensor) -> None:
    assert band_of(mask, 3, 3) is None
