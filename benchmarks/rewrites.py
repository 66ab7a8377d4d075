"""What each rewrite earns: a model's plan without it beside the plan with it.

    python -m benchmarks.rewrites --on h200 --models gpt2,unet --kinds train
    python -m benchmarks.rewrites --on h200 --kinds infer --problems KernelBench/KernelBench --models level2
    python -m benchmarks.rewrites --on cpu --tiny --models vit --rewrites add_biases_in_kernels

By predicted time (of launches whose cost is known), launches, and peak memory. Nothing is compiled or run, and no GPU
is needed. Without `--rewrites` each one that changed a graph of the model is left out in turn.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.kernelbench import problems
from benchmarks.model_launches import _Positional
from benchmarks.model_zoo import DECODERS, MODELS, Build, Missing, Size
from benchmarks.wider_zoo import WIDER
from tilewright.compile.capture import capture
from tilewright.compile.launches import works
from tilewright.compile.planner import Planner
from tilewright.cost.work import predicted_us
from tilewright.hardware.target import Target, target_named
from tilewright.passes.stage import applied
from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import TilewrightError


@dataclass(frozen=True)
class Figures:
    """A plan's predicted time, launches, and peak of live memory; which rewrites changed its graphs."""

    us: float
    launches: int
    peak_bytes: int
    changed: frozenset[str]


def case_of(build: Build, *, trains: bool, tiny: bool, dtype: torch.dtype) -> Case:
    """A model without memory, and its inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build(Size(tiny))
        model = _in_dtype(workload.model.train(trains), dtype)
    tensors = {name: x for name, x in workload.inputs.items() if isinstance(x, torch.Tensor)}
    specs = [InputSpec.of(x.to(dtype) if x.is_floating_point() else x) for x in tensors.values()]
    return Case("model", lambda: _Positional(model, tuple(tensors)), specs, training=trains)


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model.to(dtype)`, which fake parameters refuse; parameters that are one stay one."""
    made: dict[torch.Tensor, Any] = {}
    for held in (kept for module in model.modules() for kept in (module._parameters, module._buffers)):
        for name, x in held.items():
            if x is not None and x.is_floating_point():
                cast = x.detach().to(dtype)
                made.setdefault(x, nn.Parameter(cast, x.requires_grad) if isinstance(x, nn.Parameter) else cast)
                held[name] = made[x]
    return model


def figures(case: Case, target: Target, without: str = "") -> Figures:
    """Those of the plan that leaves out the rewrite called `without`. Raises TilewrightError."""
    with mock.patch.dict(os.environ, {"TILEWRIGHT_SKIP": without}), applied() as ran:
        plan = capture(case, Planner(target)).plan
    assert plan is not None
    found = [work for graph in plan.graphs for _, work in works(graph) if work is not None]
    changed = frozenset(one.name for one in ran if one.changes())
    us = sum(predicted_us(work, target.profile) for work in found)
    return Figures(us, len(plan.launches()), plan.peak_bytes, changed)


def lines(name: str, case: Case, target: Target, wanted: Sequence[str] = ()) -> Iterator[str]:
    """A line for each rewrite: what the plan gains by it."""
    whole = figures(case, target)
    for rewrite in wanted or sorted(whole.changed):
        bare = figures(case, target, rewrite)
        launches, peaks = f"{bare.launches} → {whole.launches}", f"{bare.peak_bytes / 2**20:.0f} → "
        yield (
            f"{rewrite:<26} {name:<28} {bare.us:9.1f} → {whole.us:9.1f} µs ({whole.us / bare.us - 1:+7.1%})  "
            f"{launches:>12} launches  {peaks:>10}{whole.peak_bytes / 2**20:.0f} MB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="h200", help="a device of `explain --on`")
    parser.add_argument("--tiny", action="store_true", help="sizes that a CPU can take")
    parser.add_argument("--models", default=",".join(MODELS), help="names; of problems also a level, as level1")
    parser.add_argument("--kinds", default="infer,train")
    parser.add_argument("--rewrites", default="", help="those to leave out; all that changed a graph if not given")
    parser.add_argument("--problems", type=Path, help="folder of KernelBench's problems")
    given = parser.parse_args()
    target = target_named(given.on)
    dtype = torch.bfloat16 if target.is_gpu else torch.float32
    more = problems(given.problems) if given.problems else {}
    known: Mapping[str, Build] = {**MODELS, **DECODERS, **WIDER, **more}
    parts = given.models.split(",")
    for name in [name for name in known if name in parts or name.split("-")[0] in parts]:
        for kind in given.kinds.split(","):
            try:
                case = case_of(known[name], trains=kind == "train", tiny=given.tiny, dtype=dtype)
                for line in lines(f"{name} {kind}", case, target, given.rewrites.split(",") if given.rewrites else ()):
                    print(line, flush=True)
            except (TilewrightError, Missing) as error:
                print(f"{name} {kind}: {str(error).splitlines()[0]}", flush=True)


if __name__ == "__main__":
    main()
