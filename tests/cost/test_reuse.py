"""Reuse distances counted by hand, and what they do to a prediction."""

from collections.abc import Callable

import torch
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.cost.reuse import reuse_distances
from tilewright.cost.work import Distances, Work, predicted_us
from tilewright.graph import calls
from tilewright.hardware.profiles import profile_for

MIB = 1024**2


def distances(function: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Distances]:
    """Of what each operator reads that is no view."""
    nodes = [node for node in aten(function, *inputs).nodes if node.op == "call_function" and not calls.is_view(node)]
    nodes = [node for node in nodes if calls.operator_name(node.target) != "getitem"]
    found = reuse_distances([(list(node.all_input_nodes), [node]) for node in nodes])
    return {calls.operator_name(node.target): some for node, some in zip(nodes, found, strict=True)}


def test_the_bytes_between_two_uses_are_counted() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x.relu(), y.exp().t())

    size = 8 * 4 * 4
    found = distances(function, torch.ones(8, 4), torch.ones(4, 8))
    # A run touches seven tensors: x, relu, y, exp, and the two and the result of the sum.
    assert found["relu"] == found["exp"] == ((size, 7 * size),)
    # Between the making of relu and its use, y and exp were touched; exp was the last, and is read through a view.
    assert found["add"] == ((size, 3 * size), (size, size))


def test_each_result_of_a_call_is_touched_when_it_is_made() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.max(x, 0)[0].exp()

    # Beside the four maxima their places are made, 32 bytes.
    assert distances(function, torch.ones(64, 4))["exp"] == ((16, 16 + 32),)


def test_what_left_the_cache_takes_longer_to_read() -> None:
    h200 = profile_for("h200")

    def us(*found: tuple[int, int]) -> float:
        return predicted_us(Work("pointwise", 8 * MIB, 8 * MIB, distances=found), h200)

    near, far = (8 * MIB, 16 * MIB), (8 * MIB, 512 * MIB)
    assert us() == us(near) < us(far)
    assert us(near) < us((4 * MIB, 16 * MIB), (4 * MIB, 512 * MIB)) < us(far)
