"""Attention among the steps of an executable: what a call is found to be is found out once.

The operands of a step lie in memory the same in every call, so the request that the kernels are chosen and planned
by is always the same one; to derive it anew costs the host more than the launch. Only where the operands begin can
change, and one that does not begin at a multiple of 16 bytes goes the operator's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tilewright.kernels.attention import direct, dispatch, registered
from tilewright.kernels.attention.native import EXTENSION
from tilewright.kernels.attention.request import Operands, Request, strides_of
from tilewright.kernels.device import NARROW, current

ALIGNMENT = 16
Step = Callable[..., tuple[torch.Tensor, ...]]


def step_of(name: str) -> Step:
    """What runs for one call of `tilewright::attention` or `tilewright::attention_backward`."""
    return Forward() if name == "tilewright::attention" else Backward()


class Forward:
    """`tilewright::attention` below autograd, for operands that lie the same in every call."""

    def __init__(self) -> None:
        self._request: Request | None = None
        self._launch: Any = None
        self._shape: tuple[int, ...] = ()
        self._strides: tuple[int, ...] = ()
        self._nothing: tuple[torch.Tensor, ...] = ()
        self._native = Native(trained=False)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> tuple[torch.Tensor, ...]:
        if self._request is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            results = registered.forward(q, k, v, *options)
            if self._request is None and (request := settled(q, k, v, options)) is not None:
                self._remember(request, results, options[-1])
            return results
        native = self._native.of(self._request, q, k, v, options[-1])
        if native is not None:
            library, course = native
            return *library.results(course, q, k, v), *self._nothing
        out = q.new_empty_strided(self._shape, self._strides)
        lse = torch.empty(self._shape[:3], dtype=torch.float32, device=q.device)
        with current(q):
            self._launch(Operands(q, k, v), out, lse)
        return out, lse, *self._nothing

    def _remember(self, request: Request, results: tuple[torch.Tensor, ...], impl: str) -> None:
        out = results[0]
        self._shape, self._strides, self._nothing = out.shape, out.stride(), results[2:]
        self._launch = dispatch.launch_of(request, strides_of(out), impl)
        # Last: another thread may be in a call.
        self._request = request


class Backward:
    """`tilewright::attention_backward`, for operands that lie the same in every call."""

    def __init__(self) -> None:
        self._request: Request | None = None
        self._native = Native(trained=True)

    def __call__(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lse64: torch.Tensor,
        state: torch.Tensor,
        *options: Any,
    ) -> tuple[torch.Tensor, ...]:
        if self._request is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT:
            if self._request is None:
                self._request = settled(q, k, v, options)
            return registered.backward(dout, dlse, q, k, v, out, lse, lse64, state, *options)
        native = self._native.of(self._request, q, k, v, options[-1]) if dlse is None else None
        if native is not None:
            library, course = native
            gradients: tuple[torch.Tensor, ...] | None = library.gradients(course, dout, q, k, v, out, lse)
            if gradients is not None:
                return gradients
        return dispatch.backward(self._request, Operands(q, k, v), out, lse, dout, None, dlse, options[-1])


class Native:
    """The course of a step in C++, from the moment on when that is built."""

    def __init__(self, trained: bool) -> None:
        self._trained = trained
        self._module: ModuleType | None = None
        self._course: tuple[ModuleType, Any] | None = None

    def of(
        self, request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: str
    ) -> tuple[ModuleType, Any] | None:
        """The module, and what its functions take first for calls of `request`; None where Python does them."""
        module = EXTENSION.module() if EXTENSION.found is None else EXTENSION.found
        if module is not self._module:
            launch = dispatch.launch_of(request, dispatch.strides_like(q, v.shape[3])[1], impl)
            self._course = direct.native_course(request, (q, k, v), launch, self._trained)
            # Last: another thread may be in a call.
            self._module = module
        return self._course


def settled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple[Any, ...]) -> Request | None:
    """The request of every call with operands like these; None where a call takes more tensors, draws, or copies."""
    empty = 0 in (*q.shape, *k.shape, *v.shape)
    copied = any(x.stride(3) != 1 for x in (q, k, v)) or not dispatch.aligned(q, k, v)
    if empty or copied or q.dtype not in NARROW:
        return None
    request = registered.request_of(q, k, v, *options[:-1])
    more = request.mask != "none" or request.alibi or request.sequences or request.dropout
    return None if more else request
