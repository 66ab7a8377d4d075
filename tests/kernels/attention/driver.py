"""A driver that launches nothing: what attention's Hopper kernels would compute, from the parameters that they get."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.hardware.architectures import stated_limits
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import forward as hopper_forward
from tilewright.kernels.attention.hopper.launch import MAP_BYTES
from tilewright.kernels.attention.hopper.problem import Problem
from tilewright.kernels.attention.native import Driver
from tilewright.kernels.attention.request import Request, strides_of
from tilewright.kernels.nvrtc import Kernel

FORWARD, PREPARE, MAIN, FINISH = range(1, 5)
MAP = "QI4Q3Q4I"
"""Address, kind, sizes, strides in bytes and box, innermost first: what the imagined driver makes of a tensor map."""
PARAMETERS = {
    FORWARD: "siiiiqqqq" * 4 + "QQff" + "i" * 8 + "QQ",
    PREPARE: hopper_backward.PREPARE.replace("P", "Q"),
    MAIN: "ssssssp",
    FINISH: hopper_backward.FINISH.replace("P", "Q"),
}
"""As `_read` takes them."""
H200 = stated_limits("9.0", multiprocessors=132, l2_bytes=60 << 20)
CONTEXT, STREAM = 77, 99
_DTYPES = {6: torch.float16, 9: torch.bfloat16}
Launched = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
Encoded = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, *[ctypes.c_void_p] * 4,
    *[ctypes.c_int] * 4,
)  # fmt: skip
Switched = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
Asked = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))


class Imagined:
    """The driver of a GPU that is not there. `launches` are the kernels that it was asked for, with their grids."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[int, ...]]] = []
        self.sent: list[tuple[Any, ...]] = []
        """Of every launch: kernel, grid, threads, bytes of shared memory, parameters."""
        self.refusals: list[int] = []
        """Answers that the next launches get instead."""
        self.contexts: list[int] = []
        self.wants_context = False
        """Whether a tensor map needs one, as those of CUDA do."""
        self._begun: tuple[Any, ...] = ()
        self._main: tuple[Any, ...] = ()
        self._entries = Launched(self.launch), Encoded(self.encode), Switched(self.switch), Asked(self.stream)

    @property
    def table(self) -> Driver:
        return Driver(*(ctypes.cast(entry, ctypes.c_void_p).value for entry in self._entries), CONTEXT)

    @property
    def table_of_recipes(self) -> tuple[int, ...]:
        """`launch.driver.table`; nobody asks whether a stream is captured."""
        launch, encode, switch, stream = (ctypes.cast(x, ctypes.c_void_p).value or 0 for x in self._entries)
        return launch, encode, switch, 0, stream, CONTEXT

    def switch(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def stream(self, device: int, to: Any) -> int:
        to[0] = STREAM
        return 0

    def encode(
        self, to: int, kind: int, rank: int, address: int, sizes: Any, nbytes: Any, box: Any, steps: Any, *how: int
    ) -> int:
        if self.wants_context and not self.contexts:
            return 201
        if to % 64 or rank != 4 or how != (0, 3, 3, 0):
            return 1
        numbers = (*_numbers(sizes, ctypes.c_uint64, 4), *_numbers(nbytes, ctypes.c_uint64, 3))
        packed = struct.pack(MAP, address, kind, *numbers, *_numbers(box, ctypes.c_uint32, 4))
        ctypes.memmove(to, packed, len(packed))
        return 0

    def launch(self, function: int, *rest: Any) -> int:
        x, y, z, threads, one, also_one, shared_bytes, stream, parameters, _ = rest
        if self.refusals:
            return self.refusals.pop(0)
        if stream != STREAM or (one, also_one) != (1, 1) or not threads:
            return 1
        self.launches.append((function, (x, y, z)))
        self.sent.append((function, (x, y, z), threads, shared_bytes, *_read(parameters, PARAMETERS[function])))
        try:
            {FORWARD: self.forward, PREPARE: self.prepare, MAIN: self.main, FINISH: self.finish}[function](parameters)
        except Exception:  # what ctypes would print and forget
            import traceback

            traceback.print_exc()
            return 2
        return 0

    def forward(self, parameters: int) -> None:
        given = _read(parameters, PARAMETERS[FORWARD])
        q, k, v, out = (_tensor(given[9 * i]) for i in range(4))
        for i, x in enumerate((q, k, v, out)):
            assert tuple(given[9 * i + 1 : 9 * i + 5]) == tuple(x.shape)
        result, lse = attended(q, k, v, given[38] * math.log(2))
        out.copy_(result)
        _floats(given[36], lse.numel()).copy_(lse.flatten())

    def prepare(self, parameters: int) -> None:
        self._begun = tuple(_read(parameters, PARAMETERS[PREPARE]))

    def main(self, parameters: int) -> None:
        *maps, problem = _read(parameters, PARAMETERS[MAIN])
        self._main = [_tensor(x) for x in maps], Problem.from_buffer_copy(problem)

    def finish(self, parameters: int) -> None:
        sums, dq_at, *steps, queries, width, scale = _read(parameters, PARAMETERS[FINISH])
        out_at, dout_at, lse_at, scaled_lse, delta, also_sums, work_counters, *more = self._begun
        (q, k, v, dout, dk, dv), problem = self._main
        assert (problem.dq_sums, problem.lse, problem.delta, problem.work_counters) == (
            sums,
            scaled_lse,
            delta,
            work_counters,
        )
        assert also_sums == sums and dout.data_ptr() == dout_at and (queries, width) == q.shape[2:]
        assert [x for x, size in zip(more[3:6], q.shape, strict=False) if size > 1] == [
            x for x, size in zip(dout.stride()[:3], q.shape, strict=False) if size > 1
        ]
        out = _at(out_at, q.dtype, q.shape, (*more[:3], 1))
        dq = _at(dq_at, q.dtype, q.shape, (*steps, 1))
        _floats(sums, (work_counters - sums) // 4 + 1).fill_(math.nan)
        lse = _floats(lse_at, q.shape[:3].numel()).view(q.shape[:3])
        for to, gradient in zip((dq, dk, dv), differentiated(q, k, v, out, lse, dout, scale), strict=True):
            to.copy_(gradient)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exp of full attention in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = scale * q.double() @ k.mT
    return s.softmax(-1) @ v, s.logsumexp(-1)


def differentiated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk and dv in float64, from the result and the log-sum-exp that the forward left."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    p = (scale * q.double() @ wide_k.mT - lse.double()[..., None]).exp()
    ds = scale * p * (dout.double() @ wide_v.mT - (dout.double() * out.double()).sum(-1, keepdim=True))
    dk, dv = ds.mT @ q.double(), p.mT @ dout.double()
    return ds @ wide_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def kernels(request: Request) -> tuple[hopper_forward.Bound, hopper_backward.Bound]:
    """The launches of a request with kernels that are numbers."""
    from unittest import mock

    def made(number: int) -> Kernel:
        return Kernel(number, "", 0, 128, 0, 1)

    strides = dispatch.strides_like(torch.empty_strided(*_lies(request), device="meta"), request.value_size)[1]
    with mock.patch.object(hopper_forward, "built", lambda *_: made(FORWARD)):
        forward = hopper_forward.bind(hopper_forward.plan(request, H200, strides), torch.device("cuda", 0))
    plan = hopper_backward.planned(request, H200, hopper_backward.SHAPES[64], dq_warps=False)
    loaded = hopper_backward.Kernels(made(PREPARE), made(MAIN), made(FINISH))
    return forward, hopper_backward.bind(plan, request, loaded)


def request_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Request:
    (batch, heads, queries, size), (_, kv_heads, keys, value_size) = q.shape, v.shape
    return Request(
        q.device, q.dtype, batch, heads, kv_heads, queries, keys, size, value_size, strides_of(q), strides_of(k),
        strides_of(v), dispatch.aligned(q, k, v), size**-0.5, None, None,
    )  # fmt: skip


def _lies(request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (request.batch, request.heads, request.queries, request.head_size), request.q_strides


def _numbers(address: int, kind: Any, count: int) -> list[int]:
    return list((kind * count).from_address(address))


def _read(parameters: int, letters: str) -> list[Any]:
    """Parameters of a launch: numbers by the letters of `struct`; s a tensor map, p the structure of a problem."""
    sizes = {"s": MAP_BYTES, "p": ctypes.sizeof(Problem)}
    found: list[Any] = []
    for letter, at in zip(letters, _numbers(parameters, ctypes.c_uint64, len(letters)), strict=True):
        data = ctypes.string_at(at, sizes.get(letter) or struct.calcsize(letter))
        found.append(data if letter in sizes else struct.unpack(letter, data)[0])
    return found


def _tensor(encoded: bytes) -> torch.Tensor:
    address, kind, *numbers = struct.unpack_from(MAP, encoded)
    sizes, nbytes = numbers[:4], numbers[4:7]
    return _at(address, _DTYPES[kind], tuple(reversed(sizes)), (*(n // 2 for n in reversed(nbytes)), 1))


def _at(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def _floats(address: int, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * count).from_address(address), dtype=torch.float32)
