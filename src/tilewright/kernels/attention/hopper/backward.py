"""Attention's backward on Hopper (`backward.cu`): which calls it takes, their plans and kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.attention.hopper.tiles import needs_wgmma
from tilewright.kernels.attention.request import Request
from tilewright.kernels.device import NARROW
from tilewright.launch.nvrtc import Kernel, available, kernel

HERE = Path(__file__).parent
ENDS = HERE / "backward_prepare_finish.cu"
HEADS = (64, 128, 256)
"""Head sizes of the builds; TMA pads others with zeros."""
KEYS = 128
"""Keys of a block, which a program owns, or a cluster of two."""
WIDTH = 64
"""Columns of a tile in shared memory."""
VECTOR = 8
"""16-bit values in 16 bytes, of which rows must be multiples."""
GROUPS, GROUP_THREADS = 2, 128
"""Math warpgroups."""
THREADS = GROUP_THREADS * (1 + GROUPS)
END_THREADS = 256
UNLIMITED = 2**30
"""A band's width without a limit: more than any distance of two positions."""
LONGEST = 2**24
LARGEST_GRID = 65535
PREPARE, FINISH = "PPPPPPPqqqqqqiii", "PPqqqiif"
DQ_WARPS = 2
"""Warps that zero and round sums of dQ."""


@dataclass(frozen=True)
class BackwardTiles:
    """One build of the kernel."""

    head: int
    queries: int
    """Queries of a step."""
    q_stages: int
    dout_stages: int
    cluster: int = 1
    """Programs that share the keys."""

    @property
    def source(self) -> Path:
        """The source file: one program per block of keys, or a cluster of two."""
        return HERE / ("backward.cu" if self.cluster == 1 else "backward_cluster.cu")

    @property
    def shared_bytes(self) -> int:
        """K, V, rings of Q with lse and of dO with Δ, two buffers of dSᵀ, scratch of warps or clusters, barriers."""
        keys, queries = KEYS // self.cluster * self.head * 2, self.queries * (self.head * 2 + 4)
        ring = (self.q_stages + self.dout_stages) * queries
        barriers = 8 * (4 * (self.q_stages + self.dout_stages) + 20) + 128
        if self.cluster == 1:
            # Sums of 64 columns of dQ, for each warp that rounds them.
            shared = DQ_WARPS * WIDTH * (self.queries if self.head == 128 else self.queries // 2) * 4
        else:
            # Half of the other program's K, and P on its way from one warpgroup to the other.
            shared = keys // 2 + self.queries * KEYS
        return 2 * keys + ring + 2 * self.queries * KEYS * 2 + shared + barriers

    def definitions(
        self, banded: bool, dtype: torch.dtype, dq_warps: bool, ping_pong: bool
    ) -> tuple[tuple[str, int], ...]:
        """The constants that the source names at its top."""
        sizes = ("HEAD", self.head), ("QUERIES", self.queries), ("Q_STAGES", self.q_stages)
        more = ("DO_STAGES", self.dout_stages), ("DQ_WARPS", int(dq_warps)), ("PING_PONG", int(ping_pong))
        alone = (*sizes, *more) if self.cluster == 1 else ()
        return (*alone, ("BANDED", int(banded)), ("HALF", int(dtype == torch.float16)))


SHAPES = {
    64: BackwardTiles(head=64, queries=96, q_stages=4, dout_stages=2),
    128: BackwardTiles(head=128, queries=64, q_stages=4, dout_stages=2),
    256: BackwardTiles(head=256, queries=64, q_stages=2, dout_stages=1, cluster=2),
}
SHORT = BackwardTiles(head=64, queries=64, q_stages=4, dout_stages=2)
"""For head size 64 and up to SHORTEST queries, which blocks of 96 would fill badly."""
SHORTEST = 512
LONGEST_FOR_DQ_WARPS = 4096
"""Queries up to which it pays to zero and round the sums of dQ while they are in the L2 cache."""
MANY_BLOCKS = 8 * 132
"""Spare warps end after the last products; on an H200 they pay from this many blocks of keys."""
SHORT_WALKS = 2048
"""Queries up to which programs are persistent."""
LONG_WALKS = 8192
"""Queries from which warpgroups take turns."""


def supports(request: Request, limits: DeviceLimits) -> str | None:
    """Why the backward of `request` is not computed here, or None; as of the forward."""
    is_here = request.device.type == "cuda"
    missing = is_here and limits.wgmma and not available(request.device.index or 0)
    return needs_wgmma(limits) or ("the package cuda-bindings is not installed" if missing else refuses(request))


def refuses(request: Request) -> str | None:
    """The reasons of `supports` that depend on the call, not on the machine."""
    if request.dtype not in NARROW:
        return f"{request.dtype}: only 16-bit floats"
    extras = {
        "a soft cap": request.softcap != 0,
        "a mask": request.mask != "none",
        "ALiBi": request.alibi,
        "dropout": request.dropout > 0,
        "packed sequences": request.sequences > 0,
        "a deterministic order": request.deterministic,
        "values of a head size of their own": request.head_size != request.value_size,
        f"head size {request.head_size}": request.head_size > HEADS[-1] or request.head_size % VECTOR != 0,
        "rows that are no multiples of 16 bytes": not request.aligned,
        "a scale that is not positive": not request.scale > 0,
        "an empty tensor": 0 in (request.batch, request.heads, request.queries, request.keys),
        f"more than {LONGEST} positions": max(request.queries, request.keys) > LONGEST,
        f"a batch or heads over {LARGEST_GRID}": max(request.batch, request.heads) > LARGEST_GRID,
        "an expanded tensor": _expanded(request),
    }
    refused = [name for name, asked in extras.items() if asked]
    return f"not on Hopper's own path: {', '.join(refused)}" if refused else None


def _expanded(request: Request) -> bool:
    lengths = (request.batch, request.heads, request.queries), (request.batch, request.kv_heads, request.keys)
    q, k = lengths
    pairs = ((q, request.q_strides), (k, request.k_strides), (k, request.v_strides))
    return any(
        size > 1 and stride == 0 for sizes, strides in pairs for size, stride in zip(sizes, strides, strict=False)
    )


def filled(request: Request, multiprocessors: int) -> float:
    """The share of the multiprocessors' time that is filled if blocks of keys take equally long."""
    shape = SHAPES[next(head for head in HEADS if request.head_size <= head)]
    rounds = -(-request.keys // KEYS) * request.kv_heads * request.batch / (multiprocessors // shape.cluster)
    return rounds / math.ceil(rounds)


@dataclass(frozen=True)
class BackwardLaunches:
    """The launches of a request as plain data, without its tensors."""

    shape: BackwardTiles
    dq_warps: bool
    """Whether spare warps zero and round the sums of dQ, in place of the launches before and after."""
    ping_pong: bool
    """Whether the two math warpgroups take turns."""
    q_blocks: int
    k_blocks: int
    """Blocks of keys of a head."""
    programs: int
    """Programs of the main kernel."""
    below: int
    above: int
    ahead: int = 0
    """Key heads whose sums of dQ are zeroed before the products; those of other heads are zeroed during the products.
    0: launches of their own zero all sums before and round them after the products."""


@functools.lru_cache(maxsize=1024)
def plan(request: Request, limits: DeviceLimits) -> BackwardLaunches:
    """The launches of a supported `request`, planned from metadata alone."""
    head = next(head for head in HEADS if request.head_size <= head)
    shape = SHORT if head == SHORT.head and request.queries <= SHORTEST else SHAPES[head]
    return planned(request, limits, shape, _uses_dq_warps(request, shape), _uses_ping_pong(request, shape))


def planned(
    request: Request, limits: DeviceLimits, shape: BackwardTiles, dq_warps: bool, ping_pong: bool = False
) -> BackwardLaunches:
    """`plan` with given tiles, `dq_warps` and `ping_pong`; clusters support neither."""
    more = request.keys - request.queries
    k_blocks, heads = -(-request.keys // KEYS), request.kv_heads * request.batch
    # A program's registers fill a multiprocessor; clusters pair neighbouring multiprocessors.
    at_once = limits.multiprocessors // shape.cluster
    clusters, ahead = k_blocks * heads, 0
    if dq_warps:
        clusters = min(clusters, at_once)
        # Three times the heads that all programs begin with, so that zeros are there before they are waited for.
        ahead = min(heads, 3 * -(-clusters // k_blocks) + 2)
    elif _is_persistent(request, shape):
        clusters = min(clusters, at_once)
    return BackwardLaunches(
        shape=shape,
        dq_warps=dq_warps,
        ping_pong=ping_pong,
        q_blocks=-(-request.queries // shape.queries),
        k_blocks=k_blocks,
        programs=clusters * shape.cluster,
        below=UNLIMITED if request.left is None else min(UNLIMITED, request.left - more),
        above=UNLIMITED if request.right is None else min(UNLIMITED, more + request.right),
        ahead=ahead,
    )


def _uses_dq_warps(request: Request, shape: BackwardTiles) -> bool:
    """Whether spare warps zero and round the sums of dQ. They need the time of long walks."""
    blocks = -(-request.keys // KEYS) * request.kv_heads * request.batch
    long = request.left is None and request.queries <= LONGEST_FOR_DQ_WARPS and request.keys >= SHORTEST
    return shape.cluster == 1 and long and blocks >= MANY_BLOCKS


def _uses_ping_pong(request: Request, shape: BackwardTiles) -> bool:
    """Whether one warpgroup multiplies while the other computes dS: 1.04 times as fast in long walks of size 128."""
    return shape.head == 128 and request.left is None and request.queries >= LONG_WALKS


def _is_persistent(request: Request, shape: BackwardTiles) -> bool:
    """Whether programs take one block of keys after another. In long walks there is little to win between blocks."""
    return request.queries <= SHORT_WALKS or not (request.banded or shape.head == 128)


class Kernels(NamedTuple):
    """The kernels of a plan, loaded on its device."""

    prepare: Kernel
    main: Kernel
    finish: Kernel


def built(made: BackwardLaunches, request: Request) -> Kernels:
    """The kernels of a plan, compiled and loaded on the request's device."""
    shape, device = made.shape, request.device.index or 0
    ends = (("HEAD", shape.head), ("QUERIES", shape.queries), ("HALF", int(request.dtype == torch.float16)))
    main = kernel(
        shape.source,
        "attention_backward",
        "",
        device=device,
        threads=THREADS,
        shared_bytes=shape.shared_bytes,
        cluster=shape.cluster,
        definitions=shape.definitions(request.banded, request.dtype, made.dq_warps, made.ping_pong),
    )
    return Kernels(
        kernel(ENDS, "attention_prepare", PREPARE, device=device, threads=END_THREADS, definitions=ends),
        main,
        kernel(ENDS, "attention_finish", FINISH, device=device, threads=END_THREADS, definitions=ends),
    )
