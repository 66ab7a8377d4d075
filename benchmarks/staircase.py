"""The wave tail, predicted and measured: time of two kernels over grid sizes around multiples of the SM count.

    python benchmarks/staircase.py --out benchmarks/results/h200/staircase.jsonl

Each program of a kernel does the same work, so a grid's time is a staircase. `tilewright.hardware.occupancy`
says how many programs are resident and where the steps are; one program, one wave and four waves, measured
in the same run, give a program's time alone, the height of a step and what a launch costs besides. All other
sizes are predicted (`Waves.time`):

- `product`: one program a multiprocessor, its matrix unit busy. A step every 132 programs on an H200.
- `vector`: one program saturates the vector units of its multiprocessor and others share them, so a step comes
  every 132 programs although four are resident.

What programs share must not decide. A third kernel was tried, in which each of sixteen programs a multiprocessor
waits for one dependent load from L2 after another: whole waves came within 0.2 % of the prediction, and waves in
part took 8 to 17 % less than predicted, because a load takes two thirds of the time where fewer programs load, and
a program alone (the calibration) meets a cold L2.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from tilewright.anatomy.capture import capturing, launch_record
from tilewright.hardware.geometry import occupancy_and_waves
from tilewright.hardware.occupancy import Waves
from tilewright.measure.racing.results import environment, measurement, write_results
from tilewright.measure.timing.benchmark import benchmark
from tilewright.measure.timing.stopwatch import CudaStopwatch
from tilewright.records.measurement import Measurement


@triton.jit
def product(a, b, out, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):  # type: ignore[no-untyped-def]
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros([M, N], tl.float32)
    for step in range(steps):
        k = step * K + inner
        left = tl.load(a + rows[:, None] * (steps * K) + k[None, :])
        total = tl.dot(left, tl.load(b + k[:, None] * N + columns[None, :]), total)
    tl.store(out + tl.program_id(0), tl.sum(total))


@triton.jit
def vector(a, out, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(a + tl.arange(0, BLOCK)).to(tl.float32)
    total = x
    for _ in range(steps):
        total = total * x + x
    tl.store(out + tl.program_id(0), tl.sum(total))


@dataclass(frozen=True)
class Staircase:
    """One kernel, launched on any number of programs, and what a step of it is."""

    name: str
    launch: Callable[[int], object]
    waves: Waves
    """Waves of the calibrating grid of `sms` programs."""
    shares: Literal["alone", "shared"]

    def of(self, programs: int) -> Waves:
        """A grid of so many programs, in waves."""
        return Waves(programs, self.waves.sms, self.waves.blocks_per_sm)

    def steps(self, programs: int) -> Waves:
        """The same in steps of the staircase: where residents share one unit, each of them is a step."""
        return self.of(programs) if self.shares == "alone" else Waves(programs, self.waves.sms, 1)

    @property
    def width(self) -> int:
        """Programs to a step."""
        return self.steps(1).slots


def staircases(device: torch.device) -> list[Staircase]:
    """The two kernels on their data."""
    wide, tall = (torch.randn(n, 8192, device=device, dtype=torch.bfloat16) for n in (128, 256))
    out = torch.empty(2**16, device=device)
    kernels: Sequence[tuple[str, Any, tuple[Any, ...], dict[str, int], Literal["alone", "shared"]]] = (
        (
            "product",
            product,
            (wide, tall.T.contiguous(), out, 128),
            {"M": 128, "N": 256, "K": 64, "num_warps": 8},
            "alone",
        ),
        ("vector", vector, (wide, out, 1000), {"BLOCK": 4096, "num_warps": 16}, "shared"),
    )
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = []
    for name, kernel, arguments, options, shares in kernels:
        launch = partial(_launch, kernel, arguments, options)
        with capturing(run=True) as launches:
            launch(sms)
        _, waves = occupancy_and_waves(launch_record(launches[0], sass=False), sms)
        assert waves is not None, f"{name} does not fit on a multiprocessor"
        found.append(Staircase(name, launch, waves, shares))
    return found


def _launch(kernel: Any, arguments: tuple[Any, ...], options: dict[str, int], programs: int) -> None:
    kernel[(programs,)](*arguments, **options)


def sweep(stairs: Staircase, where: str, device: torch.device) -> list[Measurement]:
    """Grid sizes around one, two and three steps, each with its predicted time."""
    width = stairs.width
    calibrating = (1, width, 4 * width)
    sizes = {max(1, round(n * width + off)) for n in (1, 2, 3) for off in (-width / 2, -1, 0, 1, width / 4, width / 2)}
    functions = {str(n): partial(stairs.launch, n) for n in sorted(sizes | set(calibrating))}
    timings = benchmark(functions, min_repeats=15, max_seconds=8.0, stopwatch=CudaStopwatch(str(device)))
    lone, one, four = (timings[str(n)].median_us for n in calibrating)
    full = (four - one) / 3
    launched = one - full
    rows = []
    for n in sorted(sizes - set(calibrating)):
        predicted = launched + stairs.steps(n).time(min(lone - launched, full), full)
        case = f"{stairs.name} {n} programs, {stairs.of(n).waves:.3f} waves"
        rows.append(
            measurement(
                timings[str(n)],
                environment(where),
                suite="staircase",
                case=case,
                impl="tilewright",
                direction="fwd",
                predicted_us=predicted,
            )
        )
    return rows


def errors(rows: Sequence[Measurement]) -> Mapping[str, float]:
    """Predicted over measured, less one, by case."""
    return {row.case: (row.predicted_us or 0.0) / row.median_us - 1 for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    device = torch.device("cuda:0")
    rows = []
    for stairs in staircases(device):
        own = sweep(stairs, torch.cuda.get_device_name(device), device)
        worst = max(map(abs, errors(own).values()))
        waves = stairs.waves
        print(f"{stairs.name}: {waves.blocks_per_sm} programs a multiprocessor, a step every {stairs.width}")
        for row in own:
            print(f"  {row.case:<40} predicted {row.predicted_us:8.2f} µs  measured {row.median_us:8.2f} µs")
        print(f"  largest error {worst:.2%} of {len(own)} sizes")
        rows += own
    write_results(out, rows)


if __name__ == "__main__":
    main()
