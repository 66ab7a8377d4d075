"""Attention's backward on Hopper (`hopper_backward.cu`): what it takes, its plan for a request, its launches."""

from __future__ import annotations

import ctypes
import functools
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tilewright.kernels.attention.request import Operands, Request
from tilewright.kernels.device import NARROW
from tilewright.kernels.nvrtc import Kernel, available, kernel, stream
from tilewright.records.errors import CompilerError

HERE = Path(__file__).parent
ENDS = HERE / "hopper_backward_ends.cu"
HEADS = (64, 128, 256)
"""Head sizes that there are kernels for; others are padded up with zeros by the copies."""
KEYS = 128
"""That a program owns, or a cluster of two."""
WIDTH = 64
"""Columns of a tile in shared memory."""
VECTOR = 8
"""16-bit values in 16 bytes: what rows must be multiples of."""
GROUPS, GROUP_THREADS = 2, 128
"""Warpgroups that multiply."""
THREADS = GROUP_THREADS * (1 + GROUPS)
END_THREADS = 256
LOG2_E = 1.4426950408889634
UNLIMITED = 2**30
"""A band's width where there is no limit: more than any distance of two positions."""
LONGEST = 2**24
LARGEST_GRID = 65535
PREPARE, FINISH = "PPPPPPPqqqqqqii", "PPqqqiif"


@dataclass(frozen=True)
class Shape:
    """One build of the kernel."""

    head: int
    queries: int
    """Of a step."""
    q_stages: int
    dout_stages: int
    cluster: int = 1
    """Programs that share the keys."""

    @property
    def source(self) -> Path:
        """The kernel of one program a block of keys, or of two."""
        return HERE / ("hopper_backward.cu" if self.cluster == 1 else "hopper_backward_wide.cu")

    @property
    def shared_bytes(self) -> int:
        """K, V, rings of Q and dO with a number for each row, dSᵀ twice, what a cluster shares, barriers, places."""
        keys, queries = KEYS // self.cluster * self.head * 2, self.queries * (self.head * 2 + 4)
        ring = (self.q_stages + self.dout_stages) * queries
        barriers = 8 * (2 * (self.q_stages + self.dout_stages) + 16) + 2 * 16
        # Half of the neighbour's K, and the weights that one warpgroup hands to the other.
        shared = 0 if self.cluster == 1 else keys // 2 + self.queries * KEYS
        return 2 * keys + ring + 2 * self.queries * KEYS * 2 + shared + barriers

    def definitions(self, banded: bool, dtype: torch.dtype) -> tuple[tuple[str, int], ...]:
        """The settings that the source names at its top."""
        sizes = ("HEAD", self.head), ("QUERIES", self.queries), ("Q_STAGES", self.q_stages)
        alone = (*sizes, ("DO_STAGES", self.dout_stages)) if self.cluster == 1 else ()
        return (*alone, ("BANDED", int(banded)), ("HALF", int(dtype == torch.float16)))


SHAPES = {
    64: Shape(head=64, queries=96, q_stages=4, dout_stages=2),
    128: Shape(head=128, queries=64, q_stages=4, dout_stages=2),
    256: Shape(head=256, queries=64, q_stages=2, dout_stages=1, cluster=2),
}
SHORT = Shape(head=64, queries=64, q_stages=4, dout_stages=2)
"""For head size 64 and up to SHORTEST queries, of which blocks of 96 would leave a part empty."""
SHORTEST = 512
SHORT_WALKS = 2048
"""Queries that a program gets through soon."""


class Problem(ctypes.Structure):
    """`Problem` of the source."""

    _fields_ = (
        ("dq", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("handed_out", ctypes.c_void_p),
        ("queries", ctypes.c_int),
        ("keys", ctypes.c_int),
        ("q_blocks", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("group", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("k_blocks", ctypes.c_int),
        ("blocks", ctypes.c_int),
        ("below", ctypes.c_int),
        ("above", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("scale_log2", ctypes.c_float),
    )


def supports(request: Request) -> str | None:
    """Why the backward of `request` is not computed here, or None."""
    if request.device.type != "cuda" or request.dtype not in NARROW:
        return f"{request.dtype} on {request.device.type}: only 16-bit floats on a GPU"
    if torch.cuda.get_device_capability(request.device) != (9, 0):
        return "the matrix instructions are those of compute capability 9.0"
    if not available(request.device.index or 0):
        return "the package cuda-bindings is not installed"
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


@dataclass(frozen=True)
class Plan:
    """What is built and counted once for all calls of a request."""

    shape: Shape
    main: Kernel
    prepare: Kernel
    finish: Kernel
    q_blocks: int
    k_blocks: int
    """Of a head."""
    programs: int
    """Of the main kernel."""
    below: int
    above: int


@functools.lru_cache(maxsize=1024)
def plan(request: Request) -> Plan:
    """Kernels and counts for `request`, which `supports` takes. CompilerError where they cannot be built."""
    head = next(head for head in HEADS if request.head_size <= head)
    return planned(request, SHORT if head == SHORT.head and request.queries <= SHORTEST else SHAPES[head])


def planned(request: Request, shape: Shape) -> Plan:
    """`plan` with a shape of one's own."""
    device = request.device.index or 0
    more = request.keys - request.queries
    half = (("HALF", int(request.dtype == torch.float16)),)
    ends = (("HEAD", shape.head), ("QUERIES", shape.queries), *half)
    main = kernel(
        shape.source,
        "attention_backward",
        "",
        device=device,
        threads=THREADS,
        shared_bytes=shape.shared_bytes,
        cluster=shape.cluster,
        definitions=shape.definitions(request.banded, request.dtype),
    )
    k_blocks = -(-request.keys // KEYS)
    clusters = k_blocks * request.kv_heads * request.batch
    if _stay(request, shape):
        clusters = min(clusters, main.programs_at_once())
    return Plan(
        shape=shape,
        main=main,
        prepare=kernel(ENDS, "attention_prepare", PREPARE, device=device, threads=END_THREADS, definitions=ends),
        finish=kernel(ENDS, "attention_finish", FINISH, device=device, threads=END_THREADS, definitions=ends),
        q_blocks=-(-request.queries // shape.queries),
        k_blocks=k_blocks,
        programs=clusters * shape.cluster,
        below=UNLIMITED if request.left is None else min(UNLIMITED, request.left - more),
        above=UNLIMITED if request.right is None else min(UNLIMITED, more + request.right),
    )


def _stay(request: Request, shape: Shape) -> bool:
    """Whether programs take one block of keys after another, as each gets through its last.

    With long walks there is little to win between blocks: at 4096 queries and more, a program for each block was up
    to 5 % faster where walks differ in length, and 1 to 2 % in head size 128; 1 to 3 % slower elsewhere.
    """
    return request.queries <= SHORT_WALKS or not (request.banded or shape.head == 128)


def backward(
    request: Request,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """Writes dq [B, H, Sq, D], dk and dv [B, Hkv, Sk, D] of attention whose gradient is `dout` [B, H, Sq, D].

    All in q's dtype, with rows that are contiguous and multiples of 16 bytes; lse is fp32 [B, H, Sq], the
    natural logarithm of the sum of exponentials (-inf where a query sees no key). dQ is summed in fp32 in
    no fixed order, in scratch of four bytes for each of its elements.
    """
    launch(plan(request), request, operands, out, lse, dout, dq, dk, dv)


def launch(
    made: Plan,
    request: Request,
    operands: Operands,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    """`backward` by a plan."""
    shape, grid = made.shape, (made.q_blocks, request.heads, request.batch)
    rows = request.batch * request.heads * made.q_blocks * shape.queries
    # Sums of dQ, then lse and Δ: what one program takes is a multiple of 16 bytes everywhere. Last a count.
    scratch = torch.empty(rows * (shape.head + 2) + 1, dtype=torch.float32, device=dout.device)
    sums = scratch.data_ptr()
    scaled_lse = sums + 4 * rows * shape.head
    delta = scaled_lse + 4 * rows
    handed_out = delta + 4 * rows
    made.prepare(
        grid,
        *(out.data_ptr(), dout.data_ptr(), lse.data_ptr(), scaled_lse, delta, sums, handed_out),
        *(*out.stride()[:3], *dout.stride()[:3], request.queries, request.head_size),
    )
    problem = Problem(sums, scaled_lse, delta, handed_out, request.queries, request.keys, made.q_blocks, request.heads)
    problem.group, problem.kv_heads, problem.k_blocks = request.group, request.kv_heads, made.k_blocks
    problem.blocks = made.k_blocks * request.kv_heads * request.batch
    problem.below, problem.above = made.below, made.above
    # The weight of a single key is 1 whatever its score: its gradients are zero, without the roundings of dP - Δ.
    scale = request.scale if request.keys > 1 else 0.0
    problem.scale, problem.scale_log2 = scale, request.scale * LOG2_E
    q, k, v = operands.q, operands.k, operands.v
    keys, part = KEYS // shape.cluster, KEYS // GROUPS
    boxes = (q, shape.queries), (k, keys), (v, keys), (dout, shape.queries), (dk, part), (dv, part)
    maps = [_tensor_map(x.data_ptr(), tuple(x.shape), x.stride(), height, x.dtype) for x, height in boxes]
    addresses = (ctypes.c_void_p * 7)(*(at for _, at in maps), ctypes.addressof(problem))
    made.main.launch(made.programs, 1, 1, stream(made.main.device), ctypes.addressof(addresses))
    made.finish(grid, sums, dq.data_ptr(), *dq.stride()[:3], request.queries, request.head_size, scale)


@functools.lru_cache(maxsize=4096)
def _tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], rows: int, dtype: torch.dtype
) -> tuple[Any, int]:
    """How the copy engine finds tiles of `rows` x 64 in [B, H, S, D]: 128 bytes of Hopper's, and where they are."""
    driver = importlib.import_module("cuda.bindings.driver")
    kinds = driver.CUtensorMapDataType
    bf16, fp16 = kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
    u64, u32 = driver.cuuint64_t, driver.cuuint32_t
    steps = [2 * stride if size > 1 else 16 for size, stride in zip(sizes, strides, strict=True)]
    status, made = driver.cuTensorMapEncodeTiled(
        bf16 if dtype == torch.bfloat16 else fp16,
        4,
        address,
        [u64(size) for size in reversed(sizes)],
        [u64(step) for step in reversed(steps[:3])],
        [u32(WIDTH), u32(rows), u32(1), u32(1)],
        [u32(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status.value != 0:
        raise CompilerError(f"the driver refuses a tensor map of {sizes} {dtype}: {status.name}")
    return made, int(made.getPtr())
