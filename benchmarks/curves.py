"""A hundred training steps of models in eager, with several seeds, and compiled: do the losses agree?

    python -m benchmarks.curves --device cuda --out benchmarks/results/h200/models.jsonl

Each run begins with the same weights and sees the same batch, under AdamW; a seed says what dropout draws. The distance
of two runs is that of the means of ten steps, where they are farthest apart. The compiled run is within the spread if
it is no farther from the nearest eager run than two of them are from each other. Models without dropout are refused:
their eager runs are one. Rows are those of the compiled program; `error` is its distance from the nearest eager run,
`eager_error` the spread.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.model_runs import placed, prepare
from benchmarks.model_zoo import MODELS, Missing, Size
from tilewright.hardware.ceilings import device_name
from tilewright.hardware.detect import detect
from tilewright.measure.racing.results import append_results, environment, measurement, sources_of_programs
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.measurement import Measurement

DEFAULT = ("gpt2", "bert", "t5", "distilbert")
WINDOW = 10
"""Steps whose losses are averaged."""
WARM_UP = 4
RATE = 1e-3
SEEDS = 3
"""Eager runs."""


@dataclass(frozen=True)
class Curve:
    """The losses of a run, and the seconds of each step."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def timing(self) -> Timing:
        us = sorted(1e6 * s for s in self.seconds[min(WARM_UP, len(self.seconds) - 1) :])
        return Timing(statistics.median(us), us[len(us) // 5], us[4 * len(us) // 5], len(us), converged=True)


def train(model: nn.Module, function: Callable[..., Any], inputs: Mapping[str, Tensor], steps: int, seed: int) -> Curve:
    """Train `model`, which `function` computes with a loss, and give it its weights back."""
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    torch.manual_seed(seed)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = function(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    model.load_state_dict(before)
    return Curve(tuple(losses), tuple(seconds))


def means(losses: Sequence[float]) -> list[float]:
    """The mean of each `WINDOW` steps."""
    return [statistics.fmean(losses[i : i + WINDOW]) for i in range(0, len(losses), WINDOW)]


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """How far two runs are apart where they are farthest, by the means of `WINDOW` steps.

    >>> distance([4.0, 2.0], [4.0, 3.0])
    0.5
    """
    return max(abs(x - y) for x, y in zip(means(a), means(b), strict=True))


def curve_row(name: str, device: str, tiny: bool, steps: int) -> Measurement:
    """The row of one model. Raises `Missing` where its package is not here, ValueError where it draws nothing."""
    warnings.filterwarnings("ignore")
    prepare()
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    workload = placed(MODELS[name](Size(tiny)), device, dtype)
    model, inputs = workload.model.train(), workload.inputs
    eager = [train(model, model, inputs, steps, seed).losses for seed in range(SEEDS)]
    compiled = train(model, torch.compile(model, backend="tilewright"), inputs, steps, 0)
    spread = max(distance(a, b) for a in eager for b in eager)
    ours = min(distance(a, compiled.losses) for a in eager)
    if spread == 0:
        raise ValueError(f"{name} draws nothing: its eager runs are one")
    for losses in (*eager, compiled.losses):
        print(f"{name}: {' '.join(f'{mean:.3f}' for mean in means(losses))}", flush=True)
    return measurement(
        compiled.timing,
        environment(device_name(detect(), device)),
        suite="models",
        case=f"{name} curve {workload.shape} {'fp32' if device == 'cpu' else 'bf16'}",
        impl="tilewright",
        direction="step",
        made_from=sources_of_programs("tilewright"),
        error=ours,
        eager_error=spread,
        note="" if ours <= spread else f"its losses are {ours / spread:.1f} times the spread of eager runs away",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can take")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(DEFAULT))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=4, help="models side by side")
    parser.add_argument("--out", type=Path, help="result file to which rows are added")
    given = parser.parse_args()
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = {name: pool.submit(curve_row, name, given.device, given.tiny, given.steps) for name in given.models}
        for name, waiting in rows.items():
            try:
                row = waiting.result()
            except (Missing, ValueError) as error:
                print(f"{name}: left out: {error}")
                continue
            verdict = row.note or "within the spread"
            print(f"{row.case}: {row.error:.4f} from eager, eager runs {row.eager_error:.4f} apart: {verdict}")
            if given.out:
                append_results(given.out, [row])


if __name__ == "__main__":
    main()
