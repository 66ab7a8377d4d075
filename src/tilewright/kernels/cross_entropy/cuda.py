"""The CUDA C++ kernels of `cuda.cu`: how rows are shared out, and the launches.

Limit: memory bandwidth, but for rows of 512 bytes and fewer, where the instructions of a row's end are. On an
H200, in shares of the copy bandwidth of the same run (4185 GB/s), 1 GiB of logits:

    bf16 columns     256    512   1024   4096   5000   8192  16384  32768  50257 131072 262144
    forward         0.92   0.97   0.98   0.98   0.99   1.00   1.01   0.98   0.97   1.00   1.00
    backward        0.98          1.00   1.00   0.99   1.00   1.00   1.00   1.00   1.00   1.01

Tried for forward and lost: a block for each row that ends with it (0.71 at 256 columns, 0.90 at 131072); maxima
element by element, with masks at every use (0.71 at 256, 0.88 at 50257); joining maxima and sums of a short row's
lanes pair by pair, as long rows do (0.80 at 256); a second kernel over all losses (four times the numbers to add
up that the blocks' shares are); at 256 columns eight vectors a thread (0.83 to 0.91) and two (0.73); at 512 columns
sixteen threads a row (0.91); no question at all whether a vector is the row's, which loads later (0.94 instead of 0.98
at 512, 0.96 instead of 1.00 at 1024); at 256 five blocks a multiprocessor (0.79), blocks of 128 threads (0.91). An
exponent in one instruction instead of two, log2(e) being short enough for the product to be exact, wins 0.02 at 512 and
1024 and 0.004 at 256; it makes the log sum 1.5e-5 wrong and is not taken.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.row import ELEMENTS, Edges, edges, line_of, vectors_of

SOURCE = Path(__file__).parent / "cuda.cu"
FINISH_THREADS = 512


@dataclass(frozen=True)
class Plan:
    """Threads of a block, threads of it that share a row, and 16-byte vectors that a thread has in flight."""

    threads: int
    width: int
    vectors: int
    blocks: int = 1
    """Blocks that a multiprocessor must hold at once: what bounds the registers."""

    def definitions(self, columns: int, dtype: torch.dtype, lie: Edges, smooth: bool) -> nvrtc.Definitions:
        """What `cuda.cu` wants to know."""
        one_round = self.width <= 32 and vectors_of(columns, dtype.itemsize, lie) <= self.width * self.vectors
        return (
            ("ELEMENT", ELEMENTS[dtype]),
            ("EDGES", lie),
            ("LINE", line_of(columns, dtype.itemsize)),
            ("THREADS", self.threads),
            ("WIDTH", self.width),
            ("VECTORS", self.vectors),
            ("BLOCKS", self.blocks),
            ("SMOOTH", int(smooth)),
            ("ONE_ROUND", int(one_round)),
        )


def plan_forward(vectors: int) -> Plan:
    """For rows of so many vectors."""
    if vectors <= 32:
        return Plan(256, 8, 4, 4)
    if vectors <= 128:
        return Plan(128, 8 if vectors <= 64 else 16, 8, 5)
    if vectors <= 256:
        return Plan(128, 16, 4, 8)
    if vectors <= 4096:
        return Plan(256, 32, 4, 4)
    return Plan(64, 64, 4, 16) if vectors <= 8192 else Plan(256, 256, 4, 4)


def plan_backward(vectors: int) -> Plan:
    """For rows of so many vectors."""
    if vectors <= 64:
        return _by_lanes(vectors)
    return Plan(64, 64, 2 if vectors <= 128 else 4)


def _by_lanes(vectors: int) -> Plan:
    """Several rows a block, one for so many lanes of a warp that each has two vectors of it, if that many."""
    width = next((width for width in (1, 2, 4, 8, 16) if 2 * width >= vectors), 32)
    return Plan(128, width, min(-(-vectors // width), 4))


@functools.cache
def _forward(
    device: int, columns: int, dtype: torch.dtype, lie: Edges, smooth: bool
) -> tuple[nvrtc.Kernel, nvrtc.Kernel, Plan, int]:
    """The kernels of rows and of their shares, the plan, and the blocks that run at once."""
    plan = plan_forward(vectors_of(columns, dtype.itemsize, lie))
    rows = nvrtc.kernel(
        SOURCE, "forward", "PPPPPqiqqff",
        device=device, threads=plan.threads, definitions=plan.definitions(columns, dtype, lie, smooth),
    )  # fmt: skip
    one = Plan(FINISH_THREADS, FINISH_THREADS, 1)
    finish = nvrtc.kernel(
        SOURCE, "finish", "PiPPi",
        device=device, threads=FINISH_THREADS, definitions=one.definitions(1, dtype, "WHOLE", False),
    )  # fmt: skip
    return rows, finish, plan, rows.programs_at_once()


@functools.cache
def _backward(
    device: int, columns: int, dtype: torch.dtype, lie: Edges, smooth: bool
) -> tuple[nvrtc.Kernel, Plan, int]:
    """The kernel, its plan, and the blocks that share a row."""
    vectors = vectors_of(columns, dtype.itemsize, lie)
    plan = plan_backward(vectors)
    kernel = nvrtc.kernel(
        SOURCE, "backward", "PPPPPPqiiqqqqff",
        device=device, threads=plan.threads, definitions=plan.definitions(columns, dtype, lie, smooth),
    )  # fmt: skip
    return kernel, plan, -(-vectors // (plan.width * plan.vectors))


def forward(
    logits: torch.Tensor, target: torch.Tensor, ignored: int, smoothing: float, z_loss: float, reduction: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss, each row's maximum and log Σ exp(x - maximum) [2, N], and what one row counts for [].

    Logits [N, C] with rows at any distance, target [N] contiguous int64.
    """
    rows, columns = logits.shape
    device = logits.device
    launch, finish, plan, at_once = _forward(device.index, columns, logits.dtype, edges(logits), smoothing != 0)
    blocks = min(-(-rows * plan.width // plan.threads), at_once)
    losses = torch.empty(rows, dtype=logits.dtype, device=device) if reduction == "none" else None
    statistics = torch.empty((2, rows), dtype=torch.float32, device=device)
    shares = torch.empty((blocks, 2), dtype=torch.float32, device=device)
    launch(
        (blocks,),
        logits.data_ptr(), target.data_ptr(), 0 if losses is None else losses.data_ptr(), statistics.data_ptr(),
        shares.data_ptr(), rows, columns, logits.stride(0), ignored, smoothing, z_loss,
    )  # fmt: skip
    if losses is not None:
        return losses, statistics, torch.ones((), dtype=torch.float32, device=device)
    total = torch.empty((), dtype=logits.dtype, device=device)
    weight = torch.empty((), dtype=torch.float32, device=device)
    finish((1,), shares.data_ptr(), blocks, total.data_ptr(), weight.data_ptr(), reduction == "mean")
    return total, statistics, weight


def backward(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    ignored: int,
    smoothing: float,
    z_loss: float,
) -> None:
    """The gradient of the logits [N, C] into `out`, from that of the loss, [] or [N]."""
    rows, columns = logits.shape
    launch, plan, pieces = _backward(logits.device.index, columns, logits.dtype, edges(logits, out), smoothing != 0)
    launch(
        (-(-rows * plan.width // plan.threads) * pieces,),
        logits.data_ptr(), target.data_ptr(), statistics.data_ptr(), gradient.data_ptr(), weight.data_ptr(),
        out.data_ptr(), rows, columns, pieces, logits.stride(0), out.stride(0),
        gradient.stride(0) if gradient.dim() else 0, ignored, smoothing, z_loss,
    )  # fmt: skip
