"""Attention's operators as recipes, for calls that consist of allocations and launches; planned from metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.kernels.attention import dispatch, registered
from tilewright.kernels.attention.decode import triton as decode_triton
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.hopper import recipe as hopper
from tilewright.kernels.attention.portable import launch as portable
from tilewright.kernels.attention.portable.plan import BackwardStrides, backward_plan, forward_plan
from tilewright.kernels.attention.request import Request, strides_of
from tilewright.kernels.device import runs_triton
from tilewright.kernels.dropout_add import philox
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


class Inputs(NamedTuple):
    """The tensors of a call, as `Request` describes them; the last axis of q, k and v has stride 1."""

    q: Operand
    k: Operand
    v: Operand
    mask: Operand | None
    """[batch, heads, queries, keys], expanded (stride 0 where it repeats): bool, True where a key is seen; or of
    q's dtype or fp32, added to the scores."""
    slopes: Operand | None
    """ALiBi, fp32 [batch, heads]: -slope · |j - (i + Sk - Sq)| is added to the scores."""
    starts_q: Operand | None
    """int32 [sequences + 1]: where each packed sequence's queries begin, and the end of the last."""
    starts_k: Operand | None
    state: Operand | None
    """int64 [2], seed and offset of the dropout mask's generator."""


def forward(call: RecipeBuilder, q: Operand, k: Operand, v: Operand, *options: Any) -> Recipe | None:
    """`tilewright::attention`: out, lse, lse64 and state. None if the operator's implementation must run the call."""
    request = _request(call, q, k, v, options, False)
    # The interpreter's generator is PyTorch's for the CPU, which no recipe draws from.
    if request is None or (request.dropout and not q.is_cuda):
        return None
    return call.finish(*_results(call, q, k, v, options, None))


def forward_of_state(call: RecipeBuilder, q: Operand, k: Operand, v: Operand, *rest: Any) -> Recipe:
    """out, lse and lse64; the last argument is the seed and offset of the dropout mask."""
    out, lse, lse64, _ = _results(call, q, k, v, rest[:-1], rest[-1])
    return call.finish(out, lse, lse64)


def _results(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, options: Sequence[Any], state: Operand | None
) -> tuple[Operand, Operand, Operand, Operand]:
    """out, lse, lse64 and `state`, which is drawn if there is dropout and none is given."""
    q, k, v = (portable.with_aligned_rows(call, x) for x in (q, k, v))
    request = registered.request_of(q, k, v, *options[:-1])
    limits = limits_of(request.device)
    module = dispatch.choose(request, limits, options[-1], False).module
    full = q.dtype == torch.float32
    shape, strides = dispatch.strides_like(q, v.shape[3])
    out, lse = call.empty(shape, q.dtype, strides), call.empty(q.shape[:3], torch.float32)
    lse64 = call.empty(q.shape[:3] if full else (0,), torch.float64)
    if state is None:
        drops = request.dropout > 0.0
        state = philox.draw(call, dispatch.advance_of(request)) if drops else call.empty((0,), torch.int64)
    inputs = _inputs(q, k, v, options, state if request.dropout else None)
    if module is portable:
        plan = forward_plan(request, limits, strides_of(out), strides_of(inputs.mask))
        portable.launch(call, plan, q, k, v, out, lse, lse64 if full else None, *inputs[3:])
    else:
        _FORWARDS[module](call, request, limits, inputs, out, lse)
    return out, lse, lse64, state


def backward(
    call: RecipeBuilder, dout: Operand, dlse: Operand | None, q: Operand, k: Operand, v: Operand, *rest: Any
) -> Recipe | None:
    """`tilewright::attention_backward`: dq, dk and dv. None if the operator's implementation must run the call."""
    request = _request(call, q, k, v, rest[4:], True)
    # If each query sees one key, further operators run after the launches.
    if request is None or (request.single_key and dlse is None):
        return None
    return gradients(call, dout, dlse, q, k, v, *rest)


def gradients(
    call: RecipeBuilder, dout: Operand, dlse: Operand | None, q: Operand, k: Operand, v: Operand, out: Operand,
    lse: Operand, lse64: Operand, state: Operand, *options: Any,
) -> Recipe:  # fmt: skip
    """dq, dk and dv; if each query sees one key, dq and dk are rounding errors."""
    q, k, v = (portable.with_aligned_rows(call, x) for x in (q, k, v))
    request = registered.request_of(q, k, v, *options[:-1])
    limits = limits_of(request.device)
    module = dispatch.choose(request, limits, options[-1], True).module
    full = q.dtype == torch.float32
    dq, dk, dv = (_gradient(call, x) for x in (q, k, v))
    if dispatch.must_be_dense(dout) and not dout.is_contiguous():
        dout = call.copy(dout)
    dout = portable.with_aligned_rows(call, dout)
    if module is hopper_backward and dlse is None and not full:
        hopper.backward(call, request, limits, q, k, v, out, lse, dout, dq, dk, dv)
    else:
        if dlse is not None and not dlse.is_contiguous():
            dlse = call.copy(dlse)
        inputs = _inputs(q, k, v, options, state if request.dropout else None)
        exact = lse64 if full else None
        _portable_backward(call, request, limits, inputs, out, lse, dout, exact, dlse, (dq, dk, dv))
    return call.finish(dq, dk, dv)


def _request(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, options: Sequence[Any], is_backward: bool
) -> Request | None:
    """The call as plain data; None if it does not consist of launches."""
    if not _launches(q, k, v):
        return None
    request = registered.request_of(q, k, v, *options[:-1])
    try:
        dispatch.select(request, options[-1], is_backward)
    except NotImplementedError:
        # The operator says so when it is called.
        return None
    return request


def _inputs(q: Operand, k: Operand, v: Operand, options: Sequence[Any], state: Operand | None) -> Inputs:
    mask, slopes, starts_q, starts_k = options[:4]
    return Inputs(q, k, v, mask, slopes, starts_q, starts_k, state)


def _launches(*operands: Operand) -> bool:
    """Whether a call consists of launches: the kernels support device and dtype, and no tensor is empty."""
    return runs_triton(operands[0]) and all(0 not in x.shape for x in operands)


def _gradient(call: RecipeBuilder, x: Operand) -> Operand:
    made = dispatch.empty_gradient(torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta"))
    return call.empty(made.shape, made.dtype, made.stride())


def _hopper_forward(
    call: RecipeBuilder, request: Request, limits: DeviceLimits, inputs: Inputs, out: Operand, lse: Operand
) -> None:
    hopper.forward(call, request, limits, *inputs[:3], out, lse)


def _decode_triton(
    call: RecipeBuilder, request: Request, limits: DeviceLimits, inputs: Inputs, out: Operand, lse: Operand
) -> None:
    q, k, v, mask, slopes, *_ = inputs
    made = decode_triton.plan(request, limits, strides_of(out), strides_of(mask))
    scratch, counters = None, None
    if made.scratch:
        scratch, counters = call.empty((made.scratch,), torch.float32), call.empty((made.counters,), torch.int32)
        call.fill(counters, 0)
    portable.launch(call, made.launch, q, k, v, out, lse, scratch, counters, mask, slopes, None)


Forward = Callable[[RecipeBuilder, Request, DeviceLimits, Inputs, Operand, Operand], None]
_FORWARDS: dict[ModuleType, Forward] = {decode_triton: _decode_triton, hopper_forward: _hopper_forward}


def _portable_backward(
    call: RecipeBuilder, request: Request, limits: DeviceLimits, inputs: Inputs, out: Operand, lse: Operand,
    dout: Operand, lse64: Operand | None, dlse: Operand | None, gradients: tuple[Operand, Operand, Operand],
) -> None:  # fmt: skip
    q, k, v, *rest = inputs
    dq, dk, dv = gradients
    strides = BackwardStrides(*map(strides_of, (out, dout, dq, dk, dv, inputs.mask)))
    plan = backward_plan(request, limits, strides, lse64 is not None, dlse is not None)
    delta = call.empty(lse.shape, lse.dtype)
    row_lse = call.empty(lse.shape, lse.dtype) if lse64 is None else lse64
    if plan.prepare is not None:
        portable.launch(call, plan.prepare, out, dout, lse, dlse, delta, row_lse)
    portable.launch(call, plan.dq, q, k, v, dout, row_lse, delta, dlse if plan.computes_delta else None, dq, *rest)
    for launch in plan.dk_dv:
        portable.launch(call, launch, q, k, v, dout, row_lse, delta, dk, dv, *rest)
