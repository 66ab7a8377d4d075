"""Attention's Hopper kernels on the fake driver: they compute in float64 what their parameters ask for."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch

from tests.launch.driver import FakeDriver, FakeKernel, word_at
from tilewright.hardware.architectures import stated_limits
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper.launch import SIGNATURE
from tilewright.kernels.attention.hopper.problem import Problem
from tilewright.kernels.attention.request import Request, strides_of

H200 = stated_limits("9.0", multiprocessors=132, l2_bytes=60 << 20)
DTYPES = {6: torch.float16, 9: torch.bfloat16}
"""By CUtensorMapDataType."""
TENSOR = 9
"""Parameters of one tensor of the forward: its map, four sizes, four strides."""


class HopperKernels:
    """`forward`, and `backward` with its three; what one launch leaves for the next is kept here."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.forward: FakeKernel = driver.kernel("forward", SIGNATURE, self._forward, others=4)
        ends = hopper_backward.PREPARE, hopper_backward.FINISH
        prepare, finish = (
            driver.kernel(name, letters, body)
            for name, letters, body in zip(("prepare", "finish"), ends, (self._prepare, self._finish), strict=True)
        )
        main = driver.kernel("main", "", self._main, others=7)
        self.backward = hopper_backward.Kernels(prepare, main, finish)  # type: ignore[arg-type]
        self._begun: tuple[int, ...] = ()
        self._dq = torch.empty(0)

    def _mapped(self, place: int) -> torch.Tensor:
        """The tensor of an encoded map, whose first byte is its number."""
        dtype, address, sizes, strides, _ = self._driver.maps[ctypes.c_uint8.from_address(place).value - 1]
        return at(address, DTYPES[dtype], tuple(reversed(sizes)), (*(n // 2 for n in reversed(strides)), 1))

    def _forward(self, *places: int) -> None:
        q, k, v, out = (self._mapped(places[TENSOR * i]) for i in range(4))
        for i, x in enumerate((q, k, v, out)):
            sizes, strides = places[TENSOR * i + 1 :][:4], places[TENSOR * i + 5 :][:4]
            assert tuple(integer(place) for place in sizes) == x.shape
            assert tuple(word_at(place) for place in strides) == x.stride()
        lse, _, scale, _, heads, group, queries, keys, right, left = places[4 * TENSOR :][:10]
        assert (integer(heads), integer(queries), integer(keys)) == (q.shape[1], q.shape[2], k.shape[2])
        assert integer(group) * k.shape[1] == q.shape[1]
        shift = k.shape[2] - q.shape[2]
        band = shift - integer(left), integer(right) - shift
        result, sums = attended(q, k, v, single(scale) * math.log(2), band)
        out.copy_(result)
        at(word_at(lse), torch.float32, (sums.numel(),), (1,)).copy_(sums.flatten())

    def _prepare(self, *places: int) -> None:
        self._begun = tuple(word_at(place) for place in places)

    def _main(self, *places: int) -> None:
        q, k, v, dout, dk, dv = (self._mapped(place) for place in places[:6])
        problem = Problem.from_address(places[6])
        out_at, dout_at, lse_at, scaled_lse, delta, sums, work_counters, *steps = self._begun
        assert (problem.dq_sums, problem.lse, problem.delta) == (sums, scaled_lse, delta)
        assert problem.work_counters == work_counters and dout_at == dout.data_ptr()
        for mine, true, size in zip(steps[3:6], dout.stride(), q.shape, strict=False):
            assert mine == true or size == 1
        out = at(out_at, q.dtype, q.shape, (*steps[:3], 1))
        lse = at(lse_at, torch.float32, tuple(q.shape[:3]), (q.shape[1] * q.shape[2], q.shape[2], 1))
        band = problem.below + k.shape[2] - q.shape[2], problem.above - k.shape[2] + q.shape[2]
        gradients = differentiated(q, k, v, out, lse, dout, problem.scale, band)
        # Sums of dQ lie at the begin of the scratch.
        at(sums, torch.float32, ((work_counters - sums) // 4,), (1,)).fill_(math.nan)
        for to, gradient in zip((dk, dv), gradients[1:], strict=True):
            to.copy_(gradient)
        self._dq = gradients[0]
        if problem.ahead:
            strides = problem.dq_batch, problem.dq_head, problem.dq_position, 1
            at(problem.dq, q.dtype, q.shape, strides).copy_(self._dq)

    def _finish(self, *places: int) -> None:
        sums, dq_at, *steps = (word_at(place) for place in places[:5])
        assert sums == self._begun[5] and (integer(places[5]), integer(places[6])) == self._dq.shape[2:]
        at(dq_at, torch.bfloat16, self._dq.shape, (*steps, 1)).copy_(self._dq)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, band: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exp in float64; a query sees the keys from `band[0]` before to `band[1]` after it."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (scale * q.double() @ k.mT).masked_fill(hidden(q, k, band), -math.inf)
    lse = s.logsumexp(-1)
    return (s - lse[..., None]).exp().nan_to_num() @ v, lse


def differentiated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor,
    scale: float, band: tuple[int, int],
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """dq, dk and dv in float64, from the result and the log-sum-exp that the forward left."""
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    p = (scale * q.double() @ wide_k.mT - lse.double()[..., None]).exp().masked_fill(hidden(q, k, band), 0.0)
    ds = scale * p * (dout.double() @ wide_v.mT - (dout.double() * out.double()).sum(-1, keepdim=True))
    dk, dv = ds.mT @ q.double(), p.mT @ dout.double()
    return ds @ wide_k, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def hidden(q: torch.Tensor, k: torch.Tensor, band: tuple[int, int]) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    return (ahead < -band[0]) | (ahead > band[1])


def request_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Request:
    (batch, heads, queries, size), (_, kv_heads, keys, value_size) = q.shape, v.shape
    return Request(
        q.device, q.dtype, batch, heads, kv_heads, queries, keys, size, value_size, strides_of(q), strides_of(k),
        strides_of(v), dispatch.aligned(q, k, v), size**-0.5, None, None,
    )  # fmt: skip


def integer(place: int) -> int:
    return ctypes.c_int32.from_address(place).value


def single(place: int) -> float:
    return ctypes.c_float.from_address(place).value


def at(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Memory as a tensor."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)
    memory = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
