"""GELU by hand, twice: in Triton (here) and in CUDA C++ (`gelu.cu`), which is built at run time.

    tilewright bench gelu
    tilewright kernel gelu 4096x4096 --impl tilewright-cuda --on h200

Both are at the limit of memory, as the kernel that tilewright generates is: the language does not matter. At full
memory speed a kernel on 16-bit numbers can issue about 45 instructions an element.

Φ(x), the normal distribution, takes an exponential and a reciprocal. With h(|x|) = Φ(-|x|) = ½ erfc(|x|/√2),

    h(s) = exp(-s²/2) · (p₁t + p₂t² + …),   t = 1 / (1 + c·s)

the form of Abramowitz & Stegun 7.1.26 with new coefficients (least relative error for 0 ≤ s ≤ 13.5, by Lawson's
reweighted least squares): five terms are within 2.9e-5 of h, for 16-bit results, nine within 1.4e-8, for fp32. The
error is relative, so it stays small for negative x, where eager's 1 + erf cancels.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED, rounded
from tilewright.kernels.device import current
from tilewright.launch import nvrtc

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256
BLOCK = 1024
"""Elements of a program in Triton."""
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "float"}
LOG2_E = tl.constexpr(1.4426950408889634)
SHORT_C = tl.constexpr(0.375)
SHORT = tl.constexpr(
    (-0.09098558280449495, 0.2010439969601445, 0.08297358984371417, 0.15792019100461738, 0.14904112091170063)
)
"""Five terms of h, the highest power first."""
LONG_C = tl.constexpr(0.21)
LONG = tl.constexpr(
    (
        -0.07203386108021945, 0.2854528429735708, -0.3341885419282241, 0.35403240737962605, -0.09724486793324155,
        0.12635479246627246, 0.06879013100622178, 0.08512939523011517, 0.08370770368776144,
    )
)  # fmt: skip
"""Nine terms of h, the highest power first."""
DENSITY = tl.constexpr(0.3989422804014327)
"""1/√(2π)"""


def gelu(x: torch.Tensor) -> torch.Tensor:
    """x·Φ(x) for x of any shape on a CUDA device, fp32, bf16 or fp16; other layouts are made contiguous.

    Raises CompilerError without the package cuda-bindings, ValueError for another device or dtype.
    """
    if not x.is_cuda or x.dtype not in ELEMENTS:
        raise ValueError(f"this GELU takes fp32, bf16 or fp16 on a CUDA device, not {x.dtype} on {x.device}")
    result: torch.Tensor = _Gelu.apply(x, _launch)
    return result


def in_triton(x: torch.Tensor) -> torch.Tensor:
    """The same in Triton, also in its interpreter."""
    result: torch.Tensor = _Gelu.apply(x, _launch_triton)
    return result


@triton.jit
def _reciprocal(x: tl.tensor) -> tl.tensor:
    """1/x to an ulp by the special-function unit; Triton's own division is eight instructions."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _exp2(x: tl.tensor) -> tl.tensor:
    """2ˣ by the special-function unit, with results below 2⁻¹²⁶ as 0: `tl.exp2` spends four more
    instructions on those."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _normal(x: tl.tensor, PRECISE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Φ(x) and exp(-x²/2)."""
    TERMS: tl.constexpr = LONG if PRECISE else SHORT
    COUNT: tl.constexpr = 9 if PRECISE else 5
    C: tl.constexpr = LONG_C if PRECISE else SHORT_C
    s = tl.abs(x)
    if PRECISE:
        # From 16 on h is 0. Newton's step would make NaN of an infinity.
        s = tl.minimum(s, 16.0)
    d = s * C + 1.0
    t = _reciprocal(d)
    if PRECISE and not INTERPRETED:
        # The instruction may be an ulp off, and h errs by four times as many as t: a step of Newton's method.
        t = tl.fma(t, tl.fma(-d, t, 1.0), t)
    p = t * TERMS[0] + TERMS[1]
    for k in tl.static_range(2, COUNT):
        p = p * t + TERMS[k]
    gauss = _exp2(x * x * (-0.5 * LOG2_E))
    h = p * t * gauss
    return tl.where(x >= 0.0, 1.0 - h, h), gauss


@triton.jit
def _gelu(x, dy, out, count, BACKWARD: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr):
    """x·Φ(x), or dy times its slope, of BLOCK neighbours."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    wide = tl.load(x + at, inside).to(tl.float32)
    phi, gauss = _normal(wide, PRECISE)
    result = wide * phi
    if BACKWARD:
        result = tl.load(dy + at, inside).to(tl.float32) * (wide * gauss * DENSITY + phi)
    tl.store(out + at, rounded(result, out.dtype.element_ty), inside)


def _launch_triton(x: torch.Tensor, dy: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        given = (x, None if dy is None else dy.contiguous(), out, x.numel())
        with current(x):
            _gelu[(triton.cdiv(x.numel(), BLOCK),)](*given, dy is not None, x.dtype == torch.float32, BLOCK)
    return out


def definitions(dtype: torch.dtype, aligned: bool, backward: bool) -> nvrtc.Definitions:
    """The macros that the source is compiled with."""
    names = ("ELEMENT", "VECTOR_ALIGNED", "BACKWARD", "THREADS")
    return tuple(zip(names, (ELEMENTS[dtype], int(aligned), int(backward), THREADS), strict=True))


def _launch(x: torch.Tensor, dy: torch.Tensor | None) -> torch.Tensor:
    x = x.contiguous()
    dy = None if dy is None else dy.contiguous()
    out = torch.empty_like(x)
    addresses = x.data_ptr(), 0 if dy is None else dy.data_ptr(), out.data_ptr()
    aligned = not any(address % 16 for address in addresses)
    lanes = 16 // x.element_size() if aligned else 1
    kernel = nvrtc.kernel(
        SOURCE,
        "gelu",
        "PPPq",
        device=x.device.index,
        threads=THREADS,
        definitions=definitions(x.dtype, aligned, dy is not None),
    )
    # The elements that fill no vector are one a thread, and fewer than a block has threads.
    threads = max(x.numel() // lanes, x.numel() % lanes)
    with current(x):
        kernel((-(-threads // THREADS),), *addresses, x.numel())
    return out


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, launch: Callable[..., torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.launch = launch
        return launch(x, None)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.launch(x, dy), None
