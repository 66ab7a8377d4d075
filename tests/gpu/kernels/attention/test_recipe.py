"""Attention's recipes on a GPU: the numbers contract, by the executor and by its Python twin, and CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import replayed, values_of
from tests.kernels.attention.calls import Call, wrong
from tilewright.kernels.attention import attention, direct, registered
from tilewright.kernels.by_recipe import compiled_recipe
from tilewright.launch import twin
from tilewright.launch.builder import operands_of
from tilewright.launch.executor import EXTENSION, native_recipe
from tilewright.records.recipe import Recipe
from tilewright.runtime.native import RECIPE

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
CALLS = [
    Call(batch=2, heads=4, kv_heads=2, queries=799, keys=1023, head_size=64, options={"causal": True}),
    Call(batch=2, heads=4, kv_heads=4, queries=1025, keys=1025, head_size=128, layout="positions"),
    Call(heads=16, kv_heads=16, queries=2048, keys=2048, head_size=128, options={"causal": True}),
    Call(heads=16, batch=8, kv_heads=16, queries=1024, keys=1024, head_size=64),
    Call(heads=2, queries=640, keys=384, head_size=256, options={"window": (100, 0)}),
    Call(heads=4, queries=203, keys=311, head_size=40, layout="misaligned"),
    Call(heads=4, queries=203, keys=311, head_size=64, layout="last", dtype=torch.float16),
    Call(queries=203, keys=311, head_size=64, options={"softcap": 1.5}),
    Call(queries=203, keys=311, head_size=128, value_size=64, mask="additive", slopes=True),
    Call(queries=203, keys=311, head_size=64, mask="boolean", options={"deterministic": True}),
    Call(queries=43, keys=51, head_size=64, options={"dropout_p": 0.3}),
    Call(queries=113, keys=203, head_size=72, dtype=torch.float32),
    Call(heads=4, kv_heads=4, queries=203, keys=113, value_size=32, head_size=64, layout="repeated"),
    Call(batch=2, heads=16, kv_heads=2, queries=1, keys=5000, head_size=128),
    Call(heads=8, kv_heads=2, queries=2, keys=3000, head_size=80, slopes=True),
]
Performed = Callable[[Recipe, list[torch.Tensor]], Any]


def by_executor(recipe: Recipe, inputs: list[torch.Tensor]) -> Any:
    """The recipe as the one step of a program."""
    module = EXTENSION.load(EXTENSION.built())
    places = range(len(inputs), len(inputs) + len(recipe.results))
    detail = native_recipe(module, recipe), [*range(len(inputs))], [(place, -1) for place in places], None
    arguments = [(i, None) for i in range(len(inputs))]
    steps: list[Any] = [(RECIPE, recipe.name, [], detail)]
    results = [(place, None) for place in places]
    return module.run(module.program((recipe.device, None, places.stop, arguments, steps, results)), list(inputs))


@pytest.fixture(params=[by_executor, twin.perform], ids=["executor", "twin"])
def recipes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Attention is done by its recipes; which, in order."""
    done: list[str] = []

    def use(operator: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
            operands = operands_of(tensors)
            rest = iter(operands)
            known = [next(rest) if isinstance(x, torch.Tensor) else x for x in arguments]
            recipe = compiled_recipe(f"tilewright::{operator}", operands, known)
            assert recipe is not None
            done.append(operator)
            return tuple(request.param(recipe, tensors))

        return run

    monkeypatch.setattr(registered, "forward", use("attention"))
    monkeypatch.setattr(registered, "backward", use("attention_backward"))
    monkeypatch.setattr(direct, "keep", lambda *_: None)
    direct._courses.clear()
    return done


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_numbers_contract(call: Call, recipes: list[str]) -> None:
    assert wrong(call, GPU) == [] and recipes == ["attention", "attention_backward"]


def test_a_captured_graph_gives_the_same(recipes: list[str]) -> None:
    """Also with counters that must be zero, and with a table of tiles."""
    for call in (CALLS[2], CALLS[-2]):
        tensors, options = call.inputs(GPU)
        run = functools.partial(attention, **options)
        again, once = replayed(run, tensors, times=2), values_of(run, tensors)
        assert torch.equal(again[0], once[0])
        # The gradient of q is a sum in no fixed order.
        torch.testing.assert_close(again[1:], once[1:], rtol=2**-6, atol=2**-6)
