"""Where the right answers come from: counted on the captured graph, measured here, or recorded on an H200."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch

from tilewright.case_names import EXAMPLES

if TYPE_CHECKING:
    from tilewright.records.program import Operator, Program

RESULTS = EXAMPLES.parent / "benchmarks" / "results" / "h200"
Stage = Literal["before", "after"]


@functools.cache
def program(target: str) -> Program:
    """The example as `tilewright explain --on h200` has it."""
    from tilewright.case_names import load_case
    from tilewright.verbs import explain_case

    file, _, name = target.partition(":")
    return explain_case(load_case(f"{EXAMPLES / file}:{name}"), "h200").program


def launches(target: str, stage: Stage) -> list[Operator]:
    """The operators of the forward graph that move memory."""
    rows = (op for op in program(target).operators if op.stage == stage and op.graph == "forward")
    return [row for row in rows if row.cost.bytes]


def counted(target: str, stage: Stage, what: Literal["reads", "writes", "flops", "launches"]) -> Callable[[], float]:
    """The sum over the launches of one count; or how many there are."""

    def truth() -> float:
        rows = launches(target, stage)
        return len(rows) if what == "launches" else sum(getattr(row.cost, what) for row in rows)

    return truth


def floor_ratio(target: str) -> float:
    """By how much fusion lowers the floor."""
    before, after = (sum(row.floor_us or 0.0 for row in launches(target, stage)) for stage in ("before", "after"))
    return before / after


def bound(target: str, name: str) -> tuple[str]:
    """What limits one operator of the graph that is not fused."""
    (row,) = (row for row in launches(target, "before") if row.name == name)
    return (row.bound or "unknown",)


def recorded_us(suite: str, case: str, impl: str) -> float:
    """The median of a forward pass on an H200, from the repository's results."""
    with (RESULTS / f"{suite}.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    (found,) = (r for r in rows if (r["case"], r["impl"], r["direction"]) == (case, impl, "fwd"))
    return float(found["median_us"])


def recorded_ratio(suite: str, case: str, slow: str, fast: str) -> Callable[[], float]:
    return lambda: recorded_us(suite, case, slow) / recorded_us(suite, case, fast)


@functools.cache
def softmax_steps() -> dict[str, float]:
    """Seconds of each step of the naive softmax on this CPU, 1000×5000 in fp32: the shortest of nine calls."""
    from torch.utils.benchmark import Timer

    names = {"x": torch.randn(1000, 5000)}
    names["m"] = names["x"].max(dim=1)[0]
    names["z"] = names["x"] - names["m"][:, None]
    names["e"] = names["z"].exp()
    names["s"] = names["e"].sum(dim=1)
    steps = {
        "max": "x.max(dim=1)[0]",
        "sub": "x - m[:, None]",
        "exp": "z.exp()",
        "sum": "e.sum(dim=1)",
        "div": "e / s[:, None]",
    }
    timers = {name: Timer(step, globals=names, num_threads=torch.get_num_threads()) for name, step in steps.items()}
    return {name: min(timer.timeit(1).mean for _ in range(9)) for name, timer in timers.items()}


def resident(threads: int, registers: int, shared: int) -> float:
    """Programs that a multiprocessor of an H200 holds."""
    from tilewright.hardware.architectures import architecture
    from tilewright.hardware.occupancy import occupancy

    return occupancy(architecture("9.0"), threads, registers, shared).blocks


def slowest_softmax_steps() -> list[str]:
    """The slowest step, and those within a tenth of it: which of them comes first changes from run to run."""
    steps = softmax_steps()
    return [name for name, seconds in steps.items() if seconds >= 0.9 * max(steps.values())]


def products(target: str) -> list[Operator]:
    return [row for row in launches(target, "before") if row.operator_class == "compute"]


def score_passes(target: str) -> int:
    """How often a tensor of the size of attention's scores is read or written."""
    scores = max(row.cost.writes for row in products(target))
    counts = [count for row in launches(target, "before") for count in (row.cost.reads, row.cost.writes)]
    return sum(count >= scores for count in counts)
