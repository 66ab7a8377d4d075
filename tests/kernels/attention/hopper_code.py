"""Prints, as JSON lines, what the assembler says of the Hopper attention kernels; run without the interpreter."""

import io
import json
import re
from contextlib import redirect_stdout

import torch
from triton import knobs

from tilewright.kernels.attention.hopper.launch import compiled
from tilewright.kernels.attention.hopper.tiles import Tiles, tiles_for
from tilewright.kernels.attention.request import Request


def tiles_of(length: int, head_size: int, right: int | None, left: int | None, dtype: torch.dtype) -> Tiles:
    strides = (length * head_size, length * head_size, head_size, 1)
    sizes = 1, 1, 1, length, length, head_size, head_size
    request = Request(torch.device("cuda:0"), dtype, *sizes, strides, strides, strides, True, 1.0, left, right)
    return tiles_for(request, table=True)


def report(tiles: Tiles) -> dict[str, object]:
    """Bytes spilled and of shared memory, and whether matrix instructions wait for each other."""
    with redirect_stdout(io.StringIO()) as printed:
        made = compiled(tiles)
    said = printed.getvalue()
    found = re.search(r"(\d+) bytes spill stores", said)
    assert found, said
    about = {"tiles": str(tiles), "shared": made.metadata.shared}
    return about | {"spilled": int(found[1]), "serialized": "serialized" in said}


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
    for shape in (
        (1024, 128, 0, None, torch.bfloat16), (8192, 64, 0, 500, torch.float16),
        (1024, 256, 0, None, torch.bfloat16), (512, 64, 0, None, torch.bfloat16), (256, 64, 0, None, torch.float16),
        (512, 128, 0, 100, torch.bfloat16),
    ):  # fmt: skip
        print(json.dumps(report(tiles_of(*shape))), flush=True)
