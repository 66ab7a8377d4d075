"""An operator on a driver that is not there: it launches kernels, which are functions of this file.

`y = by · x + bias` in fp32, with the gradient of x; like the operators of a GPU it allocates, launches and does nothing
else. Registered as `imagined::scaled`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from tilewright.kernels import eager
from tilewright.kernels.launches import Launch, listened, note
from tilewright.kernels.no_double_backward import no_double_backward

STREAM, CONTEXT, SCALE, ADD, REFUSED = 77, 99, 11, 12, 700
Launched = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3,
)  # fmt: skip
Switched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
Told = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
Asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))
Values = tuple[float, ...]
LETTERS = {SCALE: "PPqf", ADD: "PPPq"}


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)


def _run(function: int, values: Values) -> None:
    """y = x · by of `count` floats, or z = x + b; not by PyTorch's operators, which are seen."""
    *addresses, count = (int(value) for value in values[: 3 if function == SCALE else 4])
    rows = [(ctypes.c_float * count).from_address(address) for address in addresses]
    for i in range(count):
        rows[-1][i] = rows[0][i] * values[3] if function == SCALE else rows[0][i] + rows[1][i]


class Imagined:
    """The driver. `launches` are those that C++ asked it for."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        self.refusals: list[int] = []
        """Answers that the next launches get instead."""
        self.contexts: list[int] = []
        self._entries = Launched(self._launch), Switched(self._switch), Told(self._told), Asked(self._stream)

    @property
    def table(self) -> tuple[int, ...]:
        """As `repeat.driver_of` gives it."""
        return (*(ctypes.cast(entry, ctypes.c_void_p).value or 0 for entry in self._entries), CONTEXT)

    def _launch(self, function: int, *rest: Any) -> int:
        *sizes, stream, parameters, extra = rest
        if self.refusals:
            return self.refusals.pop(0)
        if tuple(sizes) != (3, 2, 1, 64, 1, 1, 16) or stream != STREAM or extra:
            return 1
        letters = LETTERS[function]
        places = (ctypes.c_uint64 * len(letters)).from_address(parameters)
        pairs = zip(letters, places, strict=True)
        values = tuple(struct.unpack(c, ctypes.string_at(at, struct.calcsize(c)))[0] for c, at in pairs)
        self.launches.append(function)
        _run(function, values)
        return 0

    def _told(self, stream: int, to: Any) -> int:
        to[0] = 0
        return 0

    def _switch(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _stream(self, device: int, to: Any) -> int:
        to[0] = STREAM
        return 0


calls: list[str] = []
"""What Python did."""


def _send(function: int, *values: float) -> None:
    if listened():
        note(Launch(function, (3, 2, 1), 64, 16, LETTERS[function], values))
    _run(function, values)


def _scaled(x: torch.Tensor, bias: torch.Tensor | None, by: float, how: str) -> torch.Tensor:
    calls.append("scaled")
    y = torch.empty(x.shape, dtype=x.dtype)
    if how == "copied":
        x = x.clone()
    scratch = y if bias is None else torch.empty_like(y)
    hidden = torch.frombuffer(bytearray(4 * max(x.numel(), 1)), dtype=torch.float32) if how == "hidden" else scratch
    _send(SCALE, x.data_ptr(), hidden.data_ptr(), x.numel(), by)
    if bias is not None:
        _send(ADD, hidden.data_ptr(), bias.data_ptr(), y.data_ptr(), x.numel())
    return y


def _backward(dy: torch.Tensor, by: float) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append("backward")
    dy = dy.contiguous()
    dx, none = torch.empty(dy.shape, dtype=dy.dtype), dy.new_empty(0)
    _send(SCALE, dy.data_ptr(), dx.data_ptr(), dy.numel(), by)
    return dx, none


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, ctx.by, _ = inputs
    ctx.save_for_backward(x)


def _gradient(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    _ = ctx.saved_tensors
    return scaled_backward(dy, ctx.by)[0], None, None, None


_library = torch.library.Library("imagined", "FRAGMENT")


def _define(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], backward: Any, save: Any
) -> Callable[..., Any]:
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"imagined::{name}", fake, lib=_library)
    torch.library.register_autograd(f"imagined::{name}", backward, setup_context=save, lib=_library)
    operator = getattr(torch.ops.imagined, name).default
    return eager.called(operator, implementation, backward, save, True)


scaled_backward = _define(
    "scaled_backward(Tensor dy, float by) -> (Tensor, Tensor)",
    _backward,
    lambda dy, by: (torch.empty(dy.shape), dy.new_empty(0)),
    no_double_backward("scaled_backward"),
    None,
)
scaled = _define(
    "scaled(Tensor x, Tensor? bias, float by, str how) -> Tensor",
    _scaled,
    lambda x, bias, by, how: torch.empty(x.shape),
    _gradient,
    _save,
)
