"""Attention called eagerly: the operators' implementations without PyTorch's dispatcher, which costs more than they do.

A small attention takes less time on the GPU than `torch.library` takes on the host to find its way to it. Where
nothing but autograd would see the operators, they are left out: a `Course` keeps what a kind of call was found to
be, and autograd functions stand for the registered gradient; in C++ (`attention.cpp`) where that is built and both
directions have kernels of their own, else in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tilewright.kernels.attention import dispatch, native, registered
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.native import EXTENSION
from tilewright.kernels.attention.request import Operands, Request, Strides
from tilewright.kernels.device import NARROW
from tilewright.records.errors import CompilerError, warn_once

MOST_COURSES = 4096
SINK_NUMBERS = 2**18
Key = tuple[Any, ...]
Native = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Any]


class Course(NamedTuple):
    """A kind of call without mask, slopes, packing and dropout, in 16 bits, and what computes it."""

    request: Request
    shape: tuple[int, ...]
    strides: Strides
    """Of the result."""
    sums: tuple[int, ...]
    """Shape of the log-sum-exp."""
    launch: Callable[[Operands, torch.Tensor, torch.Tensor], None]
    """Fills out and lse."""
    sink: torch.Tensor | None
    """Takes a log-sum-exp that nobody asked for, of all streams at once; None where it would be large."""
    trained: bool
    """Whether a gradient is asked for."""
    native: Native | None
    """`run` in C++."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """out; lse is filled."""
        out = q.new_empty_strided(self.shape, self.strides)
        if q.is_cuda and q.device.index != torch.cuda.current_device():
            with torch.cuda.device(q.device):
                self.launch(Operands(q, k, v), out, lse)
        else:
            self.launch(Operands(q, k, v), out, lse)
        return out

    def new_sums(self, q: torch.Tensor) -> torch.Tensor:
        """Memory for lse."""
        return torch.empty(self.sums, dtype=torch.float32, device=q.device)


_courses: dict[Key, Course] = {}
_sinks: dict[torch.device, torch.Tensor] = {}
"""Never freed: kernels on their way and captured graphs write there."""


def key_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, left: int | None, right: int | None, scale: float | None,
    softcap: float, deterministic: bool,
) -> Key:  # fmt: skip
    """What tells kinds of calls apart."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype, q.device, k.device,
        v.device, left, right, scale, softcap, deterministic, _trained(q, k, v), EXTENSION.found,
    )  # fmt: skip


def _trained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


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
    shape, strides = dispatch.strides_like(q, v.shape[3])
    launch, trained, sink = dispatch.launch_of(request, strides, options[-1]), _trained(q, k, v), _sink(q)
    found = native_course(request, (q, k, v), launch, trained, sink)
    in_cpp = functools.partial(found[0].attend, found[1]) if found else None
    _courses[key] = Course(request, tuple(shape), strides, tuple(shape[:3]), launch, sink, trained, in_cpp)


def native_course(
    request: Request, operands: Sequence[torch.Tensor], launch: object, trained: bool, sink: torch.Tensor | None = None
) -> tuple[ModuleType, Any] | None:
    """The module of `attention.cpp` and what it takes first for calls of `request`; None where Python does them.

    `launch` is what `dispatch.launch_of` gives; `trained` and `sink` are as in `native.course`.
    """
    if not isinstance(launch, hopper_forward.Bound):
        return None
    library = EXTENSION.module()
    if library is None:
        return None
    otherwise = functools.partial(_gradient, request)
    try:
        return library, native.course(library, request, operands, launch, trained, sink, otherwise)
    except CompilerError as error:
        warn_once(f"small attention costs the host more: {error}")
        return None


def _sink(q: torch.Tensor) -> torch.Tensor | None:
    if q.shape[:3].numel() > SINK_NUMBERS:
        return None
    if q.device not in _sinks:
        _sinks[q.device] = torch.empty(SINK_NUMBERS, dtype=torch.float32, device=q.device)
    return _sinks[q.device]


def run(course: Course, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool) -> Any:
    """out, or out and lse, with their gradient where one is asked for."""
    if course.native is not None:
        return course.native(q, k, v, with_lse)
    if course.trained:
        # What `Function.apply` does before its base's is look for functorch, which does not watch this call.
        return super(torch.autograd.Function, _Attention).apply(course, with_lse, q, k, v)  # type: ignore[no-untyped-call]
    if with_lse or course.sink is None:
        lse = course.new_sums(q)
        out = course.forward(q, k, v, lse)
        return (out, lse) if with_lse else out
    return course.forward(q, k, v, course.sink)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of any call that the operator takes."""
    if _trained(q, k, v):
        return _Operator.apply(q, k, v, *options)[:2]  # type: ignore[no-any-return, no-untyped-call]
    return registered.forward(q, k, v, *options)[:2]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, course: Course, with_lse: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        lse = course.new_sums(q)
        out = course.forward(q, k, v, lse)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.request = course.request
        return (out, lse) if with_lse else out

    @staticmethod
    def backward(
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        return None, None, *_gradient(ctx.request, dout, dlse, *ctx.saved_tensors)


def _gradient(
    request: Request,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of a course's call."""
    if dout is None:
        dout = torch.zeros_like(out)
    if torch.is_grad_enabled():
        # A graph of the gradient is wanted: the operator refuses to be differentiated, and says so.
        none, r = lse.new_empty(0), request
        options = (r.scale, r.left, r.right, r.softcap, 0.0, 0, 0, r.deterministic, "auto")
        operands = (dout, dlse, q, k, v, out, lse, none, none, None, None, None, None)
        refused: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = registered.backward_operator(*operands, *options)
        return refused
    return dispatch.backward(request, Operands(q, k, v), out, lse, dout, None, dlse, "auto")


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
