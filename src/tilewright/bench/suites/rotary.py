"""The suite `rotary`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.bench.peers import generated, inductor, library
from tilewright.bench.workloads import Draw, workloads
from tilewright.kernels.rotary import reference, rotary
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work


def _operands(draw: Draw, batch: int, length: int, q_heads: int, k_heads: int, width: int) -> tuple[torch.Tensor, ...]:
    """Heads lie beside each other in memory."""
    q, k = (draw(batch, length, heads, width).detach().transpose(1, 2) for heads in (q_heads, k_heads))
    angles = torch.rand(length, width // 2, device=draw.device, generator=draw.generator) * 6.2832
    return q.requires_grad_(), k.requires_grad_(), angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def _work(itemsize: int, batch: int, length: int, q_heads: int, k_heads: int, width: int) -> dict[Direction, Work]:
    moved = 2 * batch * length * (q_heads + k_heads) * width * itemsize + length * width * itemsize
    return {"fwd": Work(moved), "bwd": Work(moved)}


def _name(batch: int, length: int, q_heads: int, k_heads: int, width: int) -> str:
    return f"B{batch} S{length} H{q_heads}/{k_heads} d{width}"


def _liger(found: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    # It rotates q and k in place, and takes each angle twice.
    whole = (table.repeat(1, 2)[None] for table in (cos, sin))
    return found.apply(q.clone(), k.clone(), *whole)


SUITES = {
    "rotary": Suite(
        name="rotary",
        summary="pairs of q and k rotated by their positions' angles",
        reference=reference.rotary,
        workload=workloads(_operands, _work, _name),
        variants=(
            Variant("tilewright", "triton", rotary, "memory"),
            Variant("eager", "torch", reference.rotary, "memory, fourteen kernels"),
            generated(reference.rotary, note="memory"),
            inductor(reference.rotary, note="memory"),
            library(
                "liger",
                "liger_kernel.ops.rope:LigerRopeFunction",
                _liger,
                note="rotates q and k in place; the copies it needs count",
            ),
        ),
        sizes=((8, 4096, 32, 8, 128), (16, 4096, 32, 32, 64)),
    )
}
