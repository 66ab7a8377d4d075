"""Generated kernels compiled for an H200, without one; run as a script.

With lengths of rows: prints, as JSON, the registers and the bytes spilled of each kernel of the golden nests. With
`operators`: prints the errors of kernels that do not compile, of all samples of operators, and for an AMD GPU of one
sample for each function that kernels call. With `architectures`: prints how many kernels of the golden nests became
machine code of each. Compiling needs Triton without its interpreter, whatever the tests around it use.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError
from triton.compiler.compiler import make_backend
from triton.runtime.driver import driver

from tests.emit.triton_programs import golden, nests_of, operator_calls
from tilewright.anatomy.simulated import CompileDriver
from tilewright.emit.triton import emit_triton
from tilewright.emit.triton_step import in_memory
from tilewright.hardware.assembly import resources
from tilewright.hardware.target import target_named
from tilewright.launch.generated import TritonKernel
from tilewright.loops.nest import Nest
from tilewright.passes.fusion import fuse
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
    """The nests of all samples of operators."""
    for region in fuse(operator_calls(torch.device("cpu")).graph, "forward", target_named("cpu")).regions:
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
    """How many kernels each architecture has machine code of."""
    found: Counter[str] = Counter()
    for source, warps in (kernel for nest in nests for kernel in sources(nest)):
        for capability in ARCHITECTURES:
            driver.set_active(CompileDriver(capability))
            code = triton.compile(source, options={"num_warps": warps}).asm
            found[capability] += bool(code.get("cubin") or code.get("hsaco"))
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["operators"]:
        nests = list(operators())
        for nest in nests:
            errors = (error_of(*kernel) for kernel in sources(nest))
            print(json.dumps([error for error in errors if error]))
        driver.set_active(CompileDriver(MI300X.arch))
        for nest in calling(nests):
            errors = (error_of(*kernel, MI300X) for kernel in sources(nest))
            print(json.dumps([error for error in errors if error]))
    elif sys.argv[1:] == ["architectures"]:
        print(json.dumps(kernels_of_architectures(golden_nests(1000))))
    else:
        for columns in map(int, sys.argv[1:]):
            for nest in golden_nests(columns):
                print(json.dumps(compiled(nest)))
