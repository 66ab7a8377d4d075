"""Decoding on Hopper without a GPU: machine code, memory of a program, shares of the cache, what is refused."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
import torch

from tests.kernels.nvcc import assembled
from tilewright.hardware.architectures import INTERPRETER, stated_limits
from tilewright.kernels.attention.decode import cuda as cuda_decode
from tilewright.kernels.attention.request import Request
from tilewright.launch import nvrtc

H200 = stated_limits("9.0", multiprocessors=132, l2_bytes=60 << 20)
BUILDS = [(head, rows) for head in cuda_decode.HEADS for rows in (8, 16)]


def request(**changes: Any) -> Request:
    """One query of 8 heads against 4096 keys of one, on the CPU."""
    strides = 1024, 128, 128, 1
    plain = Request(
        torch.device("cpu"), torch.bfloat16, 1, 8, 1, 1, 4096, 128, 128, strides, strides, strides, True, 1.0, None,
        None,
    )  # fmt: skip
    return plain._replace(**changes)


@pytest.mark.parametrize(("head", "rows"), BUILDS)
def test_products_run_on_the_matrix_units_and_registers_suffice(head: int, rows: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = assembled(cuda_decode.SOURCE, cuda_decode.settings(head, rows, dtype))
        assert found["spilled"] == 0


@pytest.mark.parametrize(("head", "rows"), BUILDS)
def test_programs_fit(head: int, rows: int) -> None:
    assert cuda_decode.shared_bytes(head, rows) <= H200.shared_bytes_per_block


def test_arguments_lie_as_the_source_declares_them() -> None:
    assert struct.calcsize(cuda_decode.PROBLEM) == 7 * 8 + 12 * 8 + 11 * 4 + 4


def test_the_cpu_is_refused() -> None:
    assert "GPU" in (cuda_decode.supports(request(), INTERPRETER) or "")


def test_what_the_kernel_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    there = request(device=torch.device("cuda", 0))
    assert cuda_decode.supports(there, H200) is None
    assert cuda_decode.supports(there._replace(queries=2, left=100, right=0), H200) is None
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"softcap": 1.0}, "a soft cap"),
        ({"mask": "boolean"}, "a mask"),
        ({"alibi": True}, "ALiBi"),
        ({"dropout": 0.1}, "dropout"),
        ({"sequences": 2}, "packed sequences"),
        ({"value_size": 64}, "head sizes 128 and 64"),
        ({"aligned": False}, "rows that do not begin at multiples of 16 bytes"),
        ({"queries": 3}, "more than 16 queries"),
        ({"keys": 500}, "fewer than 512 keys"),
        ({"dtype": torch.float32}, "only 16-bit floats"),
    )
    for changes, reason in refused:
        assert reason in (cuda_decode.supports(there._replace(**changes), H200) or "")


@pytest.mark.parametrize(("lanes", "tiles"), [(64, 256), (1, 49), (512, 256), (7, 33), (1, 8192), (300, 32)])
def test_every_tile_has_one_program_and_parts_meet_in_two_places(lanes: int, tiles: int) -> None:
    """The shares that the source computes: whose a tile is, and where a program leaves its part of a lane."""
    total, programs = lanes * tiles, cuda_decode.programs_for(lanes, tiles, 132)
    share, longer = divmod(total, programs)
    bounds = [program * share + min(program, longer) for program in range(programs + 1)]
    assert bounds[0] == 0
    assert bounds[-1] == total
    sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(total, cuda_decode.WARPS)
    for tile in range(total):
        in_longer = longer * (share + 1)
        program = tile // (share + 1) if tile < in_longer else longer + (tile - in_longer) // share
        assert bounds[program] <= tile < bounds[program + 1]
    for begin, end in itertools.pairwise(bounds):
        met = range(begin // tiles, (end - 1) // tiles + 1)
        partial = [lane for lane in met if lane * tiles < begin or (lane + 1) * tiles > end]
        assert set(partial) <= {met[0], met[-1]}
