"""How a Hopper kernel in Gluon is compiled and loaded."""

from __future__ import annotations

import functools
from typing import Any

from tilewright.kernels.attention.hopper.tiles import Tiles
from tilewright.launch import nvrtc

BOX_COLUMNS = 64
"""Columns that one bulk copy moves: 128 bytes, the widest swizzle."""
SIGNATURE = "iiiiqqqq" * 4 + "PPff" + "i" * 8 + "PP"
"""Parameters of the forward beside its tensor maps: shapes and strides of q, k, v and out, lse, table of tiles, scales,
the counts of a plan, and scratch of Triton's own, which the kernel does not use."""


def compiled(tiles: Tiles) -> Any:
    """The kernel that `tiles` describe, compiled by Triton for compute capability 9.0. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewright.kernels.attention.hopper.forward_kernel import forward

    name, element = ("fp16", gl.float16) if tiles.half else ("bf16", gl.bfloat16)

    def described(rows: int) -> str:
        block = [1, 1, rows, tiles.head_size]
        return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, element)!r}>"

    signature = dict.fromkeys(forward.arg_names, "i32")
    signature |= {"q": described(64), "o": described(64), "k": described(tiles.block), "v": described(tiles.block)}
    signature |= {"lse": "*fp32", "schedule": "*i32", "scale": "fp32", "tanh_scale": "fp32", "TILES": "constexpr"}
    # Eight warps, of which four multiply: half of a multiprocessor's registers leaves room for a second program.
    options = {"num_warps": 4, "maxnreg": 128 if tiles.programs_per_multiprocessor > 1 else None}
    source = GluonASTSource(forward, signature, {(forward.arg_names.index("TILES"),): tiles}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@functools.cache
def built(tiles: Tiles, device: int) -> nvrtc.Kernel:
    """The kernel that `tiles` describe, compiled and loaded on device number `device`."""
    made = compiled(tiles)
    meta = made.metadata
    return nvrtc.loaded(
        made.asm["cubin"], meta.name, SIGNATURE, device=device, threads=32 * meta.num_warps, shared_bytes=meta.shared
    )
