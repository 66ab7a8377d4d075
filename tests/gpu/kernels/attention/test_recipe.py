"""Attention's recipes on a GPU: the numbers contract, by the executor and by its Python twin, and CUDA graphs."""

import functools
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import on_a_side_stream, replayed, values_of
from tests.kernels.attention.calls import Call, wrong
from tilewright.kernels.attention import attention, registered
from tilewright.launch import twin
from tilewright.launch.executor import EXTENSION
from tilewright.records.recipe import Recipe

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
    Call(queries=1, keys=333, head_size=128),
    Call(queries=333, keys=3, head_size=128),
    Call(queries=333, keys=333, head_size=64, options={"window": (0, 0)}),
]


@pytest.fixture(params=["executor", "twin"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, executor: None) -> list[str]:
    """The recipes that Python performs."""
    done: list[str] = []
    perform = twin.perform

    def counted(recipe: Recipe, *rest: Any) -> Any:
        done.append(recipe.name)
        return perform(recipe, *rest)

    monkeypatch.setattr(twin, "perform", counted)
    if request.param == "twin":
        monkeypatch.setattr(EXTENSION, "found", None)
        monkeypatch.setattr(EXTENSION, "module", lambda: None)
        for operator in (registered.forward, registered.backward):
            monkeypatch.setattr(operator.__self__, "_native", None)  # type: ignore[attr-defined]
    return done


def sees_one_key(call: Call) -> bool:
    """Operators follow the launches of such a backward, so Python runs it, not the executor."""
    return call.keys == 1 or call.options.get("window") == (0, 0)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_numbers_contract(call: Call, road: list[str]) -> None:
    assert wrong(call, GPU) == []
    by_python = [] if EXTENSION.found else ["tilewright::attention"]
    if not EXTENSION.found or sees_one_key(call):
        by_python.append("tilewright::attention_backward")
    assert road == by_python


def test_streams_and_graphs(road: list[str]) -> None:
    """With a table of tiles, by each of Hopper's head sizes, and with counters that must be zero."""
    for call in (*CALLS[2:5], CALLS[13]):
        tensors, options = call.inputs(GPU)
        run = functools.partial(attention, **options)
        once = values_of(run, tensors)
        for again in (replayed(run, tensors, times=2), on_a_side_stream(run, tensors)):
            assert torch.equal(again[0], once[0])
            # The gradient of q is a sum in no fixed order.
            torch.testing.assert_close(again[1:], once[1:], rtol=2**-6, atol=2**-6)
