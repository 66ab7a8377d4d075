"""Tests for every kernel on a GPU: each dtype, a side stream, a CUDA graph, one graph for `torch.compile`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tests.waiting import in_threads

Call = Callable[..., object]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


FOUR = ((torch.float32, torch.float64), DTYPES[1:])


def in_turn(cases: Iterable[Any], kinds: Iterable[Sequence[Any]] = (DTYPES[:1], DTYPES[1:])) -> list[tuple[Any, ...]]:
    """Each, a value or a tuple of several, with one dtype of each kind: kernels differ in conversions of numbers alone.

    By the Thue-Morse sequence, which has no period to fall in step with that of `cases`.
    """
    split = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [(*case, kind[i.bit_count() % len(kind)]) for i, case in enumerate(split) for kind in kinds]


def values_of(call: Call, inputs: Sequence[object]) -> list[torch.Tensor]:
    """The results, then the gradients of the sum of their squares."""
    returned = call(*inputs)
    results = [returned] if isinstance(returned, torch.Tensor) else list(returned)  # type: ignore[call-overload]
    wanted = [value for value in inputs if isinstance(value, torch.Tensor) and value.requires_grad]
    values = [result.detach() for result in results]
    if not wanted:
        return values
    end = sum(result.float().square().sum() for result in results)
    return [*values, *torch.autograd.grad(end, wanted)]


def on_a_side_stream(call: Call, inputs: Sequence[object]) -> list[torch.Tensor]:
    """`values_of` on a stream that another, busy one does not wait for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(50_000_000)
    with torch.cuda.stream(stream):
        values = values_of(call, inputs)
    stream.synchronize()
    return values


def in_four_threads(call: Call, fresh: Callable[[], Sequence[object]]) -> list[list[torch.Tensor]]:
    """`values_of` ten times in each, on a stream of its own, with what `fresh` gives it."""
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = fresh()
            got.extend(values_of(call, mine) for _ in range(10))
            torch.cuda.current_stream().synchronize()

    in_threads([work] * 4)
    assert len(got) == 40
    return got


def replayed(call: Call, inputs: Sequence[object], times: int = 1) -> list[torch.Tensor]:
    """`values_of`, captured in a CUDA graph after a warm-up and replayed; what the last replay gave."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        values_of(call, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = values_of(call, inputs)
    for value in values:
        value.zero_()
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    return values


def compiled(call: Call, inputs: Sequence[object]) -> list[torch.Tensor]:
    """`values_of` under Inductor, with no break in the graph."""
    torch._dynamo.reset()
    return values_of(torch.compile(call, fullgraph=True), inputs)
