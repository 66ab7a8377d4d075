"""Groups of channels-last convolutions that are padded, and those that stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, run, stays
from tilewright.choose import padded_groups as pad_groups
from tilewright.graph.layouts import FORMATS, lies_channels_last
from tilewright.hardware.target import target_named

H200 = target_named("h200")
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def operands(count: int, read: int, made: int, *places: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Gradient, image, weight and bias, of two samples and windows of three."""
    generator = torch.Generator().manual_seed(count)
    shapes = (2, count * made, *places), (2, count * read, *places), (count * made, read, *[3] * len(places))
    laid = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    bias = torch.randn(count * made, generator=generator).to(dtype)
    return [*(x.contiguous(memory_format=FORMATS[x.dim()]) for x in laid), bias]


def program(count: int, rank: int, wanted: list[bool]) -> Callable[..., Any]:
    """A convolution and its gradients."""
    ones, zeros = [1] * rank, [0] * rank

    def function(g: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = FORWARD(x, w, b, ones, ones, ones, False, zeros, count)
        found = BACKWARD(g, x, w, list(b.shape), ones, ones, ones, False, zeros, count, wanted)
        return y, *(gradient for gradient, is_wanted in zip(found, wanted, strict=True) if is_wanted)

    return function


CASES = {
    "RegNet's": (5, 24, 24, 32, (6, 7), [True, True, True]),
    "wider out": (3, 17, 32, 32, (9, 5), [True, True, False]),
    "narrower out": (3, 32, 31, 32, (5, 8), [True, False, True]),
    "volumes": (2, 20, 28, 32, (4, 3, 5), [False, True, True]),
    "narrow": (7, 9, 15, 16, (6, 5), [True, True, True]),
    "wide": (2, 64, 33, 64, (6, 5), [True, True, True]),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), ("narrow", torch.float16)])
def test_results_and_gradients_are_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_groups, "LEAST_BYTES", 1)
    count, read, made, width, places, wanted = CASES[name]
    inputs = operands(count, read, made, *places, dtype=dtype)
    function = program(count, len(places), wanted)
    graph = aten(function, *inputs)
    before = [node.meta["val"].stride() for node in graph.output_node().all_input_nodes]
    decisions = pad_groups.pad_groups(graph, H200)
    assert [decision.verdict for decision in decisions] == ["taken"] * 2
    for target, place in ((FORWARD, 1), (BACKWARD, 2)):
        (call,) = graph.find_nodes(op="call_function", target=target)
        assert call.args[place].meta["val"].shape[:2] == (count * width, width)
        assert all(lies_channels_last(x.meta["val"]) for x in call.all_input_nodes if x.meta["val"].dim() > 1)
    after = graph.output_node().all_input_nodes
    assert [node.meta["val"].stride() for node in after] == before
    exact = function(*(x.double() for x in inputs))
    for ours, eagers, true in zip(run(graph, *inputs), function(*inputs), exact, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (eagers.shape, eagers.dtype, eagers.stride())
        error, theirs = ((x.double() - true).norm() / true.norm() for x in (ours, eagers))
        assert error <= 2 * theirs + 4 * torch.finfo(dtype).eps


def test_forward_and_backward_share_the_padded_image_and_weight() -> None:
    graph = aten(program(5, 2, [True, True, False]), *operands(5, 24, 24, 60, 61))
    pad_groups.pad_groups(graph, H200)
    forward, backward = (
        next(iter(graph.find_nodes(op="call_function", target=target))) for target in (FORWARD, BACKWARD)
    )
    assert forward.args[:2] == backward.args[1:3]


UNCHANGED = {
    "16 channels": (8, 16, 16, (60, 61)),
    "32 channels": (4, 32, 32, (60, 61)),
    "8 channels": (16, 8, 8, (60, 61)),
    "few channels": (40, 4, 4, (60, 61)),
    "many channels": (3, 72, 72, (60, 61)),
    "twice as many out": (3, 40, 24, (60, 61)),
    "one group": (1, 24, 24, (160, 161)),
    "small": (2, 24, 24, (8, 9)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_convolutions_stay(name: str) -> None:
    count, read, made, places = UNCHANGED[name]
    inputs = operands(count, read, made, *places)
    stays(lambda graph: pad_groups.pad_groups(graph, H200), program(count, 2, [True] * 3), *inputs)


@pytest.mark.parametrize("what", ["contiguous", "fp32", "CPU"])
def test_other_layouts_dtypes_and_targets_stay(what: str) -> None:
    inputs = operands(5, 24, 24, 60, 61, dtype=torch.float32 if what == "fp32" else torch.bfloat16)
    if what == "contiguous":
        inputs = [x.contiguous() for x in inputs]
    target = target_named("cpu") if what == "CPU" else H200
    stays(lambda graph: pad_groups.pad_groups(graph, target), program(5, 2, [True] * 3), *inputs)
