"""dropout(act(x)) + residual in Triton, with the mask that PyTorch's own kernel would draw.

Limit: instructions, then memory: 0.90 to 0.92 of a copy forward, 0.92 backward (H200, GELU, 16384 x 16384 bf16).
Ten Philox rounds take 40 instructions for four numbers and the erf GELU 17 an element; an H200 issues about 49
an element while memory moves it. These measures bring the total to 36:

- The tile follows PyTorch's numbering: a program has 256 of its threads, a step gives each of these one
  vector of neighbours, and the words of its Philox calls are joined so that they land in the registers of
  the thread that loads the vector. No word crosses threads (a mask laid out otherwise goes through shared
  memory).
- The call number is a scalar and the thread number is the same in every step, so the first two rounds of a
  call need only a few instructions; the keys of the rounds are scalars too.
- The comparison u < 1 - p is one of integers with a threshold found on the host.
- Lanes are masked by whole vectors, so that loads stay 16 bytes wide.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.emit.triton_draw import philox
from tilewright.kernels.activation.formulas import activate, activate_and_slope
from tilewright.kernels.dropout_add import generator
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

STEPS = 2
"""Steps of a program; it computes what they share once."""
WARPS = 4

LANES = tl.constexpr(256)
"""Threads of PyTorch's kernel that a program stands for: those of one block (`generator.LANES`)."""


@triton.jit
def low(x: tl.tensor) -> tl.tensor:
    """The lower word."""
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _call(seed: tl.tensor, counter: tl.tensor, thread: tl.tensor) -> tl.tensor:
    """The words of cuRAND's call number `counter` for each thread: its subsequence is the thread's number."""
    # The interpreter makes a small argument 32 bits wide.
    seed = seed.to(tl.int64)
    counter = counter.to(tl.int64)
    return philox(low(seed), low(seed >> 32), low(counter), low(counter >> 32), thread, thread ^ thread)


@triton.jit
def _words(seed: tl.tensor, counter: tl.tensor, step: tl.tensor, VECTOR: tl.constexpr) -> tl.tensor:
    """The word of each of this program's elements in a step, in the elements' order."""
    thread = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.uint32)
    if VECTOR == 8:
        a0, a1, a2, a3 = _call(seed, counter + 2 * step, thread)
        b0, b1, b2, b3 = _call(seed, counter + 2 * step + 1, thread)
        even = tl.join(tl.join(a0, b0), tl.join(a2, b2))
        odd = tl.join(tl.join(a1, b1), tl.join(a3, b3))
        return tl.reshape(tl.join(even, odd), [8 * LANES])
    elif VECTOR == 2:
        w0, w1, _, _ = _call(seed, counter + step, thread)
        return tl.reshape(tl.join(w0, w1), [2 * LANES])
    else:
        w0, w1, w2, w3 = _call(seed, counter + step, thread)
        return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [4 * LANES])


@triton.jit
def _elements(n: tl.tensor, step: tl.tensor, blocks: tl.tensor, VECTOR: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where this program's elements of a step lie, and which of them there are."""
    column = tl.program_id(0)
    if VECTOR == 1:
        element = tl.arange(0, 4 * LANES)
        at = (step * 4 + element % 4).to(tl.int64) * (blocks * LANES) + (column * LANES + element // 4)
        return at, at < n
    else:
        element = tl.arange(0, VECTOR * LANES)
        chunk = (step.to(tl.int64) * blocks + column) * LANES
        return chunk * VECTOR + element, element // VECTOR < n // VECTOR - chunk


@triton.jit
def _kept(
    seed: tl.tensor, counter: tl.tensor, step: tl.tensor, threshold: tl.tensor, scale: tl.tensor, VECTOR: tl.constexpr,
    DRAWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The factor of each element: `scale`, or 0 if the element is dropped."""
    if DRAWS:
        return tl.where(_words(seed, counter, step, VECTOR) < threshold, scale, 0.0)
    else:
        return scale


@triton.jit(do_not_specialize=["seed", "offset", "threshold", "n", "blocks"])
def forward(
    x: tl.tensor, residual: tl.tensor, out: tl.tensor, state: tl.tensor, n: tl.int64, blocks: tl.int32,
    seed: tl.int64, offset: tl.int64, threshold: tl.uint32, scale: tl.float32,
    KIND: tl.constexpr, PRECISE: tl.constexpr, VECTOR: tl.constexpr, STEPS: tl.constexpr, DRAWS: tl.constexpr,
    CAPTURED: tl.constexpr,
) -> None:  # fmt: skip
    """out = act(x) · kept + residual. Program (column, s) takes steps s·STEPS … of its 256 threads.

    Seed and offset are read from `state` where CAPTURED.
    """
    if CAPTURED:
        seed = tl.load(state)
        offset = tl.load(state + 1)
    for i in tl.static_range(STEPS):
        step = tl.program_id(1) * STEPS + i
        at, inside = _elements(n, step, blocks, VECTOR)
        value = activate(tl.load(x + at, mask=inside).to(tl.float32), KIND, PRECISE)
        value *= _kept(seed, offset >> 2, step, threshold, scale, VECTOR, DRAWS)
        value += tl.load(residual + at, mask=inside).to(tl.float32)
        tl.store(out + at, rounded(value, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed", "offset"])
def remember(state: tl.tensor, seed: tl.int64, offset: tl.int64) -> None:
    """state = (seed, offset). On its own: the same stores anywhere in `forward` cost it four to eight percent."""
    tl.store(state, seed)
    tl.store(state + 1, offset)


@triton.jit(do_not_specialize=["threshold", "n", "blocks"])
def backward(
    dout: tl.tensor, x: tl.tensor, dx: tl.tensor, state: tl.tensor, n: tl.int64, blocks: tl.int32,
    threshold: tl.uint32, scale: tl.float32,
    KIND: tl.constexpr, PRECISE: tl.constexpr, VECTOR: tl.constexpr, STEPS: tl.constexpr, DRAWS: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dout · kept · act'(x), kept drawn again; x is not read where the activation is "none"."""
    seed = tl.load(state)
    offset = tl.load(state + 1)
    for i in tl.static_range(STEPS):
        step = tl.program_id(1) * STEPS + i
        at, inside = _elements(n, step, blocks, VECTOR)
        value = tl.load(dout + at, mask=inside).to(tl.float32)
        value *= _kept(seed, offset >> 2, step, threshold, scale, VECTOR, DRAWS)
        if KIND != "none":
            _, slope = activate_and_slope(tl.load(x + at, mask=inside).to(tl.float32), KIND, PRECISE)
            value *= slope
        tl.store(dx + at, rounded(value, dx.dtype.element_ty), mask=inside)


def forward_recipe(
    call: RecipeBuilder, x: Operand, residual: Operand, p: float, kind: str, alignment: int,
    state: Operand | None = None,
) -> Recipe:  # fmt: skip
    """dropout(act(x)) + residual, and seed and offset, int64[2]; the former alone where `state` has the latter."""
    x, residual = call.contiguous(x), call.contiguous(residual)
    out = call.empty(x.shape, x.dtype)
    draws, is_captured = 0.0 < p < 1.0, state is not None
    state = state or call.empty((2,), torch.int64)
    if not x.numel():
        call.fill(state, 0)
        return call.finish(out, state)
    geometry = generator.geometry_on(x.device, x.numel(), x.itemsize, alignment)
    start: tuple[Any, Any] = (0, 0)
    if draws and not is_captured:
        start = call.draw(geometry.advance)
        call.launch(remember, (1,), state, *start, num_warps=1)
    call.launch(
        forward, (geometry.columns, triton.cdiv(geometry.steps, STEPS)),
        x, residual, out, state, x.numel(), geometry.blocks, *start, generator.threshold(p), generator.scale(p),
        KIND=kind, PRECISE=x.dtype == torch.float32, VECTOR=geometry.vector, STEPS=STEPS,
        DRAWS=draws, CAPTURED=is_captured, num_warps=WARPS,
    )  # fmt: skip
    return call.finish(out) if is_captured else call.finish(out, state)


def backward_recipe(
    call: RecipeBuilder, dout: Operand, x: Operand | None, state: Operand, p: float, kind: str, alignment: int
) -> Recipe:
    """dx; x is None where the activation is "none"."""
    dout, x = call.contiguous(dout), None if x is None else call.contiguous(x)
    dx = call.empty(dout.shape, dout.dtype)
    if dout.numel():
        geometry = generator.geometry_on(dout.device, dout.numel(), dout.itemsize, alignment)
        call.launch(
            backward, (geometry.columns, triton.cdiv(geometry.steps, STEPS)),
            dout, x or dout, dx, state, dout.numel(), geometry.blocks, generator.threshold(p), generator.scale(p),
            KIND=kind, PRECISE=dout.dtype == torch.float32, VECTOR=geometry.vector, STEPS=STEPS,
            DRAWS=0.0 < p < 1.0, num_warps=WARPS,
        )  # fmt: skip
    return call.finish(dx)
