"""On a GPU the bench catches sixteen of sixteen, stays quiet about honest kernels, and L2 is cold."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.pointer_chase import latencies_ns
from tests.measure.racing.cheats import ON_GPU, Function, persisting_l2_cuda, reference, suite
from tilewright.measure.racing.race import Race, VariantResult
from tilewright.measure.timing.crosscheck import clock_overhead_us, profile
from tilewright.measure.timing.gpu_state import persisting_bytes
from tilewright.measure.timing.stopwatch import CudaStopwatch
from tilewright.records.measurement import Direction

pytestmark = pytest.mark.gpu

SIZES = [(64, 257), (8192, 8192)]


def raced(function: Function, sizes: tuple[int, int], direction: Direction = "fwd") -> dict[str, VariantResult]:
    own = suite(function)
    race = Race(own, own.workload(sizes, "float32"), direction, "cuda", seconds=0.3, min_repeats=5)
    outcomes, _ = race.run(own.variants)
    return {outcome.impl: outcome for outcome in outcomes}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ON_GPU)
def test_a_cheat_is_caught_and_an_honest_neighbour_is_not(name: str, sizes: tuple[int, int]) -> None:
    make, words = ON_GPU[name]
    outcomes = raced(make(), sizes)
    suspect, honest = outcomes["suspect"], outcomes["eager"]
    assert suspect.invalid and suspect.timing is None and suspect.refusal is not None
    assert re.search(words, suspect.refusal), suspect.refusal
    assert honest.refusal is None and honest.timing is not None


def on_a_joined_stream() -> Function:
    """Half the work beside the caller's stream, which waits for it."""
    stream = torch.cuda.Stream()

    def function(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = len(x) // 2
        stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad():
            with torch.cuda.stream(stream):
                out[:half] = reference(x[:half])
            out[half:] = reference(x[half:])
        torch.cuda.current_stream().wait_stream(stream)
        return out

    return function


def in_a_graph() -> Function:
    """Replayed from a CUDA graph, into one buffer."""
    held: list[tuple[Tensor, torch.cuda.CUDAGraph, Tensor]] = []

    def function(x: Tensor) -> Tensor:
        if not held:
            source, graph = x.detach().clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = reference(source)
            held.append((source, graph, out))
        source, graph, out = held[0]
        source.copy_(x.detach())
        graph.replay()
        return out

    return function


HONEST: dict[str, Callable[[], Function]] = {
    "plain": lambda: reference,
    "inductor": lambda: torch.compile(reference, dynamic=False),
    "a joined stream": on_a_joined_stream,
    "a graph": in_a_graph,
}


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", HONEST)
def test_no_alarm_on_an_honest_one(name: str, sizes: tuple[int, int], direction: Direction) -> None:
    if direction == "bwd" and name in ("a joined stream", "a graph"):
        pytest.skip("it is written without a backward")
    outcome = raced(HONEST[name](), sizes, direction)["suspect"]
    assert outcome.refusal is None and outcome.timing is not None
    assert outcome.verified and all(row.ok for row in outcome.verified)


def test_l2_is_cold_after_the_flush() -> None:
    """A load that misses L2 takes two to three times as long as one that hits."""
    warm_ns, cold_ns = latencies_ns("cuda")
    assert warm_ns > 100 and 1.4 * warm_ns < cold_ns < 3000
    print(warm_ns, cold_ns)


def test_the_set_aside_part_of_l2_is_given_back() -> None:
    before = persisting_bytes()
    raced(persisting_l2_cuda(), (64, 257))
    assert persisting_bytes() == before


def test_both_clocks_agree_on_a_long_kernel() -> None:
    x = torch.randn(2**26, device="cuda")
    y = torch.empty_like(x)
    watch, overhead_us = CudaStopwatch(), clock_overhead_us("cuda")
    assert overhead_us is not None

    def copy() -> None:
        y.copy_(x)

    event_us = sorted(watch.time(copy).us for _ in range(11))[5]
    seen = profile(lambda: copy, watch)
    assert seen is not None and seen.outside_us == 0
    assert seen.span_us + overhead_us == pytest.approx(event_us, rel=0.02)
    print(event_us, seen, overhead_us)
