"""How a Hopper kernel in Gluon is compiled, loaded and launched.

A launch through Triton costs the host about 20 µs, more than a small attention takes. Here tensor maps are
encoded again only where an address has changed, and parameters lie ready for the driver.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from tilewright.kernels import nvrtc
from tilewright.kernels.attention.hopper_tiles import Tiles
from tilewright.records.errors import CompilerError

BOX_COLUMNS = 64
"""Columns that one bulk copy moves: 128 bytes, the widest swizzle."""
MAP_BYTES, MAP_ALIGNMENT = 128, 64
"""Of the driver's CUtensorMap."""
RANK = 4
_KINDS = {torch.float16: 6, torch.bfloat16: 9}
"""CUtensorMapDataType."""
_SWIZZLE_128B, _PROMOTE_TO_256B = 3, 3
"""CUtensorMapSwizzle, CUtensorMapL2promotion."""


@functools.cache
def _encode() -> Any:
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    encode.restype = ctypes.c_int
    return encode


class Tensor:
    """A [batch, heads, positions, head size] operand as the copy engine sees it, but for its address."""

    def __init__(self, shape: Sequence[int], strides: Sequence[int], box_rows: int, dtype: torch.dtype) -> None:
        """Strides in elements, the last 1; `box_rows`: positions that one copy moves."""
        # An axis of one may have any stride, also one that the copy engine does not take.
        outer = (s if size > 1 else BOX_COLUMNS for size, s in zip(shape[:-1], strides[:-1], strict=True))
        self.shape, self.strides, self.dtype = tuple(shape), (*outer, 1), dtype
        self._sizes = (ctypes.c_uint64 * RANK)(*reversed(self.shape))
        self._nbytes = (ctypes.c_uint64 * (RANK - 1))(*(2 * stride for stride in reversed(self.strides[:-1])))
        self._box = (ctypes.c_uint32 * RANK)(BOX_COLUMNS, box_rows, 1, 1)
        self._steps = (ctypes.c_uint32 * RANK)(1, 1, 1, 1)
        self._kind = _KINDS[dtype]

    def encode(self, to: int, address: int) -> None:
        """Write the tensor map of the operand at `address` to host memory `to`; past its ends are zeros."""
        status = _encode()(
            ctypes.c_void_p(to), self._kind, RANK, ctypes.c_void_p(address), self._sizes, self._nbytes, self._box,
            self._steps, 0, _SWIZZLE_128B, _PROMOTE_TO_256B, 0,
        )  # fmt: skip
        if status:
            raise CompilerError(
                f"the driver refuses a tensor map of {self.shape} {self.dtype} with strides {self.strides}: "
                f"CUDA error {status}"
            )


class Arguments(threading.local):
    """Parameters of a launch, one set for each thread: autograd launches from threads of its own.

    A tensor is its map, then its shape and strides; after the tensors come pointers, numbers, and the addresses
    of two scratch areas that these kernels do not use.
    """

    def __init__(self, tensors: Sequence[Tensor], pointers: int, numbers: Sequence[float]) -> None:
        room = ctypes.create_string_buffer(MAP_BYTES * len(tensors) + MAP_ALIGNMENT)
        start = -(-ctypes.addressof(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        self._tensors = tensors
        self._maps = [start + MAP_BYTES * i for i in range(len(tensors))]
        self._addresses = [0] * len(tensors)
        self._pointers = [ctypes.c_uint64(0) for _ in range(pointers)]
        places: list[int] = []
        kept: list[Any] = [room]
        for tensor, place in zip(tensors, self._maps, strict=True):
            sized: list[Any] = [ctypes.c_int32(size) for size in tensor.shape]
            sized += [ctypes.c_int64(stride) for stride in tensor.strides]
            kept += sized
            places += [place, *map(ctypes.addressof, sized)]
        scalars: list[Any] = [ctypes.c_float(n) if isinstance(n, float) else ctypes.c_int32(n) for n in numbers]
        scratch = ctypes.c_uint64(0)
        rest: list[Any] = [*self._pointers, *scalars, scratch, scratch]
        kept += rest
        places += map(ctypes.addressof, rest)
        array = (ctypes.c_void_p * len(places))(*places)
        self._kept = kept, array
        self.array = ctypes.addressof(array)
        """What the driver reads parameters through."""

    def point(self, tensors: Sequence[int], pointers: Sequence[int]) -> None:
        """Set the addresses of the tensors, and the pointers."""
        for i, address in enumerate(tensors):
            if address != self._addresses[i]:
                self._tensors[i].encode(self._maps[i], address)
                self._addresses[i] = address
        for pointer, address in zip(self._pointers, pointers, strict=True):
            pointer.value = address


def compiled(tiles: Tiles) -> Any:
    """The kernel that `tiles` describe, compiled by Triton for compute capability 9.0. Needs no GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewright.kernels.attention.hopper_kernel import forward

    name, element = ("fp16", gl.float16) if tiles.half else ("bf16", gl.bfloat16)

    def described(rows: int) -> str:
        block = [1, 1, rows, tiles.head_size]
        return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, element)!r}>"

    signature = dict.fromkeys(forward.arg_names, "i32")
    signature |= {"q": described(64), "o": described(64), "k": described(tiles.block), "v": described(tiles.block)}
    signature |= {"lse": "*fp32", "schedule": "*i32", "scale": "fp32", "inner": "fp32", "TILES": "constexpr"}
    source = GluonASTSource(forward, signature, {(forward.arg_names.index("TILES"),): tiles}, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@functools.cache
def built(tiles: Tiles, device: int) -> nvrtc.Kernel:
    """The kernel that `tiles` describe, compiled and loaded on device number `device`."""
    made = compiled(tiles)
    meta = made.metadata
    return nvrtc.loaded(
        made.asm["cubin"], meta.name, "", device=device, threads=32 * meta.num_warps, shared_bytes=meta.shared
    )
