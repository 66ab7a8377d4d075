"""One model of `benchmarks/models.py` in its process: compiled, then measured under a lock."""

from __future__ import annotations

import copy
import fcntl
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.kernel_times import KernelTimes, kernel_times
from benchmarks.kernelbench import problems
from benchmarks.model_launches import Explained, differences, explained, launch_rows, write
from benchmarks.model_truth import NO_DROPOUT, Compared, compared, not_compared, without_dropout
from benchmarks.model_zoo import DECODERS, MODELS, Missing, Size, Workload
from benchmarks.step_stopwatch import StepStopwatch
from benchmarks.wider_zoo import WIDER
from tilewright.backend import Recording, recording
from tilewright.hardware.ceilings import device_name
from tilewright.hardware.detect import detect
from tilewright.hardware.target import target_of
from tilewright.launch.executor import EXTENSION
from tilewright.measure.memory import peak_bytes
from tilewright.measure.racing.results import append_results, environment, measurement, sources_of_programs
from tilewright.measure.timing.benchmark import Timing, benchmark
from tilewright.measure.timing.stopwatch import CpuStopwatch
from tilewright.records.measurement import Measurement

KINDS = ("infer", "train", "decode")
ENTRANTS: Mapping[str, Mapping[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "tilewright": {"backend": "tilewright"},
    "inductor-reduce-overhead": {"backend": "inductor", "mode": "reduce-overhead"},
    "tilewright-reduce-overhead": {"backend": "tilewright", "mode": "reduce-overhead"},
    "inductor-max-autotune": {"backend": "inductor", "mode": "max-autotune"},
}
DEFAULT_ENTRANTS = tuple(name for name in ENTRANTS if "max-autotune" not in name)
REPLAYED = tuple(name for name, how in ENTRANTS.items() if how and "mode" in how)
OURS = "tilewright"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHOWN_NAMES = 6
WARM_UP = 4
"""Calls after the first: CUDA graphs are recorded in them."""


@dataclass(frozen=True)
class Request:
    """The measurement of a process, and the folder that it shares with the others."""

    name: str
    device: str
    tiny: bool
    kinds: tuple[str, ...]
    entrants: tuple[str, ...]
    seconds: float
    folder: Path
    launches: bool = False
    """Whether each launch of tilewright's entrant is timed beside its prediction, and what `explain` names is seen."""
    problems: Path | None = None
    """The folder of KernelBench's problems."""
    dtype: str | None = None
    """Of the floats; None: bf16 on a GPU, fp32 on a CPU."""

    @property
    def of_floats(self) -> str:
        return self.dtype or ("fp32" if self.device == "cpu" else "bf16")


@dataclass
class Step:
    """A call of one entrant: the outputs, or in training None, with the gradients released."""

    model: nn.Module
    function: Callable[..., Any]
    inputs: Mapping[str, Tensor]
    trains: bool
    replays: bool
    first_call_us: float = 0.0

    def __call__(self) -> object:
        outputs = self.forward()
        if not self.trains:
            return outputs
        loss = outputs.loss
        # The logits must not outlive the call where only the loss is read.
        del outputs
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return None

    def forward(self) -> Any:
        if self.replays:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(self.trains):
            return self.function(**self.inputs)

    def results(self) -> dict[str, Tensor]:
        """Copies of the floating outputs and, in training, of the gradients."""
        outputs = self.forward()
        found = _copies({f"output {i}": t for i, t in enumerate(tree_leaves(outputs)) if isinstance(t, Tensor)})
        if self.trains:
            loss = outputs.loss
            # CUDA graphs were recorded where nothing held the logits in backward, and are replayed only so.
            del outputs
            loss.backward()
            found |= _copies({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
        self.model.zero_grad(set_to_none=True)
        return found


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items() if t.is_floating_point()}


def run(request: Request) -> None:
    """Compile and measure one model; its rows are in `<name>.jsonl` of the folder afterwards."""
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    decodes = request.name in DECODERS
    try:
        known = {**MODELS, **DECODERS, **WIDER, **(problems(request.problems) if request.problems else {})}
        workload = known[request.name](Size(request.tiny))
    except Missing as missing:
        print(f"left out: {missing}")
        return
    prepare()
    on_gpu = request.device != "cpu"
    dtype = DTYPES[request.of_floats]
    kinds = [kind for kind in KINDS if kind in request.kinds and (kind == "decode") == decodes]
    running = _Running(request, workload, request.of_floats)
    running.workload = placed(workload, request.device, dtype)
    if request.launches:
        running.explain(kinds)
    for kind in kinds:
        running.compile(kind)
    if on_gpu:
        torch.cuda.empty_cache()
    EXTENSION.wait()
    (request.folder / f"{request.name}.ready").touch()
    while not (request.folder / "go").exists():
        time.sleep(0.1)
    with _alone(request.folder):
        for kind in kinds:
            running.measure(kind)


def placed(workload: Workload, device: str, dtype: torch.dtype) -> Workload:
    """The model and its inputs on a device, floats in `dtype`."""
    inputs = {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in workload.inputs.items()
    }
    return Workload(workload.model.to(device).to(dtype), inputs, workload.shape)


def _placed(value: Any, device: str, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else value.dtype)


def prepare() -> None:
    """Make the backend known by its name where the package is not installed; let packages keep their remarks."""
    if "tilewright" not in torch._dynamo.list_backends():
        import tilewright.backend

        torch._dynamo.register_backend(tilewright.backend.backend, name="tilewright")
    # Every entrant compiles the same code, for inference and for training.
    torch._dynamo.config.cache_size_limit = 64
    try:
        import transformers
    except ImportError:
        return
    # Remarks on configurations are no finding.
    transformers.logging.set_verbosity_error()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass
class _Running:
    request: Request
    workload: Workload
    dtype: str
    steps: dict[str, dict[str, Step]] = field(default_factory=dict)
    """By kind and entrant."""
    records: dict[str, Recording] = field(default_factory=dict)
    """The recordings of tilewright's compilations, by kind of call."""
    explained: Mapping[str, Explained] = field(default_factory=dict)

    def explain(self, kinds: Sequence[str]) -> None:
        """Plan each kind for this device from a model that is not on it."""
        workload = self.workload
        dtype = DTYPES[self.dtype]
        here = placed(replace(workload, model=copy.deepcopy(workload.model)), "cpu", dtype)
        profile = target_of(torch.device(self.request.device)).profile
        self.explained = {kind: explained(here, kind == "train", profile) for kind in kinds}

    def compile(self, kind: str) -> None:
        """The first calls of every entrant; one that fails is named and left out."""
        model = self.workload.model.train(kind == "train")
        found = self.steps.setdefault(kind, {})
        for name in self.request.entrants:
            if self.request.device == "cpu" and name in REPLAYED:
                continue
            how = ENTRANTS[name]
            function = model if how is None else torch.compile(model, **how)
            step = Step(model, function, self.workload.inputs, kind == "train", name in REPLAYED)
            try:
                start = time.perf_counter()
                with recording() as record:
                    step()
                    self._synchronize()
                    step.first_call_us = 1e6 * (time.perf_counter() - start)
                    for _ in range(WARM_UP):
                        step()
                self._synchronize()
            # Whatever it is, the other entrants are measured.
            except Exception as error:
                model.zero_grad(set_to_none=True)
                print(f"{kind} {name} failed: {type(error).__name__}: {str(error).strip()[:300]}")
                continue
            found[name] = step
            if name == OURS:
                self.records[kind] = record
        if kind == "train" and "eager" in found and _is_random(found["eager"]):
            self._compile_without_dropout(found)

    def _compile_without_dropout(self, steps: dict[str, Step]) -> None:
        """Compile again with nothing drawn, so that gradients can be compared; one that fails is not compared."""
        with without_dropout(self.workload.model):
            for name, step in steps.items():
                try:
                    for _ in range(1 + WARM_UP):
                        step()
                # The row says that it was not compared.
                except Exception as error:
                    self.workload.model.zero_grad(set_to_none=True)
                    print(f"{name} without dropout failed: {type(error).__name__}: {str(error).strip()[:200]}")

    def measure(self, kind: str) -> None:
        """Time, kernels, memory and error of every entrant of a kind; the rows go to the shard."""
        steps = self.steps[kind]
        if not steps:
            return
        self.workload.model.train(kind == "train")
        on_gpu = self.request.device != "cpu"
        timings = benchmark(
            steps,
            device=self.request.device,
            min_repeats=7,
            max_seconds=self.request.seconds,
            tolerance=0.005,
            stopwatch=StepStopwatch() if on_gpu else CpuStopwatch(),
        )
        verified = self._verified(kind)
        for name, step in steps.items():
            for _ in range(2):
                step()
            kernels = kernel_times(step) if on_gpu else None
            # A CUDA graph holds its memory between calls.
            peak = None if name in REPLAYED else peak_bytes(step, self.request.device)
            row = self._row(kind, name, timings[name], kernels, peak, verified[name])
            append_results(self.request.folder / f"{self.request.name}.jsonl", [row])
            if kernels:
                self._note_kernels(kind, name, kernels)
        if self.request.launches and OURS in steps:
            self._launches(kind, steps[OURS])

    def _launches(self, kind: str, step: Step) -> None:
        """Predicted and measured time of each launch to a file, and a line on what `explain` named."""
        profile = target_of(torch.device(self.request.device)).profile
        rows = launch_rows(self.request.name, kind, self.records[kind], step, self.request.device, profile)
        write(self.request.folder / f"{self.request.name}.launches", rows)
        planned = self.explained[kind]
        if isinstance(planned, str):
            print(f"NAMES {kind}: no plan without the device: {planned[:150]}")
            return
        wrong = differences(planned, rows)
        print(f"NAMES {kind}: {len(rows)} launches, {len(wrong)} differences from what explain named")
        for line in wrong[:SHOWN_NAMES]:
            print(f"    {line[:200]}")

    def _row(
        self, kind: str, name: str, timing: Timing, kernels: KernelTimes | None, peak: int | None, truth: Compared
    ) -> Measurement:
        is_problem = self.request.problems is not None
        model = self.request.name if is_problem else self.request.name.split("-")[0]
        model += " decode" if kind == "decode" else ""
        error = truth.worst
        return measurement(
            timing,
            environment(device_name(detect(), self.request.device)),
            suite="kernelbench" if is_problem else "wider_models" if self.request.name in WIDER else "models",
            case=f"{model} {self.workload.shape} {self.dtype}",
            impl=name,
            direction="step" if kind == "train" else "infer",
            peak_bytes=peak,
            gpu_us=kernels.us if kernels else None,
            launches=kernels.launches if kernels else None,
            first_call_us=self.steps[kind][name].first_call_us,
            # Infinite where the reference is 0: such a gradient is noise, and the note names it.
            error=error.error if error and math.isfinite(error.error) else None,
            eager_error=error.eager_error if error else None,
            made_from=sources_of_programs(name),
            note=truth.said,
        )

    def _verified(self, kind: str) -> dict[str, Compared]:
        """Every entrant beside float64; if its step draws dropout, both without it."""
        steps = self.steps[kind]
        if "eager" not in steps:
            return {name: Compared(None, "not compared with float64: eager did not run") for name in steps}
        if kind != "train" or not _is_random(steps["eager"]):
            return self._compare(kind)
        with without_dropout(self.workload.model):
            if _is_random(steps["eager"]):
                return {name: Compared(None, "not compared with float64: it draws at random") for name in steps}
            found = self._compare(kind)
        return {name: replace(one, note="; ".join(filter(None, (NO_DROPOUT, one.note)))) for name, one in found.items()}

    def _compare(self, kind: str) -> dict[str, Compared]:
        """By entrant, the tensor whose error is largest beside what the contract allows, or why there is none.

        The reference is the model in float64 with the same weights, on the same device.
        """
        try:
            eager, truth = self.steps[kind]["eager"].results(), self._truth(kind)
        # A model too large for float64, or without a float64 kernel, still has its times.
        except Exception as error:
            return dict.fromkeys(self.steps[kind], Compared(None, not_compared(error)))
        return {name: compared(step.results, eager, truth) for name, step in self.steps[kind].items()}

    def _truth(self, kind: str) -> dict[str, Tensor]:
        """On the host where the device has no memory for it."""
        try:
            return self._in_float64(kind, self.request.device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        found = self._in_float64(kind, "cpu")
        return {name: tensor.to(self.request.device) for name, tensor in found.items()}

    def _in_float64(self, kind: str, device: str) -> dict[str, Tensor]:
        wide = placed(replace(self.workload, model=copy.deepcopy(self.workload.model)), device, torch.float64)
        # Experts' grouped products have no float64.
        if choose := getattr(wide.model, "set_experts_implementation", None):
            choose("eager")
        return Step(wide.model, wide.model, wide.inputs, kind == "train", replays=False).results()

    def _note_kernels(self, kind: str, name: str, kernels: KernelTimes) -> None:
        line = {"model": self.request.name, "kind": kind, "impl": name, "kernels": [tuple(k) for k in kernels.kernels]}
        with (self.request.folder / f"{self.request.name}.kernels").open("a") as out:
            out.write(json.dumps(line) + "\n")

    def _synchronize(self) -> None:
        if self.request.device != "cpu":
            torch.cuda.synchronize()


def _is_random(step: Step) -> bool:
    """Whether two seeds give two losses."""
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        losses.append(float(step.forward().loss.detach()))
    return losses[0] != losses[1]
