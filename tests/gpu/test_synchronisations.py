"""Planted synchronisations in a profile of a real GPU: each is found in its line, and nothing else is."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from tests.trace.kineto import analysed, rows
from tilewright.measure.recording.compilation import Replacements
from tilewright.measure.recording.host_ranges import HostRanges
from tilewright.measure.recording.synchronisations import marked_synchronisations

pytestmark = pytest.mark.gpu


def work() -> torch.Tensor:
    x = torch.ones(4096, 4096, device="cuda")
    for _ in range(8):
        x = x @ x * 1e-4
    return x


def planted() -> None:
    null, host = open(os.devnull, "w"), torch.ones(1024, 1024)  # noqa: SIM115
    print("loss", work().sum(), file=null)
    work().sum().item()
    work()[:64].cpu()
    torch.nonzero(work() > 0)
    x = work()
    x[x > 0]
    work()
    host.to("cuda")
    work()
    torch.cuda.synchronize()
    null.close()


WAITING = ("print(", ".item()", ".cpu()", "torch.nonzero", "x[x > 0]", 'host.to("cuda")', "torch.cuda.synchronize()")


def trace_of(step: Callable[[], None], path: Path) -> Path:
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=plan, with_stack=True, acc_events=True
    ) as profiler:
        for _ in range(2):
            ranges = HostRanges()
            with marked_synchronisations(ranges.mark, Replacements()):
                step()
            profiler.step()
    bare = path.with_suffix(".bare")
    profiler.export_chrome_trace(str(bare))
    ranges.join(bare, path)
    return path


def test_every_planted_line_and_no_other(tmp_path: Path) -> None:
    connection = analysed([trace_of(planted, tmp_path / "trace.json")])
    lines, first = inspect.getsourcelines(planted)
    expected = {
        f"{Path(__file__).relative_to(Path.cwd())}:{first + next(n for n, line in enumerate(lines) if text in line)}"
        for text in WAITING
    }
    found = dict(
        rows(connection, "SELECT source, sum(waited_ms_per_step) FROM synchronisation WHERE exact GROUP BY source")
    )
    assert found.keys() == expected
    assert min(found.values()) > 0.1
