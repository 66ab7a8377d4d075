"""CUDA C++ built at run time: NVRTC makes a cubin, the disk cache keeps it, the driver launches it.

A source file includes only headers of its own folder or of this one (`row.cuh`, `hopper.cuh`), so neither nvcc nor
CUDA's or PyTorch's headers are needed; sizes that must be constants (threads, vectors a thread, cluster)
come as `-D` definitions:

    forward = kernel(HERE / "cuda.cu", "forward", "PPqq", device=0, threads=512, definitions=(("THREADS", 512),))
    forward((rows,), x.data_ptr(), y.data_ptr(), rows, columns)

`cuda.bindings` (which PyTorch's CUDA builds bring) is imported when something is compiled or launched.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.hardware.architectures import DeviceLimits, architecture, limits_of
from tilewright.records import cache
from tilewright.records.errors import CacheError, CompilerError, warn_once

Definitions = tuple[tuple[str, int | str], ...]
HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@functools.cache
def bindings_installed() -> bool:
    """Whether the package `cuda-bindings` is installed."""
    return bool(importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings"))


def available(device: int) -> bool:
    """Whether CUDA C++ can be built for device number `device`: `cuda.bindings` is there, clusters too."""
    return bindings_installed() and _limits(device).max_cluster > 1


def _limits(device: int) -> DeviceLimits:
    import torch

    return limits_of(torch.device("cuda", device))


class Kernel:
    """One entry point, loaded on one device. Calling it launches it on that device's current stream.

    `signature` has one letter of Python's `struct` for each parameter: P pointer, q 64-bit, i 32-bit
    integer, f float. The device must be the current one. Nothing is allocated and nothing waits, so a
    launch can be captured in a CUDA graph.
    """

    def __init__(
        self, function: Any, signature: str, device: int, threads: int, shared_bytes: int, cluster: int
    ) -> None:
        self.function = function
        self.cluster = cluster
        self.device = device
        self.threads = threads
        self.shared_bytes = shared_bytes
        self._packed = struct.Struct(signature)
        self.signature = signature
        # Autograd launches from threads of its own while the caller's thread goes on.
        self._buffers = threading.local()

    def __call__(self, grid: tuple[int, ...], *arguments: float) -> None:
        """Launch `grid` blocks (x, y, z; missing ones are 1); CompilerError where the driver refuses."""
        x, y, z = (*grid, 1, 1)[:3]
        if x * y * z == 0:
            return
        try:
            buffer, pointers = self._buffers.both
        except AttributeError:
            buffer, pointers = self._buffers.both = self._buffer()
        self._packed.pack_into(buffer, 0, *arguments)
        self.launch(x, y, z, _stream_of()(self.device), ctypes.addressof(pointers))

    def registers(self) -> int:
        """Registers a thread takes."""
        return self._attribute("CU_FUNC_ATTRIBUTE_NUM_REGS")

    def local_bytes(self) -> int:
        """Bytes a thread keeps in local memory: spilled registers and arrays indexed at run time."""
        return self._attribute("CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES")

    def blocks_per_multiprocessor(self) -> int:
        """Blocks that one multiprocessor holds at once."""
        driver = _driver()
        count: int = _checked(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, self.threads, self.shared_bytes)
        )
        return count

    def programs_at_once(self) -> int:
        """Clusters (blocks, where the cluster is one) that the whole device holds at once.

        A cluster lies within one group of multiprocessors, so there may be fewer than their number says.
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

    def _attribute(self, name: str) -> int:
        driver = _driver()
        value: int = _checked(driver.cuFuncGetAttribute(getattr(driver.CUfunction_attribute, name), self.function))
        return value

    def _buffer(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_void_p]]:
        """Room for the arguments, and the array of their addresses that the driver reads."""
        buffer = ctypes.create_string_buffer(self._packed.size)
        start = ctypes.addressof(buffer)
        ends = [struct.calcsize(self.signature[: i + 1]) for i in range(len(self.signature))]
        addresses = [start + end - struct.calcsize(letter) for end, letter in zip(ends, self.signature, strict=True)]
        return buffer, (ctypes.c_void_p * len(addresses))(*addresses)

    def launch(self, x: int, y: int, z: int, stream: int, pointers: int) -> None:
        """Launch x by y by z blocks with arguments that lie where the array at `pointers` says."""
        driver = _driver()
        launch = driver.cuLaunchKernel
        rest = self.threads, 1, 1, self.shared_bytes, stream, pointers, 0
        (result,) = launch(self.function, x, y, z, *rest)
        if result == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread that has done nothing on the device yet.
            make_current(self.device)
            (result,) = launch(self.function, x, y, z, *rest)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise CompilerError(
                f"the driver refuses a launch of {x}x{y}x{z} blocks of {self.threads} threads with "
                f"{self.shared_bytes} bytes of shared memory: {result.name}"
            )


@functools.cache
def kernel(
    source: Path,
    entry: str,
    signature: str,
    *,
    device: int,
    threads: int,
    shared_bytes: int = 0,
    cluster: int = 1,
    definitions: Definitions = (),
) -> Kernel:
    """The kernel `entry` (extern "C") of the file `source`, compiled for device number `device` and loaded.

    `threads` is the block, `shared_bytes` its dynamic shared memory, `cluster` what the source names in
    `__cluster_dims__`. CompilerError carries the compiler's words or the driver's.
    """
    code = cubin(source, architecture(_limits(device).capability).target, definitions)
    return loaded(code, entry, signature, device=device, threads=threads, shared_bytes=shared_bytes, cluster=cluster)


def loaded(
    code: bytes, entry: str, signature: str, *, device: int, threads: int, shared_bytes: int, cluster: int = 1
) -> Kernel:
    """The kernel `entry` of machine code that some compiler made, for device number `device`."""
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
    return Kernel(function, signature, device, threads, shared_bytes, cluster)


def stream(device: int) -> int:
    """Handle of the current stream of device number `device`."""
    return _stream_of()(device)


def cubin(source: Path, architecture: str, definitions: Definitions = ()) -> bytes:
    """Machine code of `source` for `architecture` (`sm_90a`), from the cache or compiled now. Needs no GPU."""
    options = (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in definitions),
    )
    text = source.read_text()
    headers = _headers(text, source.parent)
    key = cache.key_of(text, *(part for header in headers.items() for part in header), *options, _version())

    def compiled() -> bytes:
        return _compile(source.name, text, headers, options)

    try:
        return cache.build_with_digest(key, ".cubin", lambda out: out.write_bytes(compiled())).read_bytes()
    except CacheError as error:
        warn_once(f"kernels are compiled for this process alone: {error}")
        return compiled()


def _headers(text: str, folder: Path) -> dict[str, str]:
    """The headers that a source of `folder` includes, and those they include, by name: its own or the room's."""
    found: dict[str, str] = {}
    wanted = _INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in found:
            path = next((path for path in (folder / name, HERE / name) if path.exists()), None)
            if path is None:
                raise CompilerError(f"no header {name} in {folder} or {HERE}")
            found[name] = path.read_text()
            wanted += _INCLUDE.findall(found[name])
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
def _version() -> str:
    try:
        return "NVRTC " + ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))
    except RuntimeError as error:  # the library is looked for at the first call
        raise CompilerError(f"NVRTC does not load: {error}; pip install nvidia-cuda-nvrtc") from error


@functools.cache
def _nvrtc() -> Any:
    return _bindings("nvrtc")


@functools.cache
def _stream_of() -> Callable[[int], int]:
    """The current stream of a device by its number, as Triton asks for it: an object of PyTorch's takes 1.6 µs."""
    from triton.runtime import driver

    current: Callable[[int], int] = driver.active.get_current_stream
    return current


@functools.cache
def _driver() -> Any:
    return _bindings("driver")


def _bindings(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise CompilerError(f"CUDA C++ needs the package cuda-bindings: {error}; pip install cuda-bindings") from error


def cuda_function(name: str) -> int:
    """The address of a function of CUDA's driver, for C++ that calls it. Raises CompilerError where it is missing."""
    return _address("libcuda.so.1", name)


def stream_function() -> int:
    """The address of `int f(int32_t device, void **stream)`, PyTorch's current stream; raises CompilerError."""
    import torch

    library = Path(torch.__file__).parent / "lib/libtorch_cuda.so"
    return _address(str(library), "aoti_torch_get_current_cuda_stream")


@functools.cache
def _address(library: str, name: str) -> int:
    try:
        function = getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError) as error:
        raise CompilerError(f"{library} has no {name}: {error}") from error
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def primary_context(device: int) -> int:
    """Handle of the context that everybody in this process shares on device number `device`."""
    return int(_primary(device))


def make_current(device: int) -> None:
    """Give this thread the context that everybody in this process shares on device number `device`."""
    _checked(_driver().cuCtxSetCurrent(_primary(device)))


def _primary(device: int) -> Any:
    driver = _driver()
    return _checked(driver.cuDevicePrimaryCtxRetain(_checked(driver.cuDeviceGet(device))))


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's returned beside its status: nothing, one value, or a tuple."""
    status, *values = answer
    if status.value != 0:
        raise CompilerError(f"CUDA answered {status.name}")
    return values[0] if len(values) == 1 else tuple(values)
