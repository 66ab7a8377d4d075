"""Attention called eagerly: the operators' implementations without PyTorch's dispatcher, which costs more than they do.

A small attention takes less time on the GPU than `torch.library` takes on the host to find its way to it. Where
nothing but autograd would see the operators, they are left out: a `Course` keeps what a kind of call was found to
be, and autograd functions stand for the registered gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tilewright.kernels.attention import dispatch, registered
from tilewright.kernels.attention.request import Operands, Request
from tilewright.kernels.device import NARROW, current

MOST_COURSES = 4096
Key = tuple[Any, ...]


class Course(NamedTuple):
    """A kind of call without mask, slopes, packing and dropout, in 16 bits, and what computes it."""

    request: Request
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the result."""
    implementation: Any

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        out = torch.empty_strided(self.shape, self.strides, dtype=q.dtype, device=q.device)
        lse = torch.empty(self.shape[:3], dtype=torch.float32, device=q.device)
        with current(q):
            self.implementation.forward(self.request, Operands(q, k, v), out, lse)
        return out, lse


_courses: dict[Key, Course] = {}


def key_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int | None, right: int | None, scale: float | None,
    softcap: float, deterministic: bool,
) -> Key:  # fmt: skip
    """What tells kinds of calls apart."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, left, right, scale, softcap, deterministic,
    )  # fmt: skip


def kept(key: Key, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Course | None:
    """The course of a kind of call; None where there is none, or a tensor does not begin at a multiple of 16 bytes."""
    course = _courses.get(key)
    return course if course and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0 else None


def keep(key: Key, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]) -> None:
    """Remember a kind of call that was found right and has these options of the operator, if there is a course."""
    if q.dtype not in NARROW or 0 in (*q.shape, *k.shape, *v.shape) or not dispatch.aligned(q, k, v):
        return
    if any(x.stride(3) != 1 for x in (q, k, v)):
        return
    request = registered.request_of(q, k, v, *options[:-1])
    if len(_courses) >= MOST_COURSES:
        _courses.clear()
    shape, strides = dispatch.laid_as(q, v.shape[3])
    _courses[key] = Course(request, tuple(shape), strides, dispatch.chosen(request, options[-1], False))


def run(course: Course, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, with their gradient where one is asked for."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Attention.apply(course, q, k, v)  # type: ignore[no-any-return, no-untyped-call]
    return course.forward(q, k, v)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of any call that the operator takes."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _Operator.apply(q, k, v, *options)[:2]  # type: ignore[no-any-return, no-untyped-call]
    return registered.forward(q, k, v, *options)[:2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, course: Course, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = course.forward(q, k, v)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.request = course.request
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        if torch.is_grad_enabled():
            # A graph of the gradient is wanted: the operator refuses to be differentiated, and says so.
            none, r = lse.new_empty(0), ctx.request
            options = (r.scale, r.left, r.right, r.softcap, 0.0, 0, 0, r.deterministic, "auto")
            operands = (dout, dlse, q, k, v, out, lse, none, none, None, None, None, None)
            return None, *registered.backward_operator(*operands, *options)
        return None, *dispatch.backward(ctx.request, Operands(q, k, v), out, lse, dout, None, dlse, "auto")


class _Operator(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> registered.Results:
        results = registered.forward(*inputs)
        registered.save(ctx, inputs, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        run = registered.backward_operator if torch.is_grad_enabled() else registered.backward
        return registered.gradients(run, ctx, *gradients)
