"""Races the launches that each generated kernel of a model could have: where is the chosen one, or its price, wrong?

    python -m benchmarks.schedules --models gpt2,unet --kinds infer,train
    python -m benchmarks.schedules --problems KernelBench/KernelBench --models level2 --kinds infer --dtype fp32

Needs a GPU, whose memory holds the operands of one kernel for each of `--jobs` processes: they compile side by side and
race one at a time. A line for each kernel, those that lose most first: microseconds predicted, of the chosen launch and
of the fastest, and both launches as text.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.kernelbench import problems
from benchmarks.model_runs import DTYPES
from benchmarks.model_zoo import DECODERS, MODELS, Build, Missing
from benchmarks.rewrites import case_of
from benchmarks.wider_zoo import WIDER
from tilewright.compile.capture import capture
from tilewright.compile.launches import works
from tilewright.compile.planner import Planner
from tilewright.cost.work import predicted_us
from tilewright.emit.source import source_of
from tilewright.hardware.target import Target, target_of
from tilewright.launch.generated import TritonKernel, kernel_of
from tilewright.launch.race import run
from tilewright.passes.fusion import Region
from tilewright.records.case import Case
from tilewright.records.errors import TilewrightError
from tilewright.runtime.executable import layout_of
from tilewright.runtime.stopwatch import random_like
from tilewright.schedule.schedule import Schedule


@dataclass(frozen=True)
class Raced:
    """A kernel's times in microseconds: predicted, and measured by launch, the chosen one first."""

    name: str
    kind: str
    predicted_us: float
    times_us: Mapping[str, float]

    @property
    def chosen(self) -> str:
        return next(iter(self.times_us))

    @property
    def fastest(self) -> str:
        return min(self.times_us, key=lambda text: self.times_us[text])

    @property
    def lost_us(self) -> float:
        return self.times_us[self.chosen] - self.times_us[self.fastest]

    def __str__(self) -> str:
        us, best = self.times_us[self.chosen], self.times_us[self.fastest]
        head = (
            f"{self.name[:44]:44} {self.kind[:28]:28} {self.predicted_us:8.1f} {us:8.1f} {best:8.1f} {us / best:5.2f}"
        )
        return f"{head}  {self.chosen}" + (f"  →  {self.fastest}" if self.fastest != self.chosen else "")


alone: AbstractContextManager[object] = nullcontext()
"""Held during a race."""


def race(region: Region, kind: str, predicted: float, device: torch.device) -> Raced:
    """Of a kernel's schedule and its neighbours on random operands; those that do not compile are left out."""
    kernel = kernel_of(region.lowered.nest, source_of(region.lowered))
    high, generators = min((2, *region.lowered.nest.checks)), dict[torch.device, torch.Generator]()
    inputs = [random_like(node.meta["val"], generators, high) for node in region.lowered.inputs]
    launches = kernel.neighbours(device).items()
    calls = {text: partial(_launch, region, kernel, inputs, one, device) for text, one in launches}
    right = {text: call for text, call in calls.items() if _runs(call)}
    with alone:
        return Raced(region.name, kind, predicted, run(lambda: right, device).times_us)


def _launch(
    region: Region, kernel: TritonKernel, inputs: list[torch.Tensor], chosen: Schedule, device: torch.device
) -> list[torch.Tensor]:
    layouts = [layout_of(node.meta["val"]) for node in region.lowered.outputs]
    results = [torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=device) for one in layouts]
    kernel.launch([*inputs, *results], chosen, region.lowered.numbers)
    return results


def _runs(call: Callable[[], object]) -> bool:
    """Whether a launch compiles and fits: one may ask for more shared memory than there is."""
    try:
        call()
    except Exception as error:  # Triton, LLVM and ptxas each raise their own
        print(f"left out: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def raced(case: Case, target: Target, device: torch.device) -> Iterator[Raced]:
    """The kernels of a case's plan, one for each nest. Raises TilewrightError."""
    plan = capture(case, Planner(target)).plan
    assert plan is not None
    units = [pair for graph in plan.graphs for pair in works(graph)]
    kernels = {unit.lowered.nest: (unit, work) for unit, work in units if isinstance(unit, Region)}
    for region, work in kernels.values():
        if region.language == "triton" and work is not None:
            yield race(region, work.kind, predicted_us(work, target.profile), device)


def _of_model(given: argparse.Namespace, name: str) -> list[Raced]:
    """The kernels of a model, printed as they are raced."""
    build, device, found = _known(given)[name], torch.device("cuda"), []
    for kind in given.kinds.split(","):
        try:
            case = case_of(build, trains=kind == "train", tiny=False, dtype=DTYPES[given.dtype])
            for one in raced(case, target_of(device), device):
                print(one, flush=True)
                found.append(one)
                torch.cuda.empty_cache()
        except (TilewrightError, Missing) as error:
            print(f"{name} {kind}: {str(error).splitlines()[0]}", flush=True)
    return found


def _known(given: argparse.Namespace) -> Mapping[str, Build]:
    return {**MODELS, **DECODERS, **WIDER, **(problems(given.problems) if given.problems else {})}


def _share(lock: AbstractContextManager[object]) -> None:
    global alone
    alone = lock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="names; of problems also a level, as level1")
    parser.add_argument("--kinds", default="infer,train")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--problems", type=Path, help="folder of KernelBench's problems")
    parser.add_argument("--jobs", type=int, default=8, help="models whose kernels compile side by side")
    given = parser.parse_args()
    parts, spawned = given.models.split(","), get_context("spawn")
    names = [name for name in _known(given) if name in parts or name.split("-")[0] in parts]
    with ProcessPoolExecutor(given.jobs, spawned, initializer=_share, initargs=(spawned.Lock(),)) as pool:
        found = [one for of_one in pool.map(partial(_of_model, given), names) for one in of_one]
    print("\n".join(map(str, sorted(found, key=lambda one: -one.lost_us))))
    chosen = sum(one.times_us[one.chosen] for one in found)
    best = chosen - sum(one.lost_us for one in found)
    predicted = sum(one.predicted_us for one in found)
    print(f"{len(found)} kernels: {predicted:.0f} µs predicted, {chosen:.0f} µs as chosen, {best:.0f} µs as raced")


if __name__ == "__main__":
    main()
