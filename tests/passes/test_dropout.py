"""Dropout set apart from its draw gives eager's mask, eager's values and eager's generator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.hardware.target import target_of
from tilewright.passes.dropout import keep_mask, split_dropout

SHAPES = [(1,), (7,), (3, 5), (2, 3, 4), (16, 1), (0,), (64, 65)]


def split(x: Tensor, p: float, training: bool = True) -> tuple[Tensor, list[str]]:
    graph = aten(lambda x: F.dropout(x, p, training), x)
    split_dropout(graph, target_of(torch.device("cpu")))
    return run(graph, x), calls(graph)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_draw_is_eagers(shape: tuple[int, ...], p: float, dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    graph = aten(lambda x: torch.native_dropout(x, p, True), x)
    split_dropout(graph, target_of(torch.device("cpu")))
    assert "keep_mask" in " ".join(calls(graph)) and "native_dropout.default" not in calls(graph)
    torch.manual_seed(5)
    value, mask = run(graph, x)
    after = torch.random.get_rng_state()
    torch.manual_seed(5)
    expected, expected_mask = torch.native_dropout(x, p, True)
    assert torch.equal(torch.random.get_rng_state(), after)
    assert torch.equal(mask, expected_mask) and mask.dtype == torch.bool
    torch.testing.assert_close(value, expected)
    assert value.dtype == dtype and torch.equal(value == 0, expected == 0)


def test_two_dropouts_draw_one_after_the_other() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.native_dropout(torch.native_dropout(x, 0.3, True)[0], 0.6, True)[0]

    x = torch.ones(50, 3)
    graph = aten(program, x)
    split_dropout(graph, target_of(torch.device("cpu")))
    torch.manual_seed(2)
    ours = run(graph, x)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, program(x))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (1.0, True), (0.5, False)])
def test_nothing_is_drawn_where_nothing_is_random(p: float, training: bool) -> None:
    x = torch.randn(4, 5)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    value, left = split(x, p, training)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(value, F.dropout(x, p, training))
    assert not any("keep_mask" in name for name in left)


def test_the_mask_follows_the_layout_of_its_operand() -> None:
    # Eager draws in the order of memory, not of indices.
    x = torch.ones(6, 4).t()
    torch.manual_seed(7)
    mask = keep_mask(x, 0.5)
    torch.manual_seed(7)
    assert torch.equal(mask, torch.native_dropout(x, 0.5, True)[1])


def test_gradients_use_the_mask_that_was_drawn() -> None:
    def program(x: Tensor, tangent: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        torch.native_dropout(leaf, 0.4, True)[0].backward(tangent)
        assert leaf.grad is not None
        return leaf.grad

    x, tangent = torch.randn(30), torch.randn(30)
    graph = aten(program, x, tangent)
    split_dropout(graph, target_of(torch.device("cpu")))
    assert sum("keep_mask" in name for name in calls(graph)) == 1
    torch.manual_seed(11)
    ours = run(graph, x, tangent)
    torch.manual_seed(11)
    torch.testing.assert_close(ours, program(x, tangent))


def test_the_draw_waits_for_no_computed_value() -> None:
    graph = aten(lambda x: torch.native_dropout(F.gelu(x * 2), 0.1, True)[0], torch.ones(4, 6))
    split_dropout(graph, target_of(torch.device("cpu")))
    (draw,) = [node for node in graph.nodes if node.target is keep_mask]
    assert [node.op for node in draw.all_input_nodes] == ["placeholder"]


def test_the_draw_takes_the_layout_of_its_own_operand() -> None:
    def program(x: Tensor, row: Tensor) -> Tensor:
        return torch.native_dropout(x.t() * row, 0.5, True)[0]

    inputs = torch.ones(6, 4), torch.ones(4, 1)
    for given in (inputs, (inputs[0], torch.ones(1, 1))):
        graph = aten(program, *given)
        split_dropout(graph, target_of(torch.device("cpu")))
        torch.manual_seed(13)
        ours = run(graph, *given)
        torch.manual_seed(13)
        torch.testing.assert_close(ours, program(*given))
