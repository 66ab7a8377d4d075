"""Triton kernels compiled ahead for an H200, for what the machine code says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tests.emit.machine_code import H200, usage

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget


def compiled(
    kernel: Any, types: Mapping[str, str], constants: Mapping[str, object], aligned: Sequence[str] = (), warps: int = 4,
    stages: int = 3, target: GPUTarget = H200,
) -> Any:  # fmt: skip
    """Compiled with parameters of these Triton types; pointers and those named in `aligned` are multiples of 16."""
    import triton
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    sixteens = [n for n in names if n not in constants and (types[n].startswith("*") or n in aligned)]
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in sixteens}
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(ASTSource(kernel, signature, constants, divisible), target=target, options=options)


def spilled(code: Any) -> int:
    """Bytes of a thread's stack: registers that had no room."""
    return usage(code.asm["cubin"])["spilled"]
