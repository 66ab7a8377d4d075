"""Generated kernels compiled for GPUs that are not there. Needs Triton without its interpreter."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from unittest import mock

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from tests.emit.triton_programs import golden, nests_of, operator_calls, regions_of
from tilewright.anatomy.simulated import CompileDriver
from tilewright.emit.triton import emit_triton
from tilewright.emit.triton_step import in_memory
from tilewright.hardware.assembly import resources
from tilewright.launch.generated import TritonKernel
from tilewright.loops.nest import Nest
from tilewright.schedule.choose import schedule_of
from tilewright.schedule.tiles import Limits

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "float64": "*fp64", "bool": "*i1",
            "int64": "*i64", "int32": "*i32", "int16": "*i16", "int8": "*i8", "uint8": "*u8"}  # fmt: skip
H200 = GPUTarget("cuda", 90, 32)
MI300X = GPUTarget("hip", "gfx942", 64)
MULTIPROCESSORS = 132
ARCHITECTURES = ("8.0", "10.0", "12.0", "gfx90a", "gfx942", "gfx950")
CALLED = re.compile(r"\b(?:tl|tw|libdevice)\.\w+")


def usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of its stack, read from the machine code."""
    (taken,) = resources(cubin).values()
    return {"registers": taken.registers, "spilled": taken.stack_bytes}


def sources(nest: Nest) -> Iterator[tuple[ASTSource, int]]:
    """Each of the nest's kernels and its number of warps, as launched on an H200."""
    kernel, chosen = TritonKernel(nest, emit_triton(nest)), schedule_of(nest, Limits(MULTIPROCESSORS))
    dtypes = [b.dtype for b in nest.buffers] + [dtype for _, dtype in chosen.scratch]
    for function, sizes, warps in (
        (kernel.main, chosen.sizes, chosen.warps),
        (kernel.after, chosen.combining_sizes, 4),
    ):
        if function is None:
            continue
        names = function.arg_names
        constants = {name: size for name, size in sizes.items() if name in names}
        numbers = ["count", *(f"skip{number}" for number in range(nest.numbers))]
        pointers = [name for name in names if name not in constants and name not in numbers]
        signature = {name: POINTERS[in_memory(d)] for name, d in zip(pointers, dtypes, strict=True)}
        signature |= dict.fromkeys(numbers, "i64") | {"count": "i32"} | dict.fromkeys(constants, "constexpr")
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
        yield ASTSource(function, signature, constants, aligned), warps


def compiled(nest: Nest) -> dict[str, dict[str, int]]:
    """The resources of each of the nest's kernels."""
    return {
        source.fn.__name__: usage(triton.compile(source, target=H200, options={"num_warps": warps}).asm["cubin"])
        for source, warps in sources(nest)
    }


def error_of(source: ASTSource, warps: int, target: GPUTarget = H200) -> str | None:
    """The error of Triton's front end, which checks types and shapes, for a kernel; else None."""
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    options = backend.parse_options({"num_warps": warps})
    try:
        source.make_ir(target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context)
    except CompilationError as error:
        return str(error)
    return None


def operators() -> Iterator[Nest]:
    """The nests of half of the samples of operators: of those that Triton's interpreter does not run."""
    calls = operator_calls(torch.device("cpu"), every=2, part=1)
    for region in regions_of(calls.graph):
        yield region.lowered.nest


def golden_nests(columns: int) -> Iterator[Nest]:
    for function, inputs in golden(4096, columns).values():
        for lowered in nests_of(function, *inputs):
            yield lowered.nest


def calling(nests: Iterable[Nest]) -> Iterator[Nest]:
    """Those that call a function which no nest before them calls."""
    known: set[str] = set()
    for nest in nests:
        new = set(CALLED.findall(emit_triton(nest))) - known
        if new:
            known |= new
            yield nest


def kernels_of_architectures(nests: Iterable[Nest]) -> dict[str, int]:
    """How many kernels each architecture has machine code of; each kernel is compiled for one of them."""
    found: Counter[str] = Counter()
    for number, (source, warps) in enumerate(kernel for nest in nests for kernel in sources(nest)):
        capability = ARCHITECTURES[number % len(ARCHITECTURES)]
        with mock.patch.object(driver, "_active", CompileDriver(capability)):
            code = triton.compile(source, options={"num_warps": warps}).asm
        found[capability] += bool(code.get("cubin") or code.get("hsaco"))
    return found


def errors() -> list[list[str]]:
    """The errors of each nest's kernels for an H200, and of some for an AMD GPU."""
    nests = list(operators())
    found = [[error for kernel in sources(nest) if (error := error_of(*kernel))] for nest in nests]
    with mock.patch.object(driver, "_active", CompileDriver(MI300X.arch)):
        for nest in calling(nests):
            found.append([error for kernel in sources(nest) if (error := error_of(*kernel, MI300X))])
    return found


def moments(x: Tensor, bias: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    wide = (x + bias.view(-1, 1, 1, 1)).double()
    mean = wide.sum((2, 3, 4)) / 262144
    var = (wide * wide).sum((2, 3, 4)) / 262144 - mean * mean
    rstd = (var.clamp_min(0) + 1e-5).rsqrt().float()
    return rstd, mean.float(), rstd * weight


def moments_of_images() -> Iterator[Nest]:
    x = torch.empty(2, 32, 64, 64, 64, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last_3d)
    weight = torch.empty(32, dtype=torch.bfloat16)
    for lowered in nests_of(moments, x, weight, weight):
        yield lowered.nest


def conversions(columns: int) -> int:
    """Changes of layout in the loop of a layer norm's gradient."""
    function, inputs = golden(2**18, columns)["layer_norm_backward"]
    (lowered,) = nests_of(function, *inputs)
    source, warps = next(sources(lowered.nest))
    text = triton.compile(source, target=H200, options={"num_warps": warps}).asm["ttgir"]
    return text[text.index("scf.for") : text.index("scf.yield")].count("convert_layout")
