"""A first softmax in Triton; programs that report their multiprocessor, and programs that all take the same time."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _softmax(x, y, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.program_id(0) * columns
    value = tl.load(x + row + at, at < columns, other=float("-inf"))
    numerator = tl.exp(value - tl.max(value, 0))
    tl.store(y + row + at, numerator / tl.sum(numerator, 0), at < columns)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over rows of x [N, M], contiguous, on a GPU: a program a row, by Triton's own launcher."""
    # A recording prices what it captures, and a bare Triton kernel has no price.
    torch._dynamo.graph_break()
    y = torch.empty_like(x)
    _softmax[(len(x),)](x, y, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=8)
    return y


@triton.jit
def _report(out, steps):
    program = tl.program_id(0)
    began = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    total = 0.0
    # Long enough for all programs to be dealt before the first ends.
    for step in range(steps):
        total = total * 0.5 + step
    ended = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.store(out + program, tl.where((total >= 0) & (began == ended), began, -1))


def multiprocessors(programs: int) -> list[int]:
    """The multiprocessor of each program, on a GPU; -1 for one that changed it."""
    out = torch.empty(programs, dtype=torch.int32, device="cuda")
    _report[(programs,)](out, 20_000, num_warps=1)
    return [int(it) for it in out.tolist()]


def spin(out: torch.Tensor, programs: int, warps: int) -> None:
    """`programs` of `warps` warps each that only compute; `out` int32[programs]."""
    _report[(programs,)](out, 2_000, num_warps=warps)
