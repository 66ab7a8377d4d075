"""The CUDA C++ kernels of `cuda.cu` and `short.cu`: how rows are shared out, and the launches.

Limit: memory bandwidth, but for rows of 512 bytes, where some of the instructions remain. On an H200, in shares of the
copy bandwidth of the same run (4200 GB/s), 1 GiB of logits, both launches of forward:

    bf16 columns     256    512   1024   4096   5000   8192  32768  50257 131072
    forward         0.95   0.98   1.01   0.99   0.99   1.01   1.01   0.97   1.02
    backward        0.98          1.00   1.00   0.99   1.00   1.00   1.00   1.01

What won, forward of short rows: the end of a row once for as many rows as lanes share one, 220 instructions a turn of a
warp instead of 394 (at 256, 512 and 1024 columns the rows' kernel alone 0.95, 0.99 and 1.03 instead of 0.92, 0.95 and
0.98; 0.74 instead of 0.63 at 296); as many vectors a lane as the row has (0.91 instead of 0.74 there); blocks in 16
times the number that runs at once, so that multiprocessors that are ahead take more (0.94 to 0.95, 0.96 to 0.98, 1.00
to 1.01; 4 to 8 times in longer rows, up to 0.02).

Tried for forward and lost: a block for each row that ends with it (0.71 at 256 columns, 0.90 at 131072); maxima
element by element, with masks at every use (0.71 at 256, 0.88 at 50257); joining maxima and sums of a short row's
lanes pair by pair, as long rows do (0.80 at 256); a second kernel over all losses (four times the numbers to add
up that the blocks' shares are); losses added up by the block that is last instead of a second launch (3.5 us instead of
2.5); a warp's 32 rows side by side, whose statistics fill whole sectors, instead of a block's (0.97 instead of 0.95
with blocks that stay, but equal with 8 times as many, and few programs where rows are few); blocks of 128 threads (0.94
for 0.95 at 256), five blocks a multiprocessor (the same), four lanes a row (0.96), sixteen (0.94). An exponent in one
instruction instead of two, log2(e) times the maximum being taken off inside of the multiply-add: 0.963 for 0.947 at 256
but 0.987 for 0.994 at 512; large logits would need their exponents mended, so it is not taken.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.row import ELEMENTS, Edges, edges, line_of, vectors_of

SOURCE = Path(__file__).parent / "cuda.cu"
SHORT_SOURCE = Path(__file__).parent / "short.cu"
FINISH_THREADS = 512


@dataclass(frozen=True)
class Plan:
    """Threads of a block, threads of it that share a row, and 16-byte vectors that a thread has in flight."""

    threads: int
    width: int
    vectors: int
    blocks: int = 1
    """Blocks that a multiprocessor must hold at once: what bounds the registers."""
    grids: int = 1
    """Times the blocks that run at once to launch, forward: with more, early blocks make room for others."""

    def holds(self, vectors: int) -> bool:
        """Whether lanes of a warp hold a row of so many vectors at once."""
        return self.width <= 32 and vectors <= self.width * self.vectors

    def filled(self, vectors: int, lie: Edges) -> bool:
        """Whether each lane of a row of so many vectors has all of its own, and whole."""
        return lie == "WHOLE" and vectors == self.width * self.vectors

    def definitions(self, columns: int, dtype: torch.dtype, lie: Edges, smooth: bool) -> nvrtc.Definitions:
        """What `cuda.cu` and `short.cu` want to know."""
        full = self.filled(vectors_of(columns, dtype.itemsize, lie), lie)
        return (
            ("ELEMENT", ELEMENTS[dtype]),
            ("EDGES", lie),
            ("LINE", line_of(columns, dtype.itemsize)),
            ("THREADS", self.threads),
            ("WIDTH", self.width),
            ("VECTORS", self.vectors),
            ("BLOCKS", self.blocks),
            ("SMOOTH", int(smooth)),
            ("FULL", int(full)),
        )


def plan_forward(vectors: int, lie: Edges) -> Plan:
    """For rows of so many vectors."""
    if vectors <= 128:
        width = 8 if vectors <= 64 else 16
        each = -(-vectors // width)
        # Rows that leave lanes without a vector, or with a part of one, take more registers.
        loose = int(lie != "WHOLE" or vectors % width != 0)
        return Plan(256, width, each, 4 - loose, 16) if each <= 4 else Plan(128, width, each, 5 - loose, 16)
    if vectors <= 256:
        return Plan(128, 16, 4, 8, 16)
    if vectors <= 4096:
        return Plan(256, 32, 4, 4, 8)
    return Plan(64, 64, 4, 16, 4) if vectors <= 8192 else Plan(256, 256, 4, 4, 4)


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
    """The kernels of rows and of their shares, the plan, and the blocks to launch at most."""
    vectors = vectors_of(columns, dtype.itemsize, lie)
    plan = plan_forward(vectors, lie)
    rows = nvrtc.kernel(
        SHORT_SOURCE if plan.holds(vectors) else SOURCE, "forward", "PPPPPqiqqff",
        device=device, threads=plan.threads, definitions=plan.definitions(columns, dtype, lie, smooth),
    )  # fmt: skip
    one = Plan(FINISH_THREADS, FINISH_THREADS, 1)
    finish = nvrtc.kernel(
        SOURCE, "finish", "PiPPi",
        device=device, threads=FINISH_THREADS, definitions=one.definitions(1, dtype, "WHOLE", False),
    )  # fmt: skip
    return rows, finish, plan, plan.grids * rows.programs_at_once()


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
    launch, finish, plan, most = _forward(device.index, columns, logits.dtype, edges(logits), smoothing != 0)
    blocks = min(-(-rows * plan.width // plan.threads), most)
    statistics = torch.empty((2, rows), dtype=torch.float32, device=device)
    losses = torch.empty(rows, dtype=logits.dtype, device=device) if reduction == "none" else None
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
