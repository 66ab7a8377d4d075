"""The CUDA C++ kernels of `cuda.cu`: how a row is shared out, and the launches.

Limit: memory bandwidth. On an H200, in shares of the copy bandwidth of the same run (4140 to 4180 GB/s), 1 GiB moved:

    bf16 columns    1024   4096   5000   8192  16384  32768  50257  65536 131072 262144
    forward         1.01   1.02   0.99   0.99   0.98   0.98   0.96   0.99   0.96   0.94
    backward        1.04   1.03   1.03   1.03   1.03   1.03   0.96   1.03   1.02   0.98

Forward tells L2 to keep what it reads longer than what it writes (`row.cuh`): 1.02 instead of 0.99 at 4096 columns,
0.99 instead of 0.97 at 65536. A thread wants two vectors at least: rows of 1024 columns of fp32 take 128 threads, 1.02,
where 256 had 0.91.

Long rows are limited by their exchange: a cluster's blocks start, wait for each other and end together. At 50257
columns five blocks a multiprocessor of 256 threads in clusters of 4 have 0.95, four 0.91, clusters of 2 of 512 threads
0.90, of 8 of 128 threads 0.92, one block for a row 0.83 to 0.87. From `RING_BYTES` on, rows go through the rings of
programs that stay (`streamed.cu`): 0.95 instead of 0.91 and 0.86 at 131072 and 262144 columns of fp32, 0.94 instead of
0.93 at 262144 of bf16. Rings lose at every other length: 0.92 instead of 0.96 at 65536 columns of bf16, 0.61 instead
of 0.86 at 50257.

Tried and lost as well, forward in bf16: reading a row twice, the second time out of L2 (0.68 at 32768);
exponentials kept in fp32 for elements of 16 bits (0.97 at 16384). Loads past L1 and streaming stores cost 8 % at
every length (`row.cuh`), and a barrier of the whole cluster instead of an mbarrier per block waits for stores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from tilewright.kernels import nvrtc, ring
from tilewright.kernels.row import ELEMENTS, Edges, edges, line_of, vectors_of

SOURCE = Path(__file__).parent / "cuda.cu"
RING_SOURCE = Path(__file__).parent / "streamed.cu"
RING_BYTES = 512 * 1024
"""Of a row, from which rings are faster forward than the registers of a cluster."""
Direction = Literal["forward", "backward"]
SIGNATURES = {"forward": "PPqiqq", "backward": "PPPqiqqq"}


@dataclass(frozen=True)
class Plan:
    """How a row is shared out: threads of a block, threads of it that share a row, vectors a thread, blocks a row."""

    threads: int
    width: int
    vectors: int
    cluster: int = 1
    streamed: bool = False
    """The row does not fit: it is read twice, `vectors` a thread at a time."""

    def definitions(self, columns: int, dtype: torch.dtype, lie: Edges, log: bool) -> nvrtc.Definitions:
        """What `cuda.cu` wants to know."""
        return (
            ("ELEMENT", ELEMENTS[dtype]),
            ("EDGES", lie),
            ("LINE", line_of(columns, dtype.itemsize)),
            ("THREADS", self.threads),
            ("WIDTH", self.width),
            ("VECTORS", self.vectors),
            ("CLUSTER", self.cluster),
            ("LOG", int(log)),
        )


STEPS = {
    "forward": (
        (128, 64, 1),
        (256, 128, 1),
        (2048, 256, 1),
        (4096, 512, 1),
        (8192, 256, 4),
        (16384, 256, 8),
        (32768, 256, 16),
        (65536, 512, 16),
        (131072, 1024, 16),
    ),
    "backward": (
        (128, 64, 1),
        (512, 128, 1),
        (1024, 256, 1),
        (2048, 512, 1),
        (4096, 512, 2),
        (8192, 512, 4),
        (16384, 512, 8),
        (32768, 512, 8),
        (65536, 512, 16),
    ),
}
"""Up to so many vectors: threads of a block, blocks of a cluster. The fastest of those measured on an H200."""


def plan(direction: Direction, vectors: int) -> Plan:
    """For rows of so many 16-byte vectors."""
    if vectors <= 64:
        width = next((width for width in (1, 2, 4, 8, 16) if 2 * width >= vectors), 32)
        return Plan(128, width, -(-vectors // width))
    for most, threads, cluster in STEPS[direction]:
        if vectors <= most:
            return Plan(threads, threads, -(-vectors // (threads * cluster)), cluster)
    return Plan(512, 512, 4, 16, streamed=True)


@functools.cache
def _kernel(
    direction: Direction, device: int, columns: int, dtype: torch.dtype, lie: Edges, log: bool
) -> tuple[nvrtc.Kernel, Plan]:
    chosen = plan(direction, vectors_of(columns, dtype.itemsize, lie))
    kernel = nvrtc.kernel(
        SOURCE,
        f"{direction}_streamed" if chosen.streamed else direction,
        SIGNATURES[direction],
        device=device,
        threads=chosen.threads,
        cluster=chosen.cluster,
        definitions=chosen.definitions(columns, dtype, lie, log),
    )
    return kernel, chosen


def forward(x: torch.Tensor, y: torch.Tensor, log: bool) -> None:
    """Softmax (or its logarithm) of the rows of `x` into those of `y`: [N, M] each, rows at any distance."""
    lie = edges(x, y, line=ring.VECTOR)
    if lie == "WHOLE" and x.shape[1] * x.element_size() >= RING_BYTES and ring_plan(x.shape[1], x.dtype):
        _launch_ring(x, y, lie, log)
    else:
        _launch("forward", (x, y), log)


def _launch_ring(x: torch.Tensor, y: torch.Tensor, lie: Edges, log: bool) -> None:
    rows, columns = x.shape
    kernel, chosen, at_once = _ring_kernel(x.device.index, columns, x.dtype, lie, log)
    period = ring.period_of(x.stride(0) * x.element_size() if rows > 1 else ring.VECTOR)
    programs = ring.programs_of(at_once, rows, 1, period)
    kernel((programs * chosen.cluster,), x.data_ptr(), y.data_ptr(), rows, columns, x.stride(0), y.stride(0))


@functools.cache
def _ring_kernel(
    device: int, columns: int, dtype: torch.dtype, lie: Edges, log: bool
) -> tuple[nvrtc.Kernel, ring.Ring, int]:
    """The kernel of rows that go through rings, its plan, and the programs that run at once."""
    chosen = ring_plan(columns, dtype)
    assert chosen is not None, "rows that no ring holds are streamed"
    definitions = (("ELEMENT", ELEMENTS[dtype]), ("EDGES", lie), ("LINE", ring.VECTOR), ("LOG", int(log)))
    kernel = nvrtc.kernel(
        RING_SOURCE, "forward", SIGNATURES["forward"],
        device=device, threads=chosen.threads, shared_bytes=chosen.shared_bytes, cluster=chosen.cluster,
        definitions=(*chosen.definitions(), *definitions),
    )  # fmt: skip
    return kernel, chosen, kernel.programs_at_once()


def ring_plan(columns: int, dtype: torch.dtype) -> ring.Ring | None:
    """Of rows of so many columns; None if no ring holds them."""
    return ring.plan(ring.Task(ring.needed(columns, dtype.itemsize), 1, 8), (ring.Way(8, depth=20),))


def backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor, log: bool) -> None:
    """The gradient of the rows whose result is `y` into `dx`, from that of the result, `dy`: [N, M] each."""
    _launch("backward", (y, dy, dx), log)


def _launch(direction: Direction, tensors: tuple[torch.Tensor, ...], log: bool) -> None:
    first = tensors[0]
    rows, columns = first.shape
    kernel, chosen = _kernel(direction, first.device.index, columns, first.dtype, edges(*tensors), log)
    blocks = -(-rows * chosen.width // chosen.threads) * chosen.cluster
    pointers, strides = [x.data_ptr() for x in tensors], [x.stride(0) for x in tensors]
    kernel((blocks,), *pointers, rows, columns, *strides)
