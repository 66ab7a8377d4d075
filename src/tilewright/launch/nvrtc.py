"""CUDA C++ built at run time: NVRTC makes a cubin, the disk cache keeps it, the driver launches it.

A source file includes only headers of its own folder or of `kernels/` (`row.cuh`, `wgmma.cuh`), so neither nvcc nor
CUDA's or PyTorch's headers are needed; sizes that must be constants (threads, vectors a thread, cluster) come as `-D`
definitions:

    forward = kernel(HERE / "cuda.cu", "forward", "PPqq", device=0, threads=512, definitions=(("THREADS", 512),))
    forward((rows,), x.data_ptr(), y.data_ptr(), rows, columns)

`cuda.bindings` (which PyTorch's CUDA builds bring) is imported when something is compiled or launched.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tilewright.hardware.architectures import DeviceLimits, architecture, limits_of
from tilewright.launch import twin
from tilewright.launch.driver import make_current
from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError, warn_once
from tilewright.records.recipe import Launch, Number
from tilewright.records.sources import INCLUDE

Definitions = tuple[tuple[str, int | str], ...]
HEADERS = Path(__file__).parents[1] / "kernels"
"""The folder of headers that all sources may include."""


@functools.cache
def bindings_installed() -> bool:
    """Whether the package `cuda-bindings` is installed."""
    return bool(importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"))


def available(device: int) -> bool:
    """Whether CUDA C++ can be built for CUDA device `device`: `cuda.bindings` is installed, and it has clusters."""
    return bindings_installed() and _limits(device).max_cluster > 1


def _limits(device: int) -> DeviceLimits:
    import torch

    return limits_of(torch.device("cuda", device))


class Kernel:
    """One entry point, loaded on one device. Calling it launches it on that device's current stream.

    `signature` has a `struct` format letter for each parameter: P pointer, q 64-bit integer, i 32-bit integer, f float.
    The device must be the current one. A launch allocates nothing and waits for nothing, so a CUDA graph can record it.
    """

    def __init__(
        self, name: str, function: Any, signature: str, device: int, threads: int, shared_bytes: int, cluster: int
    ) -> None:
        self.name = name
        self.function = function
        self.cluster = cluster
        self.device = device
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.signature = signature

    def __call__(self, grid: tuple[int, ...], *arguments: float) -> None:
        """Launch `grid` blocks (x, y, z; missing ones are 1). Raises CompilerError if the driver refuses."""
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z:
            given = tuple(Number(*pair) for pair in zip(self.signature, arguments, strict=True))
            twin.launch(self.name, self.device, Launch(self, (x, y, z), given))

    def registers(self) -> int:
        """Registers of a thread."""
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        count: int = _checked(driver.cuFuncGetAttribute(attribute, self.function))
        return count

    def blocks_per_multiprocessor(self) -> int:
        """Blocks resident on one multiprocessor at once."""
        driver = _driver()
        count: int = _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared_bytes)
        )
        return count

    def programs_at_once(self) -> int:
        """Clusters (blocks, if the cluster is one block) resident on the device at once.

        A cluster lies within one group of multiprocessors (GPC), so there may be fewer than the multiprocessors hold.
        """
        if self.cluster == 1:
            return self.blocks_per_multiprocessor() * _limits(self.device).multiprocessors
        driver = _driver()
        config, attribute = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = self.cluster, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        count: int = _checked(driver.cuOccupancyMaxActiveClusters(self.function, config))
        return count


@functools.cache
def kernel(
    source: Path, entry: str, signature: str, *, device: int, threads: int, shared_bytes: int = 0, cluster: int = 1,
    definitions: Definitions = (),
) -> Kernel:  # fmt: skip
    """The kernel `entry` (extern "C") of the file `source`, compiled for device number `device` and loaded.

    `threads` is the block, `shared_bytes` its dynamic shared memory, `cluster` what the source names in
    `__cluster_dims__`. CompilerError carries the compiler's words or the driver's.
    """
    code = cubin(source, architecture(_limits(device).capability).target, definitions)
    return loaded(code, entry, signature, device=device, threads=threads, shared_bytes=shared_bytes, cluster=cluster)


def loaded(
    code: bytes, entry: str, signature: str, *, device: int, threads: int, shared_bytes: int, cluster: int = 1
) -> Kernel:
    """The kernel `entry` of a cubin, loaded on CUDA device `device`."""
    import torch

    driver = _driver()
    with torch.cuda.device(device):
        make_current(device)
        # The module is never unloaded: the kernel lives as long as the process.
        function = _checked(driver.cuModuleGetFunction(_checked(driver.cuModuleLoadData(code)), entry.encode()))
        if shared_bytes:
            name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(function, name, shared_bytes))
        if cluster > 1 and cluster > _limits(device).max_cluster:
            name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _checked(driver.cuFuncSetAttribute(function, name, 1))
    return Kernel(entry, function, signature, device, threads, shared_bytes, cluster)


def cubin(source: Path, architecture: str, definitions: Definitions = ()) -> bytes:
    """Machine code of `source` for `architecture` (`sm_90a`), from the cache or compiled now. Needs no GPU."""
    options = (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in definitions),
    )
    text = source.read_text()
    headers = _headers(text, source.parent)
    key = cache.key_of(text, *(part for header in headers.items() for part in header), *options, version())

    def compiled() -> bytes:
        return _compile(source.name, text, headers, options)

    try:
        return cache.build_with_digest(key, ".cubin", lambda out: out.write_bytes(compiled())).read_bytes()
    except CacheError as error:
        warn_once(f"kernels are compiled for this process alone: {error}")
        return compiled()


def _headers(text: str, folder: Path) -> dict[str, str]:
    """The headers that a source of `folder` includes, directly or not, by name; they lie in `folder` or `HEADERS`."""
    found: dict[str, str] = {}
    wanted = INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in found:
            path = next((path for path in (folder / name, HEADERS / name) if path.exists()), None)
            if path is None:
                raise CompilerError(f"no header {name} in {folder} or {HEADERS}")
            found[name] = path.read_text()
            wanted += INCLUDE.findall(found[name])
    return dict(sorted(found.items()))


def _compile(name: str, text: str, headers: dict[str, str], options: tuple[str, ...]) -> bytes:
    nvrtc = _nvrtc()
    texts, names = [header.encode() for header in headers.values()], [header.encode() for header in headers]
    program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(headers), texts, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompilerError(f"NVRTC failed on {name}: {log.decode(errors='replace').strip(chr(0)).strip()}")
        code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@functools.cache
def version() -> str:
    """Raises CompilerError if NVRTC is not installed."""
    try:
        return "NVRTC " + ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))
    except RuntimeError as error:  # the first call looks for the library
        raise CompilerError(f"NVRTC does not load: {error}; pip install nvidia-cuda-nvrtc") from error


@functools.cache
def _nvrtc() -> Any:
    return _bindings("nvrtc")


@functools.cache
def _driver() -> Any:
    return _bindings("driver")


def _bindings(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CompilerError(f"CUDA C++ needs the package cuda-bindings: {error}; pip install cuda-bindings") from error


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value that a CUDA call returned after its status, or a tuple of several. Raises CompilerError."""
    status, *values = answer
    if status.value != 0:
        raise CompilerError(f"CUDA answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
