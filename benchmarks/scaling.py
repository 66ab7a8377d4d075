"""How time grows with size, measured beside predicted; rewrites benchmarks/results/<device>/scaling.jsonl.

    python -m benchmarks.scaling --device cuda [--seconds 0.5] [--out FILE]

Products over sizes; the MLP (linear → GELU) × L over width, depth and batch, forward and backward; its
training over steps, Adam included. A prediction is the sum of the floors of the kernels that eager runs, each
the larger of its FLOPs over the measured rate, its bytes over the measured bandwidth, and one launch.
`python -m benchmarks.scaling_report` draws the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from examples import mlp
from tilewright.compile.price import price_case
from tilewright.hardware.ceilings import device_name
from tilewright.hardware.detect import detect
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile, local_profile
from tilewright.hardware.target import absent
from tilewright.measure.racing.results import environment, measurement, write_results
from tilewright.measure.timing.benchmark import benchmark
from tilewright.records.case import DTYPES, Case
from tilewright.records.measurement import Direction, Measurement
from tilewright.verbs import Subject

RESULTS = Path(__file__).parent / "results"
ADAM_PASSES = 7
"""Adam reads parameter, gradient and two moments, and writes all but the gradient."""


@dataclass(frozen=True)
class Study:
    """The largest sizes that a device gets, and what stays fixed while one of them grows."""

    dtype: str
    products: tuple[int, ...]
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    steps: tuple[int, ...]
    width: int
    depth: int
    batch: int


GPU = Study(
    "bf16",
    tuple(2**k for k in range(7, 15)),
    tuple(2**k for k in range(8, 14)),
    (1, 2, 4, 8, 16, 32),
    tuple(2**k for k in range(6, 17, 2)),
    (1, 2, 4, 8, 16, 32),
    width=2048,
    depth=4,
    batch=4096,
)
CPU = Study(
    "fp32",
    tuple(2**k for k in range(6, 12)),
    tuple(2**k for k in range(6, 11)),
    (1, 2, 4, 8),
    tuple(2**k for k in range(4, 11, 2)),
    (1, 2, 4, 8),
    width=512,
    depth=4,
    batch=64,
)


@dataclass(frozen=True)
class Point:
    """One place of a study: what to run, its work, and how long it should take."""

    case: str
    direction: Direction
    prepare: Callable[[], Callable[[], object]]
    """Makes what is run, so that points do not hold each other's memory."""
    predicted_us: float
    flops: int | None = None


def products(study: Study, device: str, profile: DeviceProfile) -> Iterator[Point]:
    """C = A·B, all n × n, in the study's dtype and fp32."""
    for dtype in dict.fromkeys((study.dtype, "fp32")):
        kind: torch.dtype = getattr(torch, DTYPES[dtype])
        for n in study.products:
            nbytes, flops = 3 * n * n * kind.itemsize, 2 * n**3
            floor, _ = floor_us(nbytes, flops, 0, DTYPES[dtype], nbytes, profile, "compute")

            def prepare(n: int = n, kind: torch.dtype = kind) -> Callable[[], object]:
                a, b = torch.randn(2, n, n, device=device).to(kind)
                return partial(torch.mm, a, b)

            yield Point(f"matmul n{n} {dtype}", "fwd", prepare, max(floor, profile.launch_us), flops)


def networks(study: Study, device: str, profile: DeviceProfile) -> Iterator[Point]:
    """Forward and backward of the MLP: width, depth and batch grow in turn."""
    shapes = [(d, study.depth, study.batch) for d in study.widths]
    shapes += [(study.width, layers, study.batch) for layers in study.depths]
    shapes += [(study.width, study.depth, batch) for batch in study.batches]
    for width, layers, batch in dict.fromkeys(shapes):
        case = mlp.case(dimension=width, layers=layers, batch=batch, dtype=study.dtype)
        operators = [o for o in price_case(case, absent(profile)).program.operators if o.stage == "before"]

        def prepare(case: Case = case) -> Callable[[], object]:
            return partial(Subject(case, device).call, "eager")

        name = f"mlp D{width} L{layers} B{batch} {study.dtype}"
        # A view has no kernel, and so no floor.
        predicted = sum(operator.floor_us or 0.0 for operator in operators)
        yield Point(name, "fwd+bwd", prepare, predicted, sum(operator.cost.flops for operator in operators))


def trainings(study: Study, device: str, profile: DeviceProfile) -> Iterator[Point]:
    """Steps of Adam on the MLP in fp32, the model made anew for each run."""
    case = mlp.case(dimension=study.width // 2, layers=study.depth, batch=study.batch // 4)
    operators = [o for o in price_case(case, absent(profile)).program.operators if o.stage == "before"]
    weights = study.depth * (study.width // 2) * (study.width // 2 + 1)
    adam_us = ADAM_PASSES * 4 * weights / profile.copy_GBps / 1e3
    step_us = sum(operator.floor_us or 0.0 for operator in operators) + adam_us
    for steps in study.steps:

        def prepare(steps: int = steps) -> Callable[[], object]:
            def run() -> torch.Tensor:
                with torch.device(device):
                    return mlp.train(study.width // 2, study.depth, study.batch // 4, steps)

            return run

        name = f"train steps{steps} D{study.width // 2} L{study.depth} B{study.batch // 4} fp32"
        yield Point(name, "step", prepare, steps * step_us)


def measured(point: Point, device: str, seconds: float) -> Measurement:
    """The row of a point."""
    timing = benchmark({"eager": point.prepare()}, device=device, min_repeats=5, max_seconds=seconds)["eager"]
    where = environment(device_name(detect(), device))
    row = measurement(
        timing, where, suite="scaling", case=point.case, impl="eager", direction=point.direction, flops=point.flops
    )
    return replace(row, predicted_us=point.predicted_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each point")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    study, profile = (CPU if on_cpu else GPU), local_profile(device=options.device)
    rows = []
    for points in (products, networks, trainings):
        for point in points(study, options.device, profile):
            row = measured(point, options.device, options.seconds)
            rows.append(row)
            print(f"{row.case:<40} {row.median_us:12.1f} µs, predicted {point.predicted_us:12.1f}", flush=True)
    write_results(options.out or RESULTS / ("cpu" if on_cpu else "h200") / "scaling.jsonl", rows)


if __name__ == "__main__":
    main()
