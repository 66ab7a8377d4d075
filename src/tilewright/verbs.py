"""What the command line does, as functions: `explain`, `optimize`, `bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case, InputSpec
from tilewright.records.errors import UsageError, VerificationError
from tilewright.records.measurement import Ceiling, Direction, Measurement, Verified
from tilewright.records.program import GraphName, Program, Stage

if TYPE_CHECKING:
    import torch
    from torch import fx

    from tilewright.account import Account
    from tilewright.backend import Recording
    from tilewright.hardware.profiles import DeviceProfile

PEERS = ("eager", "inductor")


@dataclass
class Explanation:
    """What a case costs on a device; shows itself in a terminal and in a notebook."""

    case: Case
    program: Program
    ceilings: Sequence[Ceiling]

    def __rich__(self) -> Any:
        from tilewright.report.terminal import show_explain

        return show_explain(self.program, self.ceilings, self.case.named_sizes())

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=160)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"


def explain_case(case: Case, on: str | None = None) -> Explanation:
    """Graph, costs, floors and planned fusions of `case` on a known device, or on this machine.

    Nothing is computed and no device is needed. Raises CaptureError, InputError or UsageError.
    """
    from tilewright.account import account

    profile = _profile(on)
    return Explanation(case, account(case, profile).program, ceilings_of(profile))


def explain(
    model: Callable[..., Any], *inputs: torch.Tensor, on: str | None = None, training: bool = False
) -> Explanation:
    """`explain_case` for a module or function and example inputs.

    Dimensions have no names, so costs are numbers. `on`: h200, a100, rtx4090, 2080ti, cpu; default
    this machine.
    """
    return explain_case(_case_of(model, inputs, training), on)


def _case_of(model: Callable[..., Any], inputs: Sequence[torch.Tensor], training: bool) -> Case:
    specs = [InputSpec(str(t.dtype).removeprefix("torch."), tuple(t.shape), (None,) * t.dim()) for t in inputs]
    return Case(getattr(model, "__name__", type(model).__name__), lambda: model, specs, training=training)


def _profile(on: str | None) -> DeviceProfile:
    from tilewright.hardware.profiles import local_profile, profile_for

    return profile_for(on) if on else local_profile()


def ceilings_of(profile: DeviceProfile) -> list[Ceiling]:
    """The ceilings that a floor is computed from, as rows of a run."""

    def row(kind: str, value: float, unit: str, dtype: str = "") -> Ceiling:
        return Ceiling(profile.name, kind, dtype, value, unit, profile.origin)

    rows = [
        row("copy", profile.copy_GBps, "GB/s"),
        row("read", profile.read_GBps, "GB/s"),
        row("write", profile.write_GBps, "GB/s"),
        row("vector", profile.vector_TFLOPs, "TFLOP/s", "float32"),
        row("launch", profile.launch_us, "us"),
    ]
    return rows + [row("matmul", rate, "TFLOP/s", dtype) for dtype, rate in profile.matmul_TFLOPs.items()]


@dataclass
class Optimized:
    """One optimised case: its program, the proof, the times, and where the run and its page are."""

    case: Case
    program: Program
    verified: list[Verified]
    measurements: list[Measurement]
    run: Path
    page: Path


def optimize(model: Callable[..., Any], *inputs: torch.Tensor, training: bool = False) -> Optimized:
    """`optimize_case` for a module or function and example inputs, on the device they are on.

    `torch.compile(model, backend="tilewright")` is what it measures; nothing of `model` is changed.
    """
    device = next((str(t.device) for t in inputs), "cpu")
    return optimize_case(_case_of(model, inputs, training), device=device)


def optimize_case(
    case: Case,
    *,
    command: str = "tilewright.optimize",
    device: str = "cpu",
    seconds: float = 20.0,
    tell: Callable[[str], None] = lambda _: None,
) -> Optimized:
    """Capture, explain, fuse, verify against float64, measure beside eager and Inductor, and store.

    `seconds` bounds the timing; `tell` receives a line before each stage. A tensor that breaks the
    numbers contract has `ok=False` in `verified`; the run is written all the same, and nothing of it
    is left where anything fails or the user interrupts. Raises CaptureError, InputError,
    CompilerError (nothing can be raced without a compiler), CacheError or StoreError.
    """
    from tilewright.account import account
    from tilewright.hardware.detect import detect
    from tilewright.hardware.profiles import local_profile
    from tilewright.hardware.summary import machine_report
    from tilewright.measure.verify import verify
    from tilewright.records.cache import ensure_usable
    from tilewright.report.page import write_page
    from tilewright.runtime.compiler import find_compiler
    from tilewright.store.places import new_run_path
    from tilewright.store.run import Run

    if device == "cpu":
        find_compiler()
        # Compiling alone would do without one; a second run would not show what this one decided.
        ensure_usable()
    path = new_run_path(case.name)
    machine = dict(machine_report(detect()))
    # Begun before the work, which takes a minute: a folder that cannot be written is said at once.
    with Run.create(
        path, command=command, target=case.name, case=case.name, dims=case.named_sizes(), machine=machine
    ) as run:
        tell("measuring this machine's ceilings")
        profile = local_profile(device=device)
        tell("pricing every operator, racing every fusion")
        accounted = account(case, profile, measure=True, device=device)
        tell("compiling")
        subject = Subject(case, device)
        subject.call("tilewright")
        tell("verifying against float64")
        ours = subject.functions["tilewright"]
        verified = verify(subject.model, ours, subject.inputs, seed=1, training=case.training)
        tell("timing every kernel")
        program = with_times(accounted, subject.recording, device)
        tell(f"timing tilewright beside {' and '.join(PEERS)}")
        measurements = measure(subject, program, suite="optimize", seconds=seconds)
        run.add_program(program)
        run.add_ceilings(ceilings_of(profile))
        run.add_verified(verified)
        run.add_measurements(measurements)
    page = write_page(path, path.with_suffix(".html"))
    return Optimized(case, program, verified, measurements, path, page)


class Subject:
    """A case built once, its inputs, and every way of running it."""

    def __init__(self, case: Case, device: str = "cpu", seed: int = 0) -> None:
        import torch

        from tilewright.backend import Recording
        from tilewright.measure.inputs import make_inputs, on_device

        self.case = case
        torch.manual_seed(seed)
        self.device = device
        self.model = on_device(case.build(), device)
        self.inputs = make_inputs(case, seed=seed, device=device, requires_grad=case.training)
        self.recording: Recording = Recording()
        torch._dynamo.reset()
        self.functions: dict[str, Callable[..., Any]] = {
            "eager": self.model,
            "eager-sdpa": torch.compile(self.model, backend=_eager_with_sdpa, dynamic=False),
            "inductor": torch.compile(self.model, dynamic=False),
            "tilewright": torch.compile(self.model, backend=self._backend, dynamic=False),
        }
        if not case.training:
            self.functions["inductor-out"] = self._into_warm_output(
                torch.compile(_written_to(self.model), dynamic=False)
            )
        self.gradients: list[torch.Tensor] | None = None

    def _backend(self, module: Any, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        from tilewright import backend

        with backend.recording() as record:
            compiled = backend.backend(module, inputs, **options)
        self.recording.graphs += record.graphs
        self.recording.decisions += record.decisions
        self.recording.fallbacks += record.fallbacks
        return compiled

    def _into_warm_output(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The peer with its result written to memory that was touched before."""
        held: list[torch.Tensor] = []

        def call(*inputs: torch.Tensor) -> Any:
            if not held:
                held.extend(t.clone() for t in tensors_in(self.model(*inputs)))
            return function(held, *inputs)

        return call

    def call(self, impl: str) -> None:
        """One step: forward, and backward in training; results and gradients are dropped."""
        import torch

        function = self.functions[impl]
        if not self.case.training:
            with torch.no_grad():
                function(*self.inputs)
            return
        results = [t for t in tensors_in(function(*self.inputs)) if t.requires_grad]
        if self.gradients is None:
            self.gradients = [torch.randn_like(t) for t in results]
        if results:
            torch.autograd.backward(results, self.gradients)
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        import torch

        parameters = self.model.parameters() if isinstance(self.model, torch.nn.Module) else ()
        for tensor in (*self.inputs, *parameters):
            tensor.grad = None


def _eager_with_sdpa(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Eager, but with attention as `scaled_dot_product_attention`: what a user writes by hand at best."""
    from tilewright.passes.attention.recognise import recognise_attention

    recognise_attention(module)
    return module.forward


def _written_to(model: Callable[..., Any]) -> Callable[..., None]:
    def call(out: list[torch.Tensor], *inputs: torch.Tensor) -> None:
        for held, result in zip(out, tensors_in(model(*inputs)), strict=True):
            held.copy_(result)

    return call


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor inside tuples, lists and dicts, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def with_times(accounted: Account, recording: Recording, device: str = "cpu") -> Program:
    """The program with the measured time of every launch on `device`, eager's and tilewright's."""
    from tilewright.runtime.stopwatch import example_inputs, time_operators, time_steps

    times: dict[tuple[GraphName, Stage, str], float] = {}
    for name, graph in accounted.eager.graphs.items():
        for operator, us in time_operators(graph, example_inputs(graph), device).items():
            times[name, "before", operator] = us
    for compiled in recording.graphs:
        assert compiled.executable is not None
        for step, us in time_steps(compiled.executable, example_inputs(compiled.before), device).items():
            times[compiled.name, "after", step] = us
    program = accounted.program
    return replace(
        program,
        operators=[replace(o, measured_us=times.get((o.graph, o.stage, o.name))) for o in program.operators],
        regions=[replace(r, measured_us=times.get((r.graph, "after", r.name))) for r in program.regions],
        fallbacks=program.fallbacks + recording.fallbacks,
    )


def measure(
    subject: Subject,
    program: Program,
    *,
    suite: str,
    seconds: float,
    impls: Sequence[str] = (*PEERS, "tilewright"),
) -> list[Measurement]:
    """One interleaved run of all implementations of a case, with the peak memory of each."""
    from tilewright.hardware.ceilings import device_name
    from tilewright.hardware.detect import detect
    from tilewright.measure.benchmark import benchmark
    from tilewright.measure.memory import peak_bytes
    from tilewright.measure.results import environment, measurement

    direction: Direction = "fwd+bwd" if subject.case.training else "infer"
    calls = {impl: partial(subject.call, impl) for impl in impls}
    for call in calls.values():
        call()
    peaks = {impl: peak_bytes(call, subject.device) for impl, call in calls.items()}
    timings = benchmark(calls, device=subject.device, max_seconds=seconds, min_repeats=7)
    where = environment(device_name(detect(), subject.device))
    launches = [o for o in program.operators if o.stage == "after"]
    nbytes = sum(o.cost.bytes for o in launches)
    flops = sum(o.cost.flops for o in launches)
    predicted = sum(o.floor_us or 0.0 for o in launches)
    return [
        measurement(
            timing,
            where,
            suite=suite,
            case=case_label(subject.case),
            impl=impl,
            direction=direction,
            nbytes=nbytes if impl == "tilewright" else None,
            flops=flops,
            predicted_us=predicted if impl == "tilewright" else None,
            peak_bytes=peaks[impl],
        )
        for impl, timing in timings.items()
    ]


def case_label(case: Case) -> str:
    """`D768 H12 B2 S1024 float32`: the case's dimensions and the dtype of its first input."""
    sizes = " ".join(f"{name}{size}" for name, size in case.named_sizes().items())
    dtype = case.inputs[0].dtype if case.inputs else ""
    return f"{sizes} {dtype}".strip()


BENCH_IMPLS = ("eager", "eager-sdpa", "inductor", "inductor-out", "tilewright")


def bench_case(
    case: Case,
    *,
    suite: str,
    impls: Sequence[str] = (),
    device: str = "cpu",
    seconds: float = 20.0,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Program, list[Measurement]]:
    """Time the ways of running `case` in one interleaved run, tilewright's verified first.

    `impls` are of `BENCH_IMPLS`; default all that the case allows. Raises UsageError for another
    name, VerificationError where the numbers contract does not hold.
    """
    from tilewright.account import account
    from tilewright.hardware.profiles import local_profile
    from tilewright.measure.verify import verify

    unknown = [name for name in impls if name not in BENCH_IMPLS]
    if unknown:
        raise UsageError(f"no implementation {', '.join(unknown)}; known: {', '.join(BENCH_IMPLS)}")
    tell("capturing")
    program = account(case, local_profile(device=device), device=device).program
    subject = Subject(case, device)
    wanted = [name for name in impls or BENCH_IMPLS if name in subject.functions]
    tell("verifying")
    subject.call("tilewright")
    verified = verify(subject.model, subject.functions["tilewright"], subject.inputs, seed=1, training=case.training)
    broken = [v.tensor for v in verified if not v.ok]
    if broken:
        raise VerificationError(f"{case.name}: the numbers contract is broken for {', '.join(broken)}")
    tell(f"timing {', '.join(wanted)}")
    rows = measure(subject, program, suite=suite, seconds=seconds, impls=wanted)
    worst = max(verified, key=lambda v: v.error)
    return program, [
        replace(row, error=worst.error, eager_error=worst.eager_error) if row.impl == "tilewright" else row
        for row in rows
    ]


def tree_of_case(case: Case) -> Any:
    """The captured forward graph as an annotated tree (a rich renderable)."""
    from tilewright.account import tree_of
    from tilewright.graph.tree import render

    return render(tree_of(case))
