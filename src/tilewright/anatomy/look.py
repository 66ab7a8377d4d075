"""`tilewright kernel TARGET`: run or compile what the target names, and take apart every kernel that it launches."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.anatomy.capture import Captured, NothingCaptured, capturing, launch_record
from tilewright.anatomy.cuda import capturing_cuda
from tilewright.anatomy.cuda_file import cuda_file_launch
from tilewright.anatomy.library import generated_cpp, keeping_code, profiled, with_generated_code
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.anatomy.subjects import Subject, grid_of, of_case, of_kernel, of_operator, of_product
from tilewright.anatomy.tiles import look_at
from tilewright.hardware.architectures import limits_of
from tilewright.hardware.geometry import KernelView, view_of
from tilewright.hardware.profiles import DeviceProfile, profile_for
from tilewright.records.case import DTYPES, Case
from tilewright.records.errors import TargetError, TilewrightError, UsageError
from tilewright.records.launch_record import LaunchRecord
from tilewright.records.suite import Suite

DEFAULT_DEVICE = "h200"
"""What kernels are compiled for where there is no GPU and `--on` names none."""
CASE_IMPLS = ("eager", "inductor", "tilewright")
CUBLAS = "cublas"
"""Of `matmul`: the bare library call, with the kernel that it chooses at each size."""
LIBRARY = ("torch", "library", "inductor")
"""Languages of variants whose kernels only the profiler sees."""


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    target: str
    sizes: tuple[str, ...] = ()
    """`1000x512`, for operators; the first of the operator's own without."""
    impl: str = ""
    dtype: str = ""
    direction: str = "fwd"
    on: str | None = None
    inputs: str | None = None
    launch: str = "launch"
    signature: str | None = None
    grid: str | None = None
    threads: int | None = None
    """Of a block, for a kernel of a `.cu` file."""
    code_only: bool = False
    """Leave out what takes time: programs are not followed, other tile sizes not compiled, nothing is timed."""


@dataclass(frozen=True)
class _Place:
    """The device at hand, or a profile that kernels are compiled for."""

    name: str
    sms: int
    capability: str
    profile: DeviceProfile | None
    """None on a real device, where kernels run."""


def look(request: Request) -> list[tuple[str, list[KernelView]]]:
    """For each size asked for, its heading and its kernels in the order of their launches.

    With a GPU and no `on`, the target runs and its kernels are timed; else they are compiled for the
    device of that name and nothing runs. UsageError, TargetError, or NothingCaptured where the target
    launches no kernel that can be seen there.
    """
    place = _place(request.on)
    file, _, name = request.target.rpartition(":")
    if file.endswith(".cu"):
        return [(name, [_cuda_file_view(Path(file), name, request, place)])]
    found = []
    for subject, opaque in _subjects(request):
        if isinstance(subject, Case):
            found.append((f"{subject.name} inductor", [_cpp_view(launch) for launch in _on_cpu(subject)]))
            continue
        views = _profiler_views(subject, place) if opaque else _views(subject, place, request.code_only)
        if not views and place.profile is None:
            views = _profiler_views(subject, place)
        if not views:
            raise NothingCaptured(f"{subject.name} launches no Triton or CUDA C++ kernel of ours; {_needs_gpu(place)}")
        found.append((subject.name, views))
    return found


def _cuda_file_view(path: Path, name: str, request: Request, place: _Place) -> KernelView:
    if request.grid is None or request.threads is None:
        raise UsageError(
            f"a CUDA C++ kernel is laid out with --grid and --threads, e.g. --grid 63 --threads 128; {path}"
        )
    grid = grid_of(request.grid)
    launch = cuda_file_launch(path, name, place.capability, grid, request.threads)
    return view_of(launch, place.name, place.sms)


def _needs_gpu(place: _Place) -> str:
    return (
        "the profiler saw none either"
        if place.profile is None
        else "kernels of libraries and of Inductor need a GPU to be seen"
    )


def _place(on: str | None) -> _Place:
    if on is None and torch.cuda.is_available():
        limits = limits_of(CUDA)
        return _Place(torch.cuda.get_device_name(CUDA), limits.multiprocessors, limits.capability, None)
    profile = profile_for(on or DEFAULT_DEVICE)
    if profile.capability is None:
        raise UsageError(f"{profile.name} is no GPU; kernels have a geometry on h200, a100, rtx4090, 2080ti")
    return _Place(profile.name, profile.sms, profile.capability, profile)


def _subjects(request: Request) -> Iterator[tuple[Subject | Case, bool]]:
    """What to run, and whether only the profiler can see its kernels; a bare case is for Inductor on the CPU."""
    if ":" not in request.target:
        yield from _operators(request)
        return
    from tilewright.targets import load_case, load_object

    if request.sizes:
        raise UsageError(f"sizes are for operators; {request.target} brings its own")
    found = load_object(request.target)
    if isinstance(found, Suite):
        yield from _operators(request)
        return
    if hasattr(found, "arg_names") and hasattr(found, "run"):
        yield of_kernel(request.target, request.launch, request.signature, request.grid), False
        return
    impl = request.impl or "tilewright"
    if impl not in CASE_IMPLS:
        raise UsageError(f"no implementation {impl!r} of a case; known: {', '.join(CASE_IMPLS)}")
    case = load_case(request.target, request.inputs)
    if not torch.cuda.is_available():
        if impl != "inductor" or request.on:
            raise UsageError(f"what {impl} runs for a case on a GPU can only be seen there; on a CPU, --impl inductor")
        yield case, True
        return
    yield of_case(case, impl), impl != "tilewright"


def _operators(request: Request) -> Iterator[tuple[Subject, bool]]:
    from tilewright.bench import suite_named

    if (request.target, request.impl) == ("matmul", CUBLAS):
        for text in request.sizes or ("4096x4096x4096",):
            yield of_product(_sizes(text, 3), DTYPES[_dtype(request.dtype or "bf16")]), True
        return
    suite = suite_named(request.target)
    if suite is None:
        raise TargetError(f"{request.target} is no operator")
    dtype = _dtype(request.dtype or suite.dtypes[0])
    impl = request.impl or suite.variants[0].name
    names = [variant.name for variant in suite.variants]
    if impl not in names:
        raise UsageError(f"no implementation {impl!r} of {suite.name}; known: {', '.join(names)}")
    variant = suite.variant(impl)
    for text in request.sizes or ("x".join(map(str, suite.sizes[0])),):
        workload = suite.workload(_sizes(text, len(suite.sizes[0])), DTYPES[dtype])
        if request.direction not in workload.work:
            raise UsageError(f"{suite.name} has no direction {request.direction!r}; known: {', '.join(workload.work)}")
        refusal = variant.refuses(workload)
        if refusal:
            raise UsageError(f"{impl} refuses {workload.name}: {refusal}")
        yield of_operator(suite, workload, variant, request.direction), variant.language in LIBRARY


def _dtype(name: str) -> str:
    if name not in DTYPES:
        raise UsageError(f"no dtype {name!r}; known: {', '.join(DTYPES)}")
    return name


def _sizes(text: str, axes: int) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdigit() and int(part) for part in parts) or len(parts) != axes:
        raise UsageError(f"size {text!r} is not of the form {'x'.join('N' * axes)}")
    return tuple(map(int, parts))


def _views(subject: Subject, place: _Place, code_only: bool) -> list[KernelView]:
    """The Triton and CUDA C++ kernels of a subject."""
    real = place.profile is None
    world: Any = simulated(place.profile, place.capability) if place.profile else contextlib.nullcontext()
    with warnings.catch_warnings(), world:
        warnings.simplefilter("ignore")
        with capturing(run=real) as triton, capturing_cuda(place.capability, run=real) as cuda:
            _run(subject, real, (triton, cuda))
        if code_only:
            launches = [launch_record(captured) for captured in _distinct(triton)]
            return [view_of(launch, place.name, place.sms) for launch in (*launches, *cuda)]
        time = _time if real else None
        views = [look_at(captured, place.name, place.sms, time=time) for captured in _distinct(triton)]
    if real and cuda:
        seen = {(seen.name, seen.grid): seen.measured_us for seen in profiled(_stages(subject), place.capability)}
        cuda = [dataclasses.replace(own, measured_us=seen.get((own.name, own.grid))) for own in cuda]
    return views + [view_of(launch, place.name, place.sms) for launch in cuda]


def _run(subject: Subject, real: bool, kept: tuple[list[Any], ...]) -> None:
    """Every stage; the launches of those that were not asked for are forgotten."""
    try:
        for wanted in subject.stages(CUDA, torch.Generator(CUDA if real else "cpu")):
            if not wanted:
                for launches in kept:
                    launches.clear()
    except TilewrightError:
        raise
    except Exception as error:  # the user's code, or a kernel's launcher, may raise anything
        raise TargetError(f"{subject.name} failed: {type(error).__name__}: {str(error).strip()[:500]}") from error


def _distinct(launches: list[Captured]) -> list[Captured]:
    """One of each kernel with its grid and constants: a kernel that is launched in a loop is shown once."""
    seen: dict[tuple[Any, ...], Captured] = {}
    for captured in launches:
        key = (captured.place, captured.grid, str(captured.constants), str(captured.options))
        seen.setdefault(key, captured)
    return list(seen.values())


def _time(captured: Captured) -> float:
    """Median of a launch in microseconds, L2 flushed before each."""
    from tilewright.measure.timing.benchmark import benchmark
    from tilewright.measure.timing.stopwatch import CudaStopwatch

    timing = benchmark({"": captured.launch}, min_repeats=5, max_seconds=0.2, stopwatch=CudaStopwatch("cuda"))
    return timing[""].median_us


def _profiler_views(subject: Subject, place: _Place) -> list[KernelView]:
    if place.profile is not None:
        raise UsageError(f"{subject.name}: {_needs_gpu(place)}")
    with keeping_code() as generated:
        launches = with_generated_code(profiled(_stages(subject), place.capability), generated)
    return [view_of(launch, place.name, place.sms) for launch in launches]


def _stages(subject: Subject) -> Callable[[], Iterator[bool]]:
    """The stages on the GPU at hand."""
    return lambda: subject.stages(CUDA, torch.Generator(CUDA))


def _on_cpu(case: Case) -> list[LaunchRecord]:
    from tilewright.verbs import Subject as Runs

    runs = Runs(case, "cpu")
    return generated_cpp(lambda: runs.call("inductor"))


def _cpp_view(launch: LaunchRecord) -> KernelView:
    return view_of(launch, "this machine", 1)
