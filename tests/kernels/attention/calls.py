"""Calls of attention that hurt, and what each must give: the numbers contract against float64."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernels import philox
from tilewright.kernels.attention import attention, reference
from tilewright.kernels.attention.registered import attend
from tilewright.measure.truth.contract import compare
from tilewright.records.measurement import Verified

Implementation = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""Called as `attention` with `return_lse`."""


@dataclass(frozen=True)
class Call:
    """Sizes and options; `mask` and `slopes` say which are drawn, `layout` how q, k and v lie in memory."""

    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    queries: int = 33
    keys: int = 50
    head_size: int = 16
    value_size: int = 0
    """As `head_size` where 0."""
    dtype: torch.dtype = torch.bfloat16
    mask: str = ""
    """`boolean`, `additive`, `keys` (boolean, of keys alone), `rows` (some queries see nothing)."""
    slopes: bool = False
    layout: str = "heads"
    """`heads`: [B, H, S, D]; `positions`: [B, S, H, D]; `misaligned`: begins at an odd element; `last`: D first;
    `repeated`: one head of k and v seen as several."""
    outliers: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [f"B{self.batch} H{self.heads}/{self.kv_heads} S{self.queries}x{self.keys} d{self.head_size}"]
        parts += [f"v{self.value_size}"] if self.value_size else []
        parts += [str(self.dtype).removeprefix("torch."), self.mask, "alibi" if self.slopes else "", self.layout]
        parts += ["outliers" if self.outliers else "", *(f"{name}={value}" for name, value in self.options.items())]
        return " ".join(part for part in parts if part)

    def inputs(self, device: torch.device, seed: int = 0) -> tuple[list[torch.Tensor], dict[str, Any]]:
        """Fresh q, k and v, which require a gradient, and the options with their tensors."""
        generator = torch.Generator(device).manual_seed(seed)
        value_size = self.value_size or self.head_size
        shapes = [
            (self.batch, self.heads, self.queries, self.head_size),
            (self.batch, self.kv_heads, self.keys, self.head_size),
            (self.batch, self.kv_heads, self.keys, value_size),
        ]
        tensors = [self._laid(shape, device, generator).requires_grad_() for shape in shapes]
        if self.layout == "repeated":
            tensors[1:] = [x.detach()[:, :1].expand(x.shape).requires_grad_() for x in tensors[1:]]
        options = dict(self.options)
        scores = (self.batch, self.heads, self.queries, self.keys)
        if self.mask == "additive":
            options["mask"] = torch.randn(scores[1:], device=device, generator=generator).to(self.dtype)
        elif self.mask:
            shape = {"boolean": scores, "keys": (self.batch, 1, 1, self.keys), "rows": (self.queries, 1)}[self.mask]
            options["mask"] = torch.rand(shape, device=device, generator=generator) < 0.6
        if self.slopes:
            options["alibi_slopes"] = torch.rand(self.heads, device=device, generator=generator)
        return tensors, options

    def _laid(self, shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> torch.Tensor:
        batch, heads, places, width = shape
        values = torch.randn(shape, device=device, generator=generator)
        if self.outliers and values.numel():
            values.view(-1)[:: 1 + values.numel() // 7] *= 30.0
        values = values.to(self.dtype)
        if self.layout == "positions":
            return values.new_empty(batch, places, heads, width).transpose(1, 2).copy_(values)
        if self.layout == "misaligned":
            return values.new_empty(values.numel() + 1)[1:].view(shape).copy_(values)
        if self.layout == "last":
            return values.new_empty(batch, heads, width, places).mT.copy_(values)
        return values


def judged(call: Call, device: torch.device, seed: int = 0, impl: Implementation = attention) -> list[Verified]:
    """One row for the output, the log-sum-exp and each gradient of `call` on `device`."""
    tensors, options = call.inputs(device, seed)
    kept = None
    generator = torch.cuda if device.type == "cuda" else torch
    generator.manual_seed(seed + 7)
    if options.get("dropout_p"):
        kept = drawn(call, device, seed + 7)
        generator.manual_seed(seed + 7)
    out, lse = impl(*tensors, return_lse=True, **options)
    draw = torch.Generator(device).manual_seed(seed + 1)
    dout = torch.randn(out.shape, device=device, generator=draw).to(call.dtype)
    ours = [out, lse, *torch.autograd.grad(out, tensors, dout)]
    eager = _reference(tensors, options, kept, dout)
    true = _reference([x.detach().double().requires_grad_() for x in tensors], options, kept, dout.double())
    # Eager's own log-sum-exp has the inputs' precision; ours is fp32 from sums in fp32.
    wide = [x.detach().float().requires_grad_() for x in tensors]
    eager[1] = _reference(wide, options, kept, dout.float())[1]
    names = ("out", "lse", "dq", "dk", "dv")
    return [
        compare(mine.detach(), plain.detach(), truth.detach(), tensor=name)
        for mine, plain, truth, name in zip(ours, eager, true, names, strict=True)
    ]


def _reference(
    tensors: Sequence[torch.Tensor], options: dict[str, Any], kept: torch.Tensor | None, dout: torch.Tensor
) -> list[torch.Tensor]:
    options = {name: value for name, value in options.items() if name != "deterministic"}
    out, lse = reference.attention(*tensors, kept=kept, **options)
    return [out, lse, *torch.autograd.grad(out, tensors, dout)]


def drawn(call: Call, device: torch.device, seed: int) -> torch.Tensor:
    """The dropout mask [B, H, Sq, Sk] of a call whose generator was just seeded, number by number."""
    if device.type == "cuda":
        offset = 0
    else:
        generator = torch.Generator().manual_seed(seed)
        seed, offset = int(torch.randint(2**63 - 1, (2,), generator=generator)[0]), 0
    key = (seed & philox.WORD, seed >> 32 & philox.WORD)
    rows = call.batch * call.heads * call.queries
    kept = [
        philox.keeps(word, call.options["dropout_p"])
        for row, turn in itertools.product(range(rows), range(-(-call.keys // 4)))
        for word in philox.philox((offset // 4 + turn, 0, row, 0), key)
    ]
    shape = (call.batch, call.heads, call.queries)
    return torch.tensor(kept, dtype=torch.bool, device=device).view(*shape, -1)[..., : call.keys]


def wrong(call: Call, device: torch.device, seed: int = 0, impl: Implementation = attention) -> list[Verified]:
    """The rows of `judged` that break the contract."""
    return [row for row in judged(call, device, seed, impl) if not row.ok]


def wrong_packed(
    lengths: tuple[Sequence[int], Sequence[int]], widths: tuple[int, int], dtype: torch.dtype, device: torch.device,
    **options: Any,
) -> list[Verified]:  # fmt: skip
    """Violations of the contract for packed sequences of these (queries, keys)."""
    starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device) for n in lengths]
    queries, keys = (sum(n) for n in lengths)
    draw = torch.Generator(device).manual_seed(0)
    sizes = (queries, 4, widths[0]), (keys, 2, widths[0]), (keys, 2, widths[1])
    tensors = [torch.randn(size, device=device, generator=draw).to(dtype) for size in sizes]

    def ours(*given: torch.Tensor, **options: Any) -> Any:
        return attention(*given[:3], cu_seqlens_q=starts[0], cu_seqlens_k=starts[1], return_lse=True, **options)

    results = []
    for impl, kind in ((ours, dtype), (by_sequence, dtype), (by_sequence, torch.float64)):
        inputs = [x.to(kind).requires_grad_() for x in tensors]
        out, lse = impl(*inputs, *([] if impl is ours else starts), **options)
        dout = torch.randn(out.shape, device=device, generator=torch.Generator(device).manual_seed(1)).to(dtype)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype)), lse.detach()])
    torch.testing.assert_close(results[0].pop().double(), results[2].pop(), rtol=1e-5, atol=1e-5)
    rows = [compare(*three, tensor=name) for name, *three in zip(("out", "dq", "dk", "dv"), *results, strict=False)]
    return [row for row in rows if not row.ok]


def portable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, return_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` by the kernels for any GPU, wherever it is called."""
    scale, right = q.shape[3] ** -0.5, 0 if causal else None
    out, lse, *_ = attend(q, k, v, *[None] * 4, scale, None, right, 0.0, 0.0, 0, 0, False, "triton")
    return out, lse


def by_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts_q: torch.Tensor, starts_k: torch.Tensor, **options: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Tq, H, D], k and v [Tk, heads, ...]: `attention` of each sequence alone; out [Tq, H, Dv], lse [H, Tq]."""
    outs, sums = [], []
    bounds = zip(*(x.tolist() for x in (starts_q[:-1], starts_q[1:], starts_k[:-1], starts_k[1:])), strict=True)
    for q0, q1, k0, k1 in bounds:
        one = (x[a:b].transpose(0, 1)[None] for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        out, lse = reference.attention(*one, **options)  # type: ignore[arg-type]
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0])
    return torch.cat(outs), torch.cat(sums, -1)
