"""A program that compiles while it is recorded: the same numbers and as many graphs as without a recorder."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module

from tilewright.measure.recording.compilation import COMPILING, Replacements
from tilewright.measure.recording.plan import Detail, RecordingPlan
from tilewright.measure.recording.recorder import Recorder

LEAN = Detail(shapes=False, stacks=False, memory=False)
Step = Callable[[int], float]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


class Breaks(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self[1](x)
        return result


def training(what: str) -> Step:
    """One step on a batch of that size; gives the loss."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    model = (Breaks if what == "graph break" else nn.Sequential)(*layers)
    rule = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    forward: Any = model if what in ("optimizer", "nested module") else compiled(model)
    update = compiled(rule.step) if what == "optimizer" else rule.step
    if what == "function":
        forward = compiled(lambda x: model(x).square())
    elif what == "nested module":
        model[1] = compiled(model[1])

    def step(batch: int) -> float:
        loss = forward(torch.linspace(-1, 1, 4 * batch).view(batch, 4)).square().sum()
        loss.backward()
        update()
        rule.zero_grad()
        return float(loss.detach())

    return step


@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ("module", Detail()),
        ("function", Detail()),
        ("nested module", LEAN),
        ("graph break", LEAN),
        ("optimizer", LEAN),
    ],
)
def test_a_program_compiles_as_it_does_without(tmp_path: Path, what: str, detail: Detail) -> None:
    """New shapes come before, while and after the steps are recorded."""
    seen: list[tuple[list[float], int]] = []
    for records in (False, True):
        torch._dynamo.reset()
        counters.clear()
        step, recorder = training(what), Recorder(RecordingPlan(0, 0, active=9, detail=detail), tmp_path)
        losses = [step(2)]
        if records:
            recorder.start()
        for batch in (2, 3, 4):
            losses.append(step(batch))
            if records:
                recorder.step()
        done = recorder.stop() if records else None
        losses += [step(2), step(5)]
        seen.append((losses, counters["stats"]["unique_graphs"]))
    assert seen[0] == seen[1] and seen[0][1] > 0
    assert done is not None and done.trace is not None and done.steps_kept == 3
    # Without the compiler's own calls: a hundred times as many.
    assert done.events < 40_000
    ranges = [event for event in json.loads(done.trace.read_text())["traceEvents"] if event.get("name") == COMPILING]
    # The optimizer compiles again as its buffers are there.
    assert done.compiled_in == ([0] if what == "optimizer" else [1]) and ranges
    assert sum(event["dur"] for event in ranges) / 1e6 == pytest.approx(done.compiling_seconds, abs=0.1)


def test_hooks_are_hidden_from_the_compiler_in_all_threads() -> None:
    hooks, seen = module._global_forward_hooks, []
    before = len(hooks)

    def look() -> None:
        seen.append(len(hooks) - before)

    def backend(graph: Any, _: Any) -> Any:
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return graph.forward

    @torch.compile(backend=backend)
    def region(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.disable(look)()
        return x + 1

    with Replacements() as replacements, replacements.entry(hooks, object(), lambda *_: None):
        look()
        region(torch.ones(2))
        look()
    # What the region calls uncompiled has them.
    assert seen == [1, 1, 0, 0, 1] and len(hooks) == before
