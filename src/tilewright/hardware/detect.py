"""The hardware and software of this machine. A value that cannot be read is None, never a guess."""

from __future__ import annotations

import os
import platform
import re
import time
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from tilewright.hardware.architectures import reported_limits

_ISA = {
    "sse4_2": "sse4.2",
    "avx": "avx",
    "fma": "fma",
    "avx2": "avx2",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "sve": "sve",
    "sve2": "sve2",
    "bf16": "bf16",
}
"""Flags of /proc/cpuinfo that matter for the speed of kernels, and their usual names."""


@dataclass(frozen=True)
class Cpu:
    """Processor and its caches, in bytes; L1 (data) and L2 of one core, L3 of the whole machine."""

    model: str | None = None
    cores: int | None = None
    threads: int | None = None
    """Hardware threads that this process may run on."""
    isa: tuple[str, ...] | None = None
    l1_bytes: int | None = None
    l2_bytes: int | None = None
    l3_bytes: int | None = None

    @property
    def last_level_bytes(self) -> int | None:
        """The last level before memory: L3, or without one the L2 of all cores together."""
        if self.l3_bytes is not None or self.l2_bytes is None or self.cores is None:
            return self.l3_bytes
        return self.l2_bytes * self.cores


@dataclass(frozen=True)
class Gpu:
    """One CUDA device; sizes in bytes."""

    name: str
    capability: str | None = None
    """Compute capability, `9.0`."""
    memory_bytes: int | None = None
    l2_bytes: int | None = None
    sms: int | None = None
    max_threads_per_sm: int | None = None
    registers_per_sm: int | None = None
    shared_bytes_per_sm: int | None = None
    pcie: str | None = None
    """The fastest link that card and slot support, `PCIe 5 x16`; an idle link may run slower."""
    uuid: str | None = None
    """The driver's identifier of this card."""


@dataclass(frozen=True)
class Machine:
    """Hardware and software that figures depend on."""

    cpu: Cpu
    gpus: tuple[Gpu, ...]
    ram_bytes: int | None
    driver: str | None
    driver_cuda: str | None
    """The newest CUDA that the driver supports."""
    cuda: str | None
    """The CUDA that PyTorch was built with."""
    os: str | None
    kernel: str | None
    python: str
    torch: str | None
    triton: str | None


def detect() -> Machine:
    """Read this machine; works without a GPU, without NVIDIA's libraries, and without PyTorch."""
    torch = _module("torch")
    nvml = _nvml()
    gpus = _torch_gpus(torch) if torch else []
    driver = driver_cuda = None
    if nvml:
        gpus = [_with_link(gpu, nvml) for gpu in gpus or _nvml_gpus(nvml)]
        driver, driver_cuda = _driver(nvml)
        nvml.nvmlShutdown()
    return Machine(
        cpu=read_cpu(),
        gpus=tuple(gpus),
        ram_bytes=read_ram_bytes(),
        driver=driver,
        driver_cuda=driver_cuda,
        cuda=torch.version.cuda if torch else None,
        os=_os_name(),
        kernel=platform.release() or None,
        python=platform.python_version(),
        torch=_version("torch"),
        triton=_version("triton"),
    )


def read_cpu(root: Path = Path("/")) -> Cpu:
    """The processor as Linux describes it in `/proc/cpuinfo` and `/sys/devices/system/cpu` under `root`."""
    text = _text(root / "proc/cpuinfo") or ""
    info = dict(re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE))
    # x86 says "flags", Arm says "Features".
    flags = info.get("flags") or info.get("Features")
    folder = root / "sys/devices/system/cpu"
    caches = _cache_sizes(folder)
    this_machine = root == Path("/") and hasattr(os, "sched_getaffinity")
    return Cpu(
        model=info.get("model name") or None,
        cores=_core_count(folder),
        threads=len(os.sched_getaffinity(0)) if this_machine else len(list(folder.glob("cpu[0-9]*"))) or None,
        isa=tuple(name for flag, name in _ISA.items() if flag in flags.split()) if flags else None,
        l1_bytes=max(caches.get(1, {}).values(), default=None),
        l2_bytes=max(caches.get(2, {}).values(), default=None),
        l3_bytes=sum(caches[3].values()) if 3 in caches else None,
    )


def read_ram_bytes(root: Path = Path("/")) -> int | None:
    """Memory of the machine, from `/proc/meminfo` under `root`."""
    total = re.search(r"^MemTotal:\s*(\d+) kB$", _text(root / "proc/meminfo") or "", re.MULTILINE)
    return int(total[1]) * 1024 if total else None


def _cache_sizes(folder: Path) -> dict[int, dict[str, int]]:
    """Level → instance (the processors that share it) → bytes, without instruction caches."""
    caches: dict[int, dict[str, int]] = {}
    for index in folder.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, kind, size, shared = (
            (_text(index / name) or "").strip() for name in ("level", "type", "size", "shared_cpu_list")
        )
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if level.isdigit() and kind in ("Data", "Unified") and match:
            nbytes = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
            caches.setdefault(int(level), {})[shared or str(index)] = nbytes
    return caches


def _core_count(folder: Path) -> int | None:
    """Physical cores: distinct pairs of package and core id."""
    places = {
        (_text(topology / "physical_package_id"), _text(topology / "core_id"))
        for topology in folder.glob("cpu[0-9]*/topology")
    }
    return len(places) or None


def _torch_gpus(torch: ModuleType) -> list[Gpu]:
    """Every device PyTorch can use."""
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        every = [torch.cuda.get_device_properties(index) for index in range(count)]
    except (RuntimeError, AssertionError):
        return []
    return [
        Gpu(
            name=properties.name,
            capability=limits.capability,
            memory_bytes=properties.total_memory,
            l2_bytes=limits.l2_bytes,
            sms=limits.multiprocessors,
            max_threads_per_sm=limits.max_threads,
            registers_per_sm=limits.registers,
            shared_bytes_per_sm=limits.shared_bytes,
            uuid=f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None,
        )
        for properties, limits in ((properties, reported_limits(properties)) for properties in every)
    ]


def _nvml() -> ModuleType | None:
    """NVIDIA's management library, initialised; None without a driver."""
    nvml = _module("pynvml")
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _nvml_gpus(nvml: ModuleType) -> list[Gpu]:
    """The GPUs of a machine whose PyTorch cannot use them."""
    gpus: list[Gpu] = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            gpu = Gpu(
                name=nvml.nvmlDeviceGetName(handle),
                capability=f"{major}.{minor}",
                memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
                uuid=nvml.nvmlDeviceGetUUID(handle),
            )
            gpus.append(gpu)
    except nvml.NVMLError:
        return gpus
    return gpus


def _with_link(gpu: Gpu, nvml: ModuleType) -> Gpu:
    if gpu.uuid is None:
        return gpu
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        width = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except nvml.NVMLError:
        return gpu
    return replace(gpu, pcie=f"PCIe {generation} x{width}")


def _driver(nvml: ModuleType) -> tuple[str | None, str | None]:
    """Driver version, and the newest CUDA it supports."""
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        return nvml.nvmlSystemGetDriverVersion(), f"{cuda // 1000}.{cuda % 1000 // 10}"
    except nvml.NVMLError:
        return None, None


def _module(name: str) -> ModuleType | None:
    try:
        return import_module(name)
    except ImportError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _os_name() -> str | None:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    except OSError:
        return platform.system() or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


SECONDS = 0.2
"""Time over which `idle_cpus` counts. A load average lags by a minute."""


def idle_cpus() -> float:
    """How many CPUs of the host were idle in a moment, by Linux's counters."""

    def counted() -> tuple[int, int, int]:
        lines = Path("/proc/stat").read_text().splitlines()
        user, nice, system, idle, waiting, *others = map(int, lines[0].split()[1:9])
        cpus = sum(line.startswith("cpu") and line[3] != " " for line in lines)
        return idle + waiting, user + nice + system + idle + waiting + sum(others), cpus

    idle, total, cpus = counted()
    time.sleep(SECONDS)
    later_idle, later_total, _ = counted()
    return cpus * (later_idle - idle) / max(later_total - total, 1)
