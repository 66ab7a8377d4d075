"""What each cause in `causes.txt` is called, why it is slow and what to do: one run with a step for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tables import programs
from tests.trace.kineto import HOST, Analysis, Trace
from tests.trace.loading import Rows
from tests.trace.test_host_time import EVENTS, lines

TABLE = Path(__file__).with_name("causes.txt")
Happening = Callable[[Trace], object]
TENSOR = "<built-in method tensor of type object at 0x7f>"
BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x1>"
FILLS = {"dims": [[4, 4], []]}


def frame(name: str, start: float = 100, end: float = 900) -> Happening:
    return lambda trace: trace.frame(name, start, end)


def method(name: str, owner: str = "type object", start: float = 100, end: float = 900) -> Happening:
    return frame(f"<built-in method {name} of {owner} at 0x7f>", start, end)


def operator(name: str, start: float = 110, end: float = 890, **args: Any) -> Happening:
    return lambda trace: trace.operator(name, start, end, **args)


def marked(name: str) -> Happening:
    return lambda trace: trace.slice("user_annotation", name, 100, 900)


def loop(name: str, lasts: float) -> list[Happening]:
    """Two hundred calls of a function, one every 4 µs."""
    return [frame(name, at, at + lasts) for at in range(100, 900, 4)]


def small(name: str, lasts: float) -> list[Happening]:
    """Small operators of a module, one every 4 µs."""
    inside = [operator(name, at, at + lasts) for at in range(100, 900, 4)]
    return [frame("torch/nn/modules/module.py(9): __call__", 99.5, 900.5), *inside]


def looks_for_anomalies(trace: Trace) -> None:
    trace.header["tilewright anomalies"] = "true"


def waits_in(function: str) -> list[Happening]:
    return [
        operator("aten::mm", 10, 60),
        lambda trace: trace.launch(20, 30, 150),
        method(function, "Tensor object"),
        operator("aten::copy_", 102, 898),
        lambda trace: trace.call("cudaStreamSynchronize", 104, 896),
    ]


def product(dims: list[list[int]], *, is_summed: bool = True) -> list[Happening]:
    summed = [operator("aten::sum", 701, 900, dims=[[96, 96, 96]])] if is_summed else []
    return [operator("aten::mul", 100, 700 if is_summed else 900, dims=dims), *summed]


def products(
    first: list[list[int]], second: list[list[int]], between: str = "aten::t", name: str = "aten::mm"
) -> list[Happening]:
    return [operator(name, 100, 850, dims=first), operator(between, 852, 855), operator(name, 860, 900, dims=second)]


def enlarged(weight: list[int], *between: Happening, **args: Any) -> list[Happening]:
    """An interpolation to 16 times the places, and a convolution."""
    sizes = {"dims": [[4, 32, 32, 32], weight]}
    return [
        operator("aten::upsample_bilinear2d", 100, 500, dims=[[4, 32, 8, 8], []]),
        *between,
        operator("aten::conv2d", 501, 900, **sizes, **args),
        operator("aten::mkldnn_convolution", 502, 899, **sizes),
    ]


def unread(number: int, *, late: bool = False) -> list[Happening]:
    """Operators with their nodes' numbers, of which 2 and 3 are the line's; backward comes to 1, 4 and `number`, which
    may be `late`: in the next step."""
    forward = [(1, 99, 1), (100, 500, 2), (500, 900, 3), (901, 930, 4), (930, 950, 5)]
    made = [
        operator("aten::mm", begin, end, **{"Sequence number": at, "Fwd thread id": 0}) for begin, end, at in forward
    ]
    return [
        *made,
        *(
            operator("MmBackward0", after + at, after + 1 + at, **{"Sequence number": at, "Fwd thread id": 1})
            for at, after in ((1, 951), (number, 1051 if late else 951), (4, 951))
        ),
    ]


def aside(*names: str, made: int = 0) -> list[Happening]:
    """A step that trains, and of which the line's operators make so many nodes of the gradients' graph."""
    each, numbers = 800 / len(names), {"Fwd thread id": 0}
    return [
        operator("aten::mm", 10, 90, **numbers, **{"Sequence number": 1}),
        *(operator(name, 100 + each * at, 100 + each * (at + 1), **numbers, **{"Sequence number": 2})
          for at, name in enumerate(names)),
        operator("aten::mean", 902, 910, **numbers, **{"Sequence number": 2 + made}),
        operator("aten::mul", 911, 920, **numbers, **{"Sequence number": 3 + made}),
        frame(BACKWARD, 950, 999),
    ]  # fmt: skip


def accumulated(count: int) -> list[Happening]:
    """A backward that takes 400 µs to add to that many gradients."""
    name, each = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 400 / count
    return [
        frame(BACKWARD, 500, 900),
        *(operator(name, 500 + each * at + 0.1, 500 + each * (at + 1)) for at in range(count)),
    ]


def untaken(*added: int) -> list[Happening]:
    """A backward of four gradients from 50 µs on, of which it adds to those with the numbers."""
    name, begins = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", (60, 80, 600, 880)
    return [
        frame(BACKWARD, 50, 899),
        *(operator("aten::mm", at - 9, at - 1) for at in begins),
        operator("aten::mm", 100, 590),
        operator("aten::mm", 620, 860),
        *(operator(name, at, at + 18) for at in begins),
        *(operator("aten::add_", begins[at] + 1, begins[at] + 17) for at in added),
    ]


def calls(module: str, *, within: str = "") -> list[Happening]:
    """A step that trains the module Net_0, and then calls one that nothing differentiates."""
    around = [frame(within, 99.5, 900.5)] if within else []
    trained = [frame("nn.Module: Net_0", 1, 40), operator("aten::addmm", 5, 35), frame(BACKWARD, 41, 90)]
    forward = lambda trace: trace.flow("fwdbwd", 1, (5, HOST), (50, HOST))  # noqa: E731
    trained += [operator("AddmmBackward0", 50, 80), forward]
    return [*trained, *around, frame(f"nn.Module: {module}"), operator("aten::addmm", 110, 890)]


def detached(*, first: str = "nn.Module: Critic_0") -> list[Happening]:
    """As `calls`, of the model that trains; what it gives is detached, and `first` is next."""
    return [
        *calls("Net_0"),
        operator("aten::detach", 901.2, 901.5),
        frame(first, 902, 990),
        operator("aten::mm", 910, 980),
    ]


SQUARES = [[700, 700], [700, 700]]
NAMED = globals() | {"EVENTS": EVENTS}
CAUSES, NO_CAUSE = (programs(TABLE, section, NAMED) for section in ("causes", "no cause"))


@pytest.fixture(scope="module")
def causes() -> dict[str, Rows]:
    """Of each step the causes that stand out, the largest gain first."""
    steps, traces = CAUSES | NO_CAUSE, []
    for step in steps.values():
        trace = Trace()
        trace.step(0, 0, 1000)
        trace.frame("train.py(1): main", 0, 1000)
        for happens in step.function():
            happens(trace)
        lines(trace, (0, 2), (99, 5), (901, 9))
        traces.append(trace)
    sql = """SELECT file_id, what, source, percent, why, action FROM cause
             WHERE win_ms_per_step >= 0.1 * ms_per_step / percent * 100 ORDER BY file_id, win_ms_per_step DESC"""
    found: dict[str, Rows] = {name: [] for name in steps}
    for file_id, *row in Analysis(traces).rows(sql):
        found[list(steps)[file_id]].append(tuple(row))
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_has_its_name_its_share_its_line_and_what_to_do(name: str, causes: dict[str, Rows]) -> None:
    said = CAUSES[name].fields
    what, source, percent, why, action = causes[name][0]
    assert what.startswith(said["called"]) and said["because"] in why and said["do"] in action, causes[name]
    # A call's own time, or with the line's.
    assert source == "train.py:5" and 79 <= percent <= 81, causes[name]


@pytest.mark.parametrize("name", NO_CAUSE)
def test_nothing_stands_out(name: str, causes: dict[str, Rows]) -> None:
    assert causes[name] == []


@pytest.mark.parametrize(("sums", "named"), [([96, 96, 96], ["train.py:5"]), ([96, 96], [])])
def test_a_difference_of_all_pairs_is_summed_a_line_later(sums: list[int], named: list[str]) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::sub", 100, 500, dims=[[96, 1, 96], [1, 96, 96]])
    trace.operator("aten::pow", 501, 700, dims=[sums, []])
    trace.operator("aten::sum", 701, 900, dims=[sums, []])
    lines(trace, (0, 9), (99, 5), (500, 6), (901, 9))
    found = Analysis([trace]).rows("SELECT source, percent FROM cause WHERE kind = 'broadcast'")
    assert [source for source, _ in found] == named
    assert all(percent == pytest.approx(79.8, abs=0.5) for _, percent in found)


@pytest.mark.parametrize(("more", "trains", "named"), [(4, False, True), (0, False, False), (4, True, False)])
def test_a_model_that_is_given_all_tokens_again(more: int, trains: bool, named: bool) -> None:
    """Steps of 1 ms, of which the model's call takes 800 µs; a batch of four sequences, from 64 tokens on."""
    trace = Trace()
    trace.frame("train.py(1): main", 0, 3000)
    for step in range(3):
        begin = 1000 * step
        trace.step(step, begin, begin + 1000)
        trace.frame("nn.Module: GPT_0", begin + 100, begin + 900)
        trace.frame("train.py(40): forward", begin + 101, begin + 899)
        trace.operator("aten::embedding", begin + 110, begin + 120, dims=[[2000, 64], [4, 64 + more // 4 * step]])
        trace.operator("aten::mm", begin + 120, begin + 890)
        if trains:
            trace.frame(BACKWARD, begin + 950, begin + 999)
    lines(
        trace,
        *(pair for step in range(3) for pair in ((1000 * step, 2), (1000 * step + 99, 5), (1000 * step + 901, 9))),
    )
    found = Analysis([trace]).rows("SELECT source, percent, win_ms_per_step, why FROM cause WHERE kind = 'grown'")
    assert bool(found) == named
    if named:
        ((source, percent, win, why),) = found
        assert source == "train.py:5" and percent == pytest.approx(80, abs=0.5)
        assert win == pytest.approx(0.9 * (1 - 4 / 264) * 0.8, rel=0.01) and "given 264 tokens, 4 more" in why


def test_a_check_has_its_own_line() -> None:
    """The line before computes longer, without a gradient as well."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    for happening in aside("aten::relu", "aten::isnan", "aten::any", "aten::isinf"):
        happening(trace)
    lines(trace, (0, 9), (99, 5), (300, 6), (401, 6), (901, 9))
    ((what, source),) = Analysis([trace]).rows("SELECT what, source FROM cause WHERE kind = 'aside'")
    assert (what, source) == ("Checking values", "train.py:6")


def test_float64_is_named_where_it_begins() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::zero_", 10, 90, dims=[[512, 512]])
    trace.operator("aten::mul", 100, 300, dims=[[512, 512], [512, 512]], types=["float", "double"])
    trace.operator("aten::pow", 301, 900, dims=[[512, 512], []], types=["double", "Scalar"])
    # The line that computes longest begins the step too, with something else.
    lines(trace, (0, 9), (99, 5), (300, 9))
    ((what, source),) = Analysis([trace]).rows("SELECT what, source FROM cause WHERE kind = 'double'")
    assert (what, source) == ("Computing in float64", "train.py:5")
