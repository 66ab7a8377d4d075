"""Attention as two products and a softmax: the scores are in memory, and the products run on fast matrix units.

    out, … = _scaled_dot_product_efficient_attention(q, k, v, …)    →   out = softmax(q kᵀ · scale, -1) v

No fused kernel takes fp32 near the rate of `tilewright::product`, which multiplies it in parts of bf16, nor heads of
more than 256 columns. At inference only (`FusedAttention.writes_scores`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import tilewright.kernels.product  # noqa: F401, it defines the operator
from tilewright.cost.kinds import kind_name
from tilewright.cost.products import in_parts
from tilewright.cost.work import Product, Work
from tilewright.graph import calls
from tilewright.hardware.target import Target
from tilewright.kernels.product.cuda import VECTOR
from tilewright.launch.nvrtc import bindings_installed
from tilewright.passes.attention.library import Peer, Perform, Saved
from tilewright.pytorch.state import float32_precision

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

aten = torch.ops.aten


@dataclass(frozen=True)
class WrittenOut(Peer):
    """Its two products and the softmax between them, in place of one kernel."""

    def attend(self, perform: Perform, options: Mapping[str, Any]) -> Saved:
        def one(operator: Any, *args: Any, **kwargs: Any) -> Any:
            return perform(operator, None, *args, **kwargs)[0]

        def matrices(x: Any) -> Any:
            batch, heads, *matrix = _tensor(x).shape
            if batch > 1 and heads > 1 and _tensor(x).stride(0) != heads * _tensor(x).stride(1):
                x = one(aten.clone.default, x, memory_format=torch.contiguous_format)
            return one(aten.view.default, x, [batch * heads, *matrix])

        product = torch.ops.tilewright.product.default
        q, k, v = (options[name] for name in ("query", "key", "value"))
        scores = one(product, matrices(q), one(aten.transpose.int, matrices(k), 1, 2), None)
        scores = one(aten.mul.Tensor, scores, options["scale"])
        if options["is_causal"]:
            rows, columns = (one(aten.arange.default, n, device=_tensor(q).device) for n in [_tensor(q).shape[2]] * 2)
            later = one(aten.lt.Tensor, one(aten.unsqueeze.default, rows, 1), columns)
            scores = one(aten.masked_fill.Scalar, scores, later, -math.inf)
        if (mask := options["attn_mask"]) is None:
            weights = one(aten._softmax.default, scores, -1, False)
        else:
            scores = one(aten.view.default, scores, [*_tensor(q).shape[:3], _tensor(k).shape[2]])
            if _tensor(mask).dtype == torch.bool:
                scores = one(aten.masked_fill.Scalar, scores, one(aten.logical_not.default, mask), -math.inf)
            else:
                scores = one(aten.add.Tensor, scores, mask)
            # A query that sees no key gets zeros, as from PyTorch's kernels.
            weights = matrices(one(aten._safe_softmax.default, scores, -1))
        out = one(product, weights, matrices(v), None)
        return Saved(one(aten.view.default, out, [*_tensor(q).shape[:3], _tensor(v).shape[3]]), None, None, None)

    def refuses(self, request: Request, target: Target) -> str | None:
        reasons = {
            "its products take the matrix instructions of a warpgroup (wgmma)": target.has_wgmma,
            f"{request.dtype}": request.dtype == torch.float32,
            "heads share keys": request.group == 1,
            "products may round to TF32": float32_precision() == "highest",
            "the package cuda-bindings is not installed": not target.is_present or bindings_installed(),
        }
        return next((reason for reason, fits in reasons.items() if not fits), None)

    def works(self, request: Request, mask_nbytes: int) -> tuple[Work, ...]:
        """Its launches, with copies of operands whose batch and heads do not lie as one axis or whose rows do not begin
        at multiples of 16 bytes."""
        r = request
        heads = r.batch * r.heads
        operands = [(r.q_strides, r.queries, r.head_size), (r.k_strides, r.keys, r.head_size)]
        copied = [4 * heads * r.queries * r.keys * (r.keys % VECTOR > 0)]
        for strides, lines, width in [*operands, (r.v_strides, r.keys, r.value_size)]:
            lies_apart = r.batch > 1 and r.heads > 1 and strides[0] != r.heads * strides[1]
            copied.append(4 * heads * lines * width * (lies_apart + (width % VECTOR > 0)))
        scores, results = heads * r.queries * r.keys, heads * r.queries * r.value_size
        rows = kind_name(passes=3, sums_columns=False, columns=r.keys, transposes=False)
        return (
            _product((heads, r.queries, r.keys, r.head_size), heads * (r.queries + r.keys) * r.head_size, scores),
            Work(rows, 4 * scores + mask_nbytes, 4 * scores, 5 * scores, scores, programs=heads * r.queries),
            _product((heads, r.queries, r.value_size, r.keys), scores + heads * r.keys * r.value_size, results),
            *(Work("pointwise", nbytes, nbytes) for nbytes in copied if nbytes),
        )

    def apart(self, request: Request, *, hides: bool) -> tuple[Work, ...]:
        """What a race runs in kernels of its own and a program in the softmax's: the scale, and what `hides` keys."""
        nbytes = 4 * request.batch * request.heads * request.queries * request.keys
        return (Work("pointwise", nbytes, nbytes),) * (1 + hides)


def _product(product: Product, read: int, written: int) -> Work:
    """The launch of a product of fp32 that reads and writes so many elements."""
    parts = in_parts(product)
    return Work("tilewright.product", 4 * read, 4 * written, 2 * prod(parts), dtype="bfloat16", products=(parts,))


def _tensor(x: Any) -> torch.Tensor:
    found: torch.Tensor = calls.tensor(x) if isinstance(x, fx.Node) else x
    return found


WRITTEN_OUT = WrittenOut(
    "two products of fp32 and a softmax", None, None, causal_from_start=True, shares_lse=False, gives_lse=False
)
