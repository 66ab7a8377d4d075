"""Prints, as JSON, what each kernel of the golden nests takes of an H200: registers and bytes spilled.

Run as a script, with the lengths of the rows: compiling needs Triton without its interpreter, whatever
the tests around it use.
"""

from __future__ import annotations

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.emit.triton_programs import golden, nests_of
from tilewright.emit.triton import emit_triton
from tilewright.hardware.assembly import resources
from tilewright.loops.nest import Nest
from tilewright.runtime.blocking import plan
from tilewright.runtime.gpu import TritonKernel

POINTERS = {"bfloat16": "*bf16", "float32": "*fp32", "float64": "*fp64", "bool": "*i1", "int64": "*i64"}
H200 = GPUTarget("cuda", 90, 32)
MULTIPROCESSORS = 132


def usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of its stack, read from the machine code."""
    (taken,) = resources(cubin).values()
    return {"registers": taken.registers, "spilled": taken.stack_bytes}


def compiled(nest: Nest) -> dict[str, dict[str, int]]:
    """What each of the nest's kernels takes, launched as on an H200."""
    kernel, chosen = TritonKernel(nest, emit_triton(nest)), plan(nest, MULTIPROCESSORS)
    dtypes = [b.dtype for b in nest.buffers] + [dtype for _, dtype in chosen.scratch]
    taken = {}
    for function, sizes, warps in ((kernel.main, chosen.sizes, chosen.warps), (kernel.after, chosen.after_sizes, 4)):
        if function is None:
            continue
        names = function.arg_names
        constants = {name: size for name, size in (sizes or {}).items() if name in names}
        numbers = [f"skip{number}" for number in range(nest.numbers)]
        pointers = [name for name in names if name not in constants and name not in numbers]
        signature = {name: POINTERS[d] for name, d in zip(pointers, dtypes, strict=True)}
        signature |= dict.fromkeys(numbers, "i64") | dict.fromkeys(constants, "constexpr")
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
        source = ASTSource(function, signature, constants, aligned)
        code = triton.compile(source, target=H200, options={"num_warps": warps})
        taken[function.__name__] = usage(code.asm["cubin"])
    return taken


if __name__ == "__main__":
    for columns in map(int, sys.argv[1:]):
        for function, inputs in golden(4096, columns).values():
            for lowered in nests_of(function, *inputs):
                print(json.dumps(compiled(lowered.nest)))
