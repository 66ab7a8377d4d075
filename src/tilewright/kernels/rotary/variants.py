"""The suite `rotary`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.naming import SHORT
from tilewright.kernels.peers import generated, inductor, library
from tilewright.kernels.rotary import reference, rotary
from tilewright.records.suite import Suite, Variant, Work, Workload


def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
    """`sizes` is batch, positions, heads of q, heads of k, width of a head; heads lie beside each other in memory."""
    batch, length, q_heads, k_heads, width = sizes
    kind: torch.dtype = getattr(torch, dtype)

    def make(device: torch.device, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        q, k = (
            torch.randn(batch, length, heads, width, dtype=kind, device=device, generator=generator).transpose(1, 2)
            for heads in (q_heads, k_heads)
        )
        angles = torch.rand(length, width // 2, device=device, generator=generator) * 6.2832
        return q.requires_grad_(), k.requires_grad_(), angles.cos().to(kind), angles.sin().to(kind)

    moved = 2 * batch * length * (q_heads + k_heads) * width * kind.itemsize + length * width * kind.itemsize
    name = f"B{batch} S{length} H{q_heads}/{k_heads} d{width} {SHORT[dtype]}"
    return Workload(name, sizes, dtype, make, {"fwd": Work(moved), "bwd": Work(moved)})


def _liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    from liger_kernel.ops.rope import LigerRopeFunction

    # It rotates q and k in place, and takes each angle twice.
    whole = (table.repeat(1, 2)[None] for table in (cos, sin))
    return LigerRopeFunction.apply(q.clone(), k.clone(), *whole)


SUITES = {
    "rotary": Suite(
        name="rotary",
        summary="pairs of q and k rotated by their positions' angles",
        reference=reference.rotary,
        workload=workload,
        variants=(
            Variant("tilewright", "triton", rotary, "memory"),
            Variant("eager", "torch", reference.rotary, "memory, fourteen kernels"),
            generated(reference.rotary, note="memory"),
            inductor(reference.rotary, note="memory"),
            library("liger", "liger_kernel", _liger, note="rotates q and k in place; the copies it needs count"),
        ),
        sizes=((8, 4096, 32, 8, 128), (16, 4096, 32, 32, 64)),
    )
}
