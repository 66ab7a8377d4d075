"""Programs that report the streaming multiprocessor on which they run, and that all take the same time."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
