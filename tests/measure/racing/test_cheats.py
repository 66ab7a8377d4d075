"""The bench catches what looks fast and is not, and raises no alarm on honest implementations."""

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.measure.racing.cheats import ON_CPU, ON_GPU, Function, cached_output, reference, suite
from tilewright.measure.racing.race import Race, VariantResult
from tilewright.records.measurement import Direction
from tilewright.records.suite import Variant

pytestmark = pytest.mark.usefixtures("short_races")


def raced(
    function: Function, direction: Direction = "fwd", seconds: float = 0.05, min_repeats: int = 4
) -> dict[str, VariantResult]:
    own = suite(function)
    race = Race(own, own.workload((64, 257), "float32"), direction, seconds=seconds, min_repeats=min_repeats)
    outcomes, _ = race.run(own.variants)
    return {outcome.impl: outcome for outcome in outcomes}


def test_there_are_sixteen() -> None:
    assert len(ON_GPU) == 16 and set(ON_GPU) - set(ON_CPU) == {"persisting L2", "work on a stream that is not joined"}


@pytest.mark.parametrize("name", ON_CPU)
def test_a_cheat_is_caught_and_an_honest_neighbour_is_not(name: str) -> None:
    clock = time.perf_counter_ns
    make, words = ON_CPU[name]
    outcomes = raced(make())
    suspect, honest = outcomes["suspect"], outcomes["eager"]
    assert suspect.invalid and suspect.timing is None
    assert suspect.refusal is not None
    assert re.search(words, suspect.refusal), suspect.refusal
    assert honest.refusal is None and honest.timing is not None and all(row.ok for row in honest.verified)
    assert time.perf_counter_ns is clock


def own_buffer() -> Function:
    """One buffer for all results, written anew each time."""
    held: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        if not held:
            held.append(torch.empty_like(x))
        with torch.no_grad():
            return torch.mul(x.clamp(min=0), 3, out=held[0])

    return function


HONEST: dict[str, Callable[[], Function]] = {
    "plain": lambda: reference,
    "another order": lambda: lambda x: (x * 3).clamp(min=0),
    "a tuple": lambda: lambda x: (reference(x),),
    "an own buffer": own_buffer,
    "a strided result": lambda: lambda x: reference(x.t()).t(),
}


@pytest.mark.parametrize("name", HONEST)
def test_no_alarm_on_an_honest_one(name: str) -> None:
    outcome = raced(HONEST[name]())["suspect"]
    assert outcome.refusal is None and outcome.timing is not None and outcome.timing.repeats >= 4
    # One row for each of the two inspected calls.
    assert [(row.tensor, row.ok) for row in outcome.verified] == [("output 0", True)] * 2


def with_backward(gradient: Callable[[Tensor, Tensor], Tensor]) -> Function:
    """The reference with another backward, of the incoming gradient and x."""

    class Other(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return reference(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return gradient(dy, *ctx.saved_tensors)

    return lambda x: Other.apply(x)


def test_a_gradient_is_held_against_float64_too() -> None:
    kept: list[Tensor] = []

    def first(dy: Tensor, x: Tensor) -> Tensor:
        kept.append(dy * (x > 0) * 3)
        return kept[0].clone()

    outcome = raced(with_backward(first), "bwd")["suspect"]
    assert outcome.invalid and outcome.refusal is not None and outcome.refusal.startswith("bwd gradient 0 is wrong")
    honest = raced(reference, "bwd")["suspect"]
    assert honest.refusal is None
    assert [row.tensor for row in honest.verified] == ["output 0", "gradient 0"] * 2


def test_a_failure_is_not_invalid_and_stops_nobody_else() -> None:
    def fails(x: Tensor) -> Tensor:
        raise NotImplementedError("only on Tuesdays\nor never")

    outcomes = raced(fails)
    assert outcomes["suspect"].refusal == "NotImplementedError: only on Tuesdays" and not outcomes["suspect"].invalid
    assert outcomes["eager"].refusal is None and outcomes["eager"].timing is not None


def test_a_late_failure_has_no_time() -> None:
    calls: list[int] = []

    def fails(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 20:
            raise MemoryError("full")
        return reference(x)

    outcome = raced(fails, min_repeats=30)["suspect"]
    assert outcome.refusal == "MemoryError: full" and outcome.timing is None


def test_the_callers_generator_stays_as_it_was() -> None:
    state = torch.random.get_rng_state()
    raced(cached_output())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_what_a_variant_says_of_itself_is_noted_and_let_pass() -> None:
    def consuming(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.clamp_(min=0) * 3

    others = [
        Variant("consuming", "library", consuming, overwrites_inputs=True),
        Variant("in part", "library", lambda x: x * 3, unverified="it does the product alone"),
        Variant("neighbour", "torch", reference),
    ]
    own = suite(reference, *others)
    race = Race(own, own.workload((64, 257), "float32"), "fwd", seconds=0.05, min_repeats=4)
    outcomes = {outcome.impl: outcome for outcome in race.run(own.variants)[0]}
    assert all(outcome.refusal is None for outcome in outcomes.values())
    assert "it overwrites its inputs" in outcomes["consuming"].notes
    assert "values not checked: it does the product alone" in outcomes["in part"].notes
    assert not outcomes["in part"].verified and outcomes["in part"].worst is None
    assert all(row.ok for row in outcomes["neighbour"].verified)


def test_an_incoming_gradient_is_not_to_be_written() -> None:
    outcomes = raced(with_backward(lambda dy, x: dy.mul_(x > 0) * 3), "bwd")
    assert outcomes["suspect"].refusal == "it overwrites its inputs" and outcomes["eager"].refusal is None
