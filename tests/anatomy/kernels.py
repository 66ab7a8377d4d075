"""Triton kernels of a user, with the function that launches each; loaded as `file.py:kernel`."""

import torch
import triton
import triton.language as tl

from tilewright.hardware.probes import read_shared, shared_memory_reader  # noqa: F401, named as a target


@triton.jit
def weighted(x, w, out, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
        weight = tl.load(w + column, mask=column < columns, other=0.0)
        total += tl.sum(tile.to(tl.float32) * weight.to(tl.float32)[None, :], 1)
    tl.store(out + row, total, mask=row < rows)


def launch():
    x, w = torch.randn(1000, 512, device="cuda"), torch.randn(512).to("cuda")
    out = torch.empty(1000, device=x.device)
    assert x.is_cuda and w.device.type == "cuda" and torch.cuda.is_available()
    weighted[lambda meta: (triton.cdiv(1000, meta["ROWS"]),)](x, w, out, 1000, 512, x.stride(0), ROWS=16, COLUMNS=64)


@triton.jit
def product(a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    down, across = tl.program_id(0), tl.program_id(1)
    row, column = down * BLOCK_M + tl.arange(0, BLOCK_M), across * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + row[:, None] * k + inner[None, :], mask=(row < m)[:, None], other=0.0)
        right = tl.load(b + inner[:, None] * n + column[None, :], mask=(column < n)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * n + column[None, :], total.to(tl.bfloat16), mask=inside)


def launch_product():
    m, n, k = 1000, 4096, 256
    a, b, c = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in ((m, k), (k, n), (m, n)))
    product[triton.cdiv(m, 128), triton.cdiv(n, 128)](a, b, c, m, n, k, 128, 128, 64, num_warps=8)


@triton.jit
def gathered(x, at, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + tl.load(at + i, mask=i < n, other=0), mask=i < n), mask=i < n)


@triton.jit
def past_the_end(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i))


def launch_gathered():
    x, out = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for n in (5000, 4096))
    gathered[(1,)](x, torch.zeros(4096, dtype=torch.int64, device="cuda"), out, 4096, BLOCK=4096)


def launch_past_the_end():
    x, out = (torch.zeros(1000, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    past_the_end[(1,)](x, out, BLOCK=1024)


def launch_read_shared():
    read, _ = shared_memory_reader(torch.device("cuda"))
    read(512)


def launch_nothing():
    return torch.empty(3, device="cuda")


def launch_badly():
    raise ValueError("no such size")
