"""The rates that this device was measured to reach, and the file that keeps them."""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from tilewright.hardware.detect import Machine, detect
from tilewright.hardware.kernel_times import TERMS, KernelTimes
from tilewright.measure.timing.benchmark import benchmark
from tilewright.measure.timing.stopwatch import CpuStopwatch, CudaStopwatch
from tilewright.pytorch.state import float32_precision
from tilewright.records.atomic_file import write_atomically
from tilewright.records.errors import CacheError, UsageError, warn_once
from tilewright.records.home import home
from tilewright.records.measurement import Ceiling
from tilewright.records.progress import tell

_MIB = 1024**2
_UNKNOWN_CACHE_BYTES = 64 * _MIB
"""Buffers are sized as if the cache were this large where its size cannot be read."""
_QUEUED = 1000
"""Operators queued behind each other to time one launch."""
_CACHE_COPIES = 50
_TRIES = 3
_ABOVE = {"cache": "copy", "cache read": "read", "cache write": "write"}
"""For each rate of the cache, the rate of memory that it must exceed."""
_GPU_BUFFER_BYTES = 2 * 1024 * _MIB
"""A copy of this size takes a millisecond on the fastest card, so its first and last microseconds do not matter."""
_PINNED_BYTES = 256 * _MIB
_FORMAT = 3
"""Version of the file that keeps ceilings; with another version they are measured again."""


@dataclass(frozen=True)
class _Bench:
    """The device under measurement, and how long each figure may take."""

    device: str
    name: str
    cache_bytes: int
    memory_bytes: int
    seconds: float

    def medians_us(self, functions: Mapping[str, Callable[[], object]], *, flush_l2: bool = True) -> dict[str, float]:
        watch = CpuStopwatch() if self.device == "cpu" else CudaStopwatch(self.device, flush_l2=flush_l2)
        seconds = self.seconds * len(functions)
        timings = benchmark(functions, min_repeats=5, max_seconds=seconds, stopwatch=watch)
        return {name: timing.median_us for name, timing in timings.items()}

    def median_us(self, function: Callable[[], object], *, flush_l2: bool = True) -> float:
        return self.medians_us({"": function}, flush_l2=flush_l2)[""]

    def turn_us(self, kernels: Mapping[str, Callable[[int], object]], few: int, many: int) -> dict[str, float]:
        """Microseconds of one more turn of each kernel, from launches of `few` and of `many` turns.

        Their difference contains no launch, no first fetch from memory, and no start or end of programs.
        """
        calls = {f"{name} {turns}": partial(run, turns) for name, run in kernels.items() for turns in (few, many)}
        times_us = self.medians_us(calls, flush_l2=False)
        return {name: (times_us[f"{name} {many}"] - times_us[f"{name} {few}"]) / (many - few) for name in kernels}

    def ceiling(self, kind: str, dtype: str, value: float, unit: str) -> Ceiling:
        return Ceiling(self.name, kind, dtype, value, unit, "measured")

    @property
    def runs_triton(self) -> bool:
        """Whether kernels of ours can be built for the device: a GPU, with Triton installed."""
        return self.device != "cpu" and importlib.util.find_spec("triton") is not None

    def random(self, nbytes: int) -> torch.Tensor:
        """fp32 of about `nbytes`; a random block repeated, as drawing them all would take seconds."""
        block = torch.randn(min(nbytes // 4, _MIB), device=self.device)
        return block.repeat(max(1, nbytes // 4 // block.numel()))


_MEASURED = "ceilings of this machine measured"


def measure_ceilings(device: str = "cpu", *, machine: Machine | None = None, seconds: float = 0.3) -> list[Ceiling]:
    """Measure `cpu`, `cuda` or `cuda:N`: medians, random data, outputs touched before.

    | kind | dtype | unit | what |
    |---|---|---|---|
    | copy, read, write | float32 | GB/s | buffers four times the last-level cache |
    | cache | float32 | GB/s | copy what the last-level cache holds: bytes read and written; above memory, or left out |
    | cache read, cache write | float32 | GB/s | GPU with Triton: one direction |
    | matmul | each | TFLOP/s | square, the best size |
    | matmul 4096, matmul 8192 | each | TFLOP/s | GPU only: the sizes that the best is of |
    | vector | float32 | TFLOP/s | multiply-adds outside matrix units: the fp32 matmul's, or more by one of ours |
    | launch | | us | one small operator in a long queue of them |
    | launch in a graph | | us | GPU only: the same operators replayed from one CUDA graph |
    | shared | int32 | GB/s | GPU with Triton: all multiprocessors read their shared memory |
    | host to device, device to host | | GB/s | GPU only: one copy of pinned memory |
    | first touch | float32 | GB/s | CPU only: writing into memory just mapped |

    `seconds` bounds each figure; ten of them are taken on a CPU, twenty-five on a GPU.
    """
    bench = _bench(device, machine or detect(), seconds)
    tell(_MEASURED, 0)
    matmuls = _matmuls(bench)
    fp32 = next(ceiling.value for ceiling in matmuls if (ceiling.kind, ceiling.dtype) == ("matmul", "float32"))
    own = [_first_touch(bench)] if device == "cpu" else [*_shared(bench), *_links(bench)]
    memory = _memory_and_cache(bench)
    tell(_MEASURED, len(memory + matmuls + own))
    return [*memory, *matmuls, _vector(bench, fp32), *_launches(bench), *own]


def device_name(machine: Machine, device: str) -> str:
    """The name of the device `cpu`, `cuda` or `cuda:N`; UsageError if the machine has no such device."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return machine.cpu.model or "CPU"
    if kind != "cuda" or int(number or 0) >= len(machine.gpus):
        raise UsageError(f"no device {device!r} here, only cpu and {len(machine.gpus) or 'no'} CUDA devices")
    return machine.gpus[int(number or 0)].name


def _bench(device: str, machine: Machine, seconds: float) -> _Bench:
    name = device_name(machine, device)
    if device == "cpu":
        cache, memory = machine.cpu.last_level_bytes, machine.ram_bytes
    else:
        gpu = machine.gpus[int(device.partition(":")[2] or 0)]
        cache, memory = gpu.l2_bytes, gpu.memory_bytes
    cache = cache or _UNKNOWN_CACHE_BYTES
    return _Bench(device, name, cache, memory or 16 * cache, seconds)


def _memory_and_cache(bench: _Bench) -> list[Ceiling]:
    """The rates of memory and cache. While the cache is the slower one, measure again; finally leave its rates out."""
    for _ in range(_TRIES):
        memory, cache = _bandwidths(bench), _cache(bench)
        rates = {ceiling.kind: ceiling.value for ceiling in (*memory, *cache)}
        if all(rates.get(kind, math.inf) >= rates[below] for kind, below in _ABOVE.items()):
            return [*memory, *cache]
    warn_once(
        f"the cache of {bench.name} was measured slower than memory {_TRIES} times, so other programs use it; its rate "
        "is left out until `tilewright doctor --refresh` on an idle machine"
    )
    return memory


def _bandwidths(bench: _Bench) -> list[Ceiling]:
    nbytes = 4 * bench.cache_bytes if bench.device == "cpu" else max(4 * bench.cache_bytes, _GPU_BUFFER_BYTES)
    source = bench.random(min(nbytes, bench.memory_bytes // 8))
    target = torch.zeros_like(source)
    total = torch.zeros((), device=bench.device)
    passes = {"copy": 2, "read": 1, "write": 1}
    # One interleaved run: on a busy machine the three must stay in proportion.
    times_us = bench.medians_us(
        {
            "copy": lambda: target.copy_(source),
            "read": lambda: torch.sum(source, dim=0, out=total),
            "write": lambda: target.fill_(1.0),
        }
    )
    return [
        bench.ceiling(kind, "float32", passes[kind] * source.nbytes / time_us / 1e3, "GB/s")
        for kind, time_us in times_us.items()
    ]


def _cache(bench: _Bench) -> list[Ceiling]:
    rates = _walked_GBps(bench) if bench.runs_triton else {"cache": _copied_GBps(bench)}
    return [bench.ceiling(kind, "float32", GBps, "GB/s") for kind, GBps in rates.items()]


def _walked_GBps(bench: _Bench) -> dict[str, float]:
    from tilewright.hardware.probes import WALKS, cache_walkers

    walkers = cache_walkers(torch.device(bench.device), bench.cache_bytes)
    named = {f"{kind} {number}": walker for kind, shapes in walkers.items() for number, walker in enumerate(shapes)}
    times_us = bench.turn_us({name: walker.walk for name, walker in named.items()}, *WALKS)
    rates = {name: walker.nbytes / times_us[name] / 1e3 for name, walker in named.items()}
    best = {kind: max(rates[f"{kind} {number}"] for number in range(len(shapes))) for kind, shapes in walkers.items()}
    return {"cache": best["copy"], "cache read": best["read"], "cache write": best["write"]}


def _copied_GBps(bench: _Bench) -> float:
    """Rate of operators that copy a quarter of the cache into another quarter, launches included.

    On a CPU launches do not matter: 4 and 8 MB of a cache of 32 move at the same 169 GB/s. The difference of two sizes
    would exclude them, but came out five times too high while other programs ran. On an H200 launches cost a quarter.
    """
    source = bench.random(bench.cache_bytes // 4)
    target = torch.zeros_like(source)

    def copies() -> None:
        for _ in range(_CACHE_COPIES):
            torch.mul(source, 2.0, out=target)

    function = copies if bench.device == "cpu" else _recorded(copies, bench.device)
    return 2 * source.nbytes * _CACHE_COPIES / bench.median_us(function, flush_l2=False) / 1e3


def _recorded(function: Callable[[], None], device: str) -> Callable[[], None]:
    """`function` as a CUDA graph: a host cannot queue kernels of a few microseconds fast enough one by one."""
    with torch.cuda.device(device):
        function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return graph.replay


def _matmuls(bench: _Bench) -> list[Ceiling]:
    on_cpu = bench.device == "cpu"
    names = ("float32", "bfloat16") if on_cpu else ("float32", "tf32", "bfloat16", "float16")
    precision = float32_precision()
    rows: list[Ceiling] = []
    try:
        for name in names:
            # TF32 would be taken for a far higher fp32 rate.
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            rates = _matmul_TFLOPs(bench, "float32" if name == "tf32" else name)
            rows.append(bench.ceiling("matmul", name, max(rates.values()), "TFLOP/s"))
            if not on_cpu:
                rows += [bench.ceiling(f"matmul {size}", name, rate, "TFLOP/s") for size, rate in rates.items()]
            tell(_MEASURED, len(rows))
    finally:
        torch.set_float32_matmul_precision(precision)
    return rows


def _matmul_TFLOPs(bench: _Bench, dtype: str) -> dict[int, float]:
    """Rate of each square size; on a CPU larger sizes only while a call is short."""
    rates: dict[int, float] = {}
    for size in (512, 1024, 2048, 4096, 8192) if bench.device == "cpu" else (4096, 8192):
        factors = torch.randn(2, size, size, device=bench.device).to(getattr(torch, dtype))
        time_us = bench.median_us(partial(torch.mm, *factors, out=torch.zeros_like(factors[0])))
        rates[size] = 2 * size**3 / time_us / 1e6
        # Twice the size takes eight times as long, and five repeats of it must fit.
        if bench.device == "cpu" and 8 * time_us * 5 > bench.seconds * 1e6:
            break
    return rates


def _launches(bench: _Bench) -> list[Ceiling]:
    small = torch.zeros(1, device=bench.device)

    def queue() -> None:
        for _ in range(_QUEUED):
            small.add_(1.0)

    rows = [bench.ceiling("launch", "", bench.median_us(queue, flush_l2=False) / _QUEUED, "us")]
    if bench.device != "cpu":
        time_us = bench.median_us(_recorded(queue, bench.device), flush_l2=False) / _QUEUED
        rows.append(bench.ceiling("launch in a graph", "", time_us, "us"))
    return rows


def _vector(bench: _Bench, fp32_matmul_TFLOPs: float) -> Ceiling:
    """The fp32 matmul's rate, or that of multiply-adds alone, which neither load nor wait for operands."""
    rate = fp32_matmul_TFLOPs
    if bench.runs_triton:
        from tilewright.hardware.probes import TURNS, multiply_adder

        run, flops = multiply_adder(torch.device(bench.device))
        rate = max(rate, flops / bench.turn_us({"": run}, *TURNS)[""] / 1e6)
    return bench.ceiling("vector", "float32", rate, "TFLOP/s")


def _shared(bench: _Bench) -> list[Ceiling]:
    """Nothing where there is no Triton to build the kernel with."""
    if not bench.runs_triton:
        return []
    from tilewright.hardware.probes import PASSES, shared_memory_reader

    read, nbytes = shared_memory_reader(torch.device(bench.device))
    return [bench.ceiling("shared", "int32", nbytes / bench.turn_us({"": read}, *PASSES)[""] / 1e3, "GB/s")]


def _links(bench: _Bench) -> list[Ceiling]:
    host = bench.random(_PINNED_BYTES).cpu().pin_memory()
    device = torch.zeros_like(host, device=bench.device)
    times_us = {
        "host to device": bench.median_us(lambda: device.copy_(host, non_blocking=True)),
        "device to host": bench.median_us(lambda: host.copy_(device, non_blocking=True)),
    }
    return [bench.ceiling(kind, "", host.nbytes / time_us / 1e3, "GB/s") for kind, time_us in times_us.items()]


def _first_touch(bench: _Bench) -> Ceiling:
    nbytes = 64 * _MIB

    def touch() -> torch.Tensor:
        # Unlike the allocator, a private map never hands back pages that were touched before.
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.float32).fill_(1.0)

    return bench.ceiling("first touch", "float32", nbytes / bench.median_us(touch) / 1e3, "GB/s")


def machine_dir() -> Path:
    """`$TILEWRIGHT_HOME/machine`, or `~/.local/share/tilewright/machine`; it may not exist yet."""
    return home() / "machine"


def kept_ceilings(name: str) -> list[Ceiling] | None:
    """Ceilings kept for the device of that name under this PyTorch and thread count.

    None if there are none, or if the file is damaged: they are then measured again.
    """
    try:
        kept = json.loads(_place(name).read_text(encoding="utf-8"))
        ceilings = [Ceiling(**row) for row in kept["ceilings"]]
        sound = kept["format"] == _FORMAT and all(
            math.isfinite(ceiling.value) and ceiling.value > 0 for ceiling in ceilings
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return ceilings if ceilings and sound else None


def keep_ceilings(ceilings: list[Ceiling]) -> Path:
    """Keep the ceilings of one device for this PyTorch and thread count; CacheError if that fails."""
    path = _place(ceilings[0].device)
    rows = {"format": _FORMAT, "ceilings": [asdict(ceiling) for ceiling in ceilings]}
    _write(path, json.dumps(rows, indent=1) + "\n", "ceilings")
    return path


def kept_kernel_times(name: str) -> KernelTimes:
    """The coefficients fitted to kernels of the device of that name; {} if there are none, or the file is damaged."""
    try:
        kept = json.loads(_place(name, "kernels").read_text(encoding="utf-8"))
        found = {str(kind): tuple(map(float, row)) for kind, row in kept["times"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    sound = kept.get("terms") == list(TERMS) and all(
        len(row) == len(TERMS) and all(math.isfinite(c) and c >= 0 for c in row) for row in found.values()
    )
    return found if sound else {}


def keep_kernel_times(name: str, times: KernelTimes, timed: Sequence[Mapping[str, object]]) -> Path:
    """Keep the coefficients and the rows that they fit, for this PyTorch and thread count; CacheError if that fails."""
    path = _place(name, "kernels")
    _write(path, json.dumps({"terms": TERMS, "times": times, "timed": list(timed)}, indent=1) + "\n", "kernel times")
    return path


def _write(path: Path, text: str, what: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise CacheError(f"cannot keep the measured {what} in {path}: {error.strerror}") from error


def _place(name: str, what: str = "") -> Path:
    key = f"{name} torch-{torch.__version__} threads-{torch.get_num_threads()}"
    return machine_dir() / f"{re.sub(r'[^A-Za-z0-9_.+-]+', '-', f'{key} {what}'.strip())}.json"
