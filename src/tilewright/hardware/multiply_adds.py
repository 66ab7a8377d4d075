"""How fast the multiprocessors of a GPU multiply and add fp32 outside matrix units; needs Triton and a CUDA device.

Every thread keeps chains of dependent multiply-adds in registers, enough to hide the latency of each, and accesses
memory once. `tests/gpu/test_ceilings.py` holds the result against the clock.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tilewright.hardware.architectures import limits_of

WARPS = 8
CHAINS = 8
"""Chains of a thread."""
PROGRAMS_PER_SM = 4
STEPS = 32
"""Unrolled steps of each chain, so that the loop costs little."""
FEW, MANY = 256, 1024
"""Turns of that loop."""


@triton.jit
def chains(out, factor, term, turns, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x ← x · factor + term, `turns` × STEPS times for each x of `out` fp32[programs × BLOCK], which starts as its
    index in the block."""
    lane = tl.arange(0, BLOCK)
    x = lane.to(tl.float32)
    for _ in range(turns):
        for _step in tl.static_range(STEPS):
            x = tl.fma(x, factor, term)
    tl.store(out + tl.program_id(0) * BLOCK + lane, x)


def multiply_adder(device: torch.device) -> tuple[Callable[[int], object], int]:
    """A call that runs `turns` turns on every multiprocessor, and the FLOPs of one turn."""
    programs = PROGRAMS_PER_SM * limits_of(device).multiprocessors
    block = 32 * WARPS * CHAINS
    out = torch.empty(programs * block, device=device)

    def run(turns: int) -> object:
        with torch.cuda.device(device):
            # x, 1.5 - x, x again: bits change in every step, and nothing overflows or settles.
            return chains[(programs,)](out, -1.0, 1.5, turns, block, STEPS, num_warps=WARPS)

    return run, 2 * programs * block * STEPS
