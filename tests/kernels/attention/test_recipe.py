"""Attention's recipes without a GPU: Triton's kernels get their parameters; results lie as a graph is told."""

import itertools
import operator
import re
import struct
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.gpu.kernels.launching import in_turn
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.attention import recipe, registered
from tilewright.kernels.by_recipe import compiled_recipe
from tilewright.launch import builder, nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.triton import LoadedKernel
from tilewright.records.recipe import Argument, Launch, Number, Recipe, TensorMap
from tilewright.runtime.assemble import Scheduled, assemble
from tilewright.runtime.executable import CallStep

OPTIONS = (None, None, None, None, 0.125, None, 0, 0.0, 0.0, 0, 0, False, "triton")
"""The operator's arguments from mask to impl."""


def imaginary(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Operand]:
    device = torch.device("cuda", 0)
    return [
        Operand(i, shape, tuple(torch.empty(shape, device="meta").stride()), dtype, device)
        for i, shape in enumerate(shapes)
    ]


def nbytes_of(argument: Argument) -> int:
    """The size of a kernel parameter."""
    if isinstance(argument, Number):
        return struct.calcsize(argument.format)
    return 128 if isinstance(argument, TensorMap) else 8


def test_tritons_kernels_get_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches pass as many parameters, of the same sizes, as Triton's kernels take; TMA loads q, k, v and dout."""
    pytest.importorskip("triton")
    found: list[Any] = []

    def loaded(compiled: Any) -> LoadedKernel:
        found.append(compiled)
        meta = compiled.metadata
        return LoadedKernel(meta.name, 1, 32 * meta.num_warps, meta.shared)

    monkeypatch.setattr(builder, "loaded", loaded)
    q, k = (2, 4, 100, 64), (2, 2, 130, 64)
    with simulated(profile_for("h200"), "9.0"):
        operands = imaginary(q, k, k)
        ahead = recipe.forward(RecipeBuilder("forward", operands, compiled=True), *operands, *OPTIONS)
        operands = imaginary(q, q, k, k, q, q[:3], (0,), (0,))
        back = [Operand(x.index, x.shape, x.strides, torch.float32, x.device) for x in operands]
        dout, *rest = operands[:5]
        call = RecipeBuilder("backward", operands, compiled=True)
        behind = recipe.backward(call, dout, None, *rest, *back[5:], *OPTIONS)
    assert ahead is not None and behind is not None
    launches = [action for action in (*ahead.actions, *behind.actions) if isinstance(action, Launch)]
    names = [launch.kernel.name for launch in launches]
    assert names == ["forward", "backward_prepare", "backward_dq", "backward_dk_dv"]
    maps = [sum(isinstance(argument, TensorMap) for argument in launch.arguments) for launch in launches]
    assert maps == [3, 0, 4, 4]
    for launch, compiled in zip(launches, found, strict=True):
        parameter = r"^\s*\.param .*?(?:\.[bu](\d+)|\.f(\d+)) .*?_param_\d+(?:\[(\d+)\])?"
        found_in_code = re.findall(parameter, compiled.asm["ptx"], re.MULTILINE)
        expected = [int(array) if array else int(bits or floats) // 8 for bits, floats, array in found_in_code]
        given = [nbytes_of(argument) for argument in launch.arguments]
        assert given == expected
    assert [layout.shape for layout in ahead.buffers] == [q, q[:3], (0,), (0,)]
    assert ahead.results == (0, 1, 2, 3) and behind.results == (0, 1, 2)


def test_what_is_no_launch_is_left_to_the_operator() -> None:
    """Empty tensors, fp64, and gradients that are set to zero after the launches."""

    def of(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype, backward: bool = False) -> Recipe | None:
        operands = imaginary(q, k, k, dtype=dtype)
        call = RecipeBuilder("attention", operands, compiled=True)
        if backward:
            return recipe.backward(call, operands[0], None, *operands, operands[0], *operands, *OPTIONS)
        return recipe.forward(call, *operands, *OPTIONS)

    with simulated(profile_for("h200"), "9.0"):
        assert of((1, 2, 0, 64), (1, 2, 5, 64), torch.bfloat16) is None
        assert of((1, 2, 4, 64), (1, 2, 5, 64), torch.float64) is None
        assert of((1, 2, 4, 64), (1, 2, 1, 64), torch.bfloat16, backward=True) is None
        assert of((1, 2, 4, 512), (1, 2, 5, 512), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("width", "along", "dtype"),
    in_turn(itertools.product([64, 40, 5], ["bhsd", "bshd", "sbhd", "bhds"]), [(torch.bfloat16, torch.float32)]),
    ids=str,
)
def test_results_lie_as_a_graph_is_told(
    along: str, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a compiled graph would not take the recipe."""

    def launch(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(RecipeBuilder, "launch", launch)
    monkeypatch.setattr(nvrtc, "available", lambda device: False)
    sizes = [{"b": 2, "h": heads, "s": length, "d": width} for heads, length in ((4, 70), (2, 130), (2, 130))]
    shapes = ([size[axis] for axis in along] for size in sizes)
    order = [along.index(axis) for axis in "bhsd"]
    q, k, v = (torch.empty(shape, device="meta", dtype=dtype).permute(order) for shape in shapes)
    results = registered._forward_fake(q, k, v, *OPTIONS)
    gradients = registered._backward_fake(results[0], None, q, k, v)
    arguments = results[0], None, q, k, v, *results
    for name, given, told in (
        ("tilewright::attention", (q, k, v), results),
        ("tilewright::attention_backward", arguments, gradients),
    ):
        metas = [x for x in given if x is not None]
        operands = [
            Operand(i, tuple(x.shape), tuple(x.stride()), x.dtype, torch.device("cuda", 0)) for i, x in enumerate(metas)
        ]
        rest = iter(operands)
        with simulated(profile_for("h200"), "9.0"):
            made = compiled_recipe(name, operands, [None if x is None else next(rest) for x in given] + [*OPTIONS])
        assert made is not None
        layouts = [made.buffers[number] for number in made.results]
        assert [(x.shape, x.strides, x.dtype) for x in layouts] == [(x.shape, x.stride(), x.dtype) for x in told]


def test_a_graph_on_a_gpu_has_the_recipe_as_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object, **__: object) -> None:
        pass

    monkeypatch.setattr(RecipeBuilder, "launch", launch)
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in "qkv"]
    call = graph.call_function(torch.ops.tilewright.attention.default, (*inputs, *OPTIONS))
    results = [graph.call_function(operator.getitem, (call, place)) for place in range(2)]
    graph.output((tuple(results),))
    with FakeTensorMode():
        metas = [torch.empty(2, 100, 4, 64, device="cuda:0", dtype=torch.bfloat16).transpose(1, 2) for _ in inputs]
        given = registered._forward_fake(*metas, *OPTIONS)
    for node, meta in zip((*inputs, call, *results), (*metas, given, *given[:2]), strict=True):
        node.meta["val"] = meta
    with simulated(profile_for("h200"), "9.0"):
        first, *parts = assemble(Scheduled(graph, [call, *results]), {}, None).steps
    assert isinstance(first, CallStep) and first.recipe is not None and len(parts) == 2
    assert first.recipe.name == "tilewright::attention" and len(first.recipe.residues) == len(first.reads) == 3
