"""`tilewright kernel TARGET`: runs or compiles the target, and analyses every kernel that it launches."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.anatomy.capture import NothingCaptured, TritonLaunch, capturing, capturing_cuda, launch_record
from tilewright.anatomy.cuda_file import cuda_file_launch
from tilewright.anatomy.launch_targets import LaunchTarget, grid_of, of_case, of_kernel, of_operator, of_product
from tilewright.anatomy.library import profiled, with_generated_code
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.anatomy.tiles import view_launch
from tilewright.hardware.architectures import limits_of
from tilewright.hardware.geometry import KernelView, view_of
from tilewright.hardware.profiles import DeviceProfile, profile_for
from tilewright.pytorch.compiler import keeping_code
from tilewright.records.case import DTYPES
from tilewright.records.errors import TargetError, TilewrightError, UsageError
from tilewright.records.suite import Suite

DEFAULT_DEVICE = "h200"
"""The device to compile for without a GPU and without `--on`."""
CASE_IMPLS = ("eager", "inductor", "tilewright")
CUBLAS = "cublas"
"""An implementation of `matmul`: the library call, with the kernel that it chooses at each size."""
LIBRARY = ("torch", "library", "inductor")
"""Languages of variants whose kernels only the profiler records."""


@dataclass(frozen=True)
class Request:
    """The options of the command."""

    target: str
    sizes: tuple[str, ...] = ()
    """`1000x512`, for operators; by default the first of the suite's sizes."""
    impl: str = ""
    dtype: str = ""
    direction: str = "fwd"
    on: str | None = None
    inputs: str | None = None
    launch: str = "launch"
    grid: str | None = None
    """For a kernel of a `.cu` file."""
    threads: int | None = None
    """Per block, likewise."""
    code_only: bool = False
    """Skip what takes time: no program is interpreted, no other tile size compiled, nothing timed."""


@dataclass(frozen=True)
class _Device:
    """The GPU of this machine, or a profile for which kernels are compiled."""

    name: str
    sms: int
    capability: str
    profile: DeviceProfile | None
    """None for a real device, on which kernels run."""


def kernel_views(request: Request) -> list[tuple[str, list[KernelView]]]:
    """For each requested size a heading and its kernels, in the order of their launches.

    With a GPU and without `on`, the target runs and its kernels are timed; otherwise they are compiled for the
    device `on` and nothing runs. UsageError, TargetError, or NothingCaptured if the target launches no kernel
    that can be captured.
    """
    device = _device(request.on)
    file, _, name = request.target.rpartition(":")
    if file.endswith(".cu"):
        return [(name, [_cuda_file_view(Path(file), name, request, device)])]
    if request.grid is not None or request.threads is not None:
        raise UsageError(f"--grid and --threads are for file.cu:kernel; {request.target} has its own: leave them out")
    found = []
    for target, opaque in _targets(request):
        views = _profiler_views(target, device) if opaque else _views(target, device, request.code_only)
        if not views and device.profile is None:
            views = _profiler_views(target, device)
        if not views:
            raise NothingCaptured(f"{target.name} launches no Triton or CUDA C++ kernel of ours; {_needs_gpu(device)}")
        found.append((target.name, views))
    return found


def _cuda_file_view(path: Path, name: str, request: Request, device: _Device) -> KernelView:
    if request.grid is None or request.threads is None:
        raise UsageError(f"a CUDA C++ kernel needs --grid and --threads, e.g. --grid 63 --threads 128; {path}")
    grid = grid_of(request.grid)
    launch = cuda_file_launch(path, name, device.capability, grid, request.threads)
    return view_of(launch, device.name, device.sms)


def _needs_gpu(device: _Device) -> str:
    return (
        "the profiler recorded none either"
        if device.profile is None
        else "kernels of libraries and of Inductor can be recorded only on a GPU"
    )


def _device(on: str | None) -> _Device:
    if on is None and torch.cuda.is_available():
        limits = limits_of(CUDA)
        return _Device(torch.cuda.get_device_name(CUDA), limits.multiprocessors, limits.capability, None)
    profile = profile_for(on or DEFAULT_DEVICE)
    if profile.capability is None or not profile.generation:
        raise UsageError(f"kernels are compiled for NVIDIA's GPUs, which {profile.name} is not")
    return _Device(profile.name, profile.sms, profile.capability, profile)


def _targets(request: Request) -> Iterator[tuple[LaunchTarget, bool]]:
    """The launches to run, and for each whether only the profiler can record its kernels."""
    if ":" not in request.target:
        yield from _operators(request)
        return
    from tilewright.case_names import load_case, load_object

    if request.sizes:
        raise UsageError(f"sizes are for operators; {request.target} has its own")
    found = load_object(request.target)
    if isinstance(found, Suite):
        yield from _operators(request)
        return
    if hasattr(found, "arg_names") and hasattr(found, "run"):
        yield of_kernel(request.target, request.launch), False
        return
    impl = request.impl or "tilewright"
    if impl not in CASE_IMPLS:
        raise UsageError(f"no implementation {impl!r} of a case; known: {', '.join(CASE_IMPLS)}")
    case = load_case(request.target, request.inputs)
    if not torch.cuda.is_available():
        raise UsageError(f"kernels of {impl} for a case are recorded only on a GPU")
    yield of_case(case, impl), impl != "tilewright"


def _operators(request: Request) -> Iterator[tuple[LaunchTarget, bool]]:
    from tilewright.bench import suite_named

    if (request.target, request.impl) == ("matmul", CUBLAS):
        for text in request.sizes or ("4096x4096x4096",):
            yield of_product(_sizes(text, 3), DTYPES[_dtype(request.dtype or "bf16")]), True
        return
    suite = suite_named(request.target)
    if suite is None:
        raise TargetError(f"{request.target} is not an operator")
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


def _views(target: LaunchTarget, device: _Device, code_only: bool) -> list[KernelView]:
    """The Triton and CUDA C++ kernels of a target."""
    real = device.profile is None
    simulation: Any = simulated(device.profile, device.capability) if device.profile else contextlib.nullcontext()
    with warnings.catch_warnings(), simulation:
        warnings.simplefilter("ignore")
        with capturing(run=real) as triton, capturing_cuda(device.capability, run=real) as cuda:
            _run(target, real, (triton, cuda))
        if code_only:
            launches = [launch_record(captured) for captured in _distinct(triton)]
            return [view_of(launch, device.name, device.sms) for launch in (*launches, *cuda)]
        time = _time if real else None
        views = [view_launch(captured, device.name, device.sms, time=time) for captured in _distinct(triton)]
    if real and cuda:
        times = {(k.name, k.grid): k.measured_us for k in profiled(_stages(target), device.capability)}
        cuda = [dataclasses.replace(launch, measured_us=times.get((launch.name, launch.grid))) for launch in cuda]
    return views + [view_of(launch, device.name, device.sms) for launch in cuda]


def _run(target: LaunchTarget, real: bool, kept: tuple[list[Any], ...]) -> None:
    """Run every stage; discard the launches of stages that do not belong to the request."""
    try:
        for wanted in target.stages(CUDA, torch.Generator(CUDA if real else "cpu")):
            if not wanted:
                for launches in kept:
                    launches.clear()
    except TilewrightError:
        raise
    except Exception as error:  # the user's code, or a kernel's launcher, may raise anything
        raise TargetError(f"{target.name} failed: {type(error).__name__}: {str(error).strip()[:500]}") from error


def _distinct(launches: list[TritonLaunch]) -> list[TritonLaunch]:
    """One launch of each kernel, grid and constants: a kernel that is launched in a loop is shown once."""
    known: dict[tuple[Any, ...], TritonLaunch] = {}
    for captured in launches:
        key = (captured.place, captured.grid, str(captured.constants), str(captured.options))
        known.setdefault(key, captured)
    return list(known.values())


def _time(captured: TritonLaunch) -> float:
    """Median of a launch in microseconds, L2 flushed before each."""
    from tilewright.measure.timing.benchmark import benchmark
    from tilewright.measure.timing.stopwatch import CudaStopwatch

    timing = benchmark({"": captured.launch}, min_repeats=5, max_seconds=0.2, stopwatch=CudaStopwatch("cuda"))
    return timing[""].median_us


def _profiler_views(target: LaunchTarget, device: _Device) -> list[KernelView]:
    if device.profile is not None:
        raise UsageError(f"{target.name}: {_needs_gpu(device)}")
    with keeping_code() as generated:
        launches = with_generated_code(profiled(_stages(target), device.capability), generated)
    return [view_of(launch, device.name, device.sms) for launch in launches]


def _stages(target: LaunchTarget) -> Callable[[], Iterator[bool]]:
    """The stages on this machine's GPU."""
    return lambda: target.stages(CUDA, torch.Generator(CUDA))
