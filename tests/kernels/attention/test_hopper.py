"""Attention's kernels for Hopper without a GPU: what they refuse, what their tiles hold, and their machine code."""

import itertools
import math
import re
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.devices import H200
from tests.kernels.nvcc import build
from tilewright.kernels.attention.hopper import backward, forward
from tilewright.kernels.attention.hopper.schedule import Span, table
from tilewright.kernels.attention.hopper.tiles import NO_LIMIT, ROWS, band, tiles_for
from tilewright.kernels.attention.request import Request
from tilewright.launch import nvrtc


def request_of(
    queries: int = 512,
    keys: int = 512,
    width: int = 128,
    left: int | None = None,
    right: int | None = None,
    **more: Any,
) -> Request:
    """A request of 2 batch entries, 8 heads and 4 key heads."""
    strides = (8 * queries * width, queries * width, width, 1)
    plain = Request(
        torch.device("cuda:0"), torch.bfloat16, 2, 8, 4, queries, keys, width, width, strides, strides, strides, True,
        width**-0.5, left, right,
    )  # fmt: skip
    return plain._replace(**more)


REFUSED: list[tuple[dict[str, Any], str, list[ModuleType]]] = [
    ({"dtype": torch.float32}, "16-bit floats", [forward, backward]),
    ({"mask": "boolean"}, "a mask", [forward, backward]),
    ({"alibi": True}, "ALiBi", [forward, backward]),
    ({"dropout": 0.1}, "dropout", [forward, backward]),
    ({"sequences": 3}, "packed sequences", [forward, backward]),
    ({"aligned": False}, "multiples of 16 bytes", [forward, backward]),
    ({"head_size": 264}, "head size 264", [forward, backward]),
    ({"value_size": 72}, "of their own", [backward]),
    ({"value_size": 20}, "multiples of 16 bytes", [forward]),
    ({"softcap": 1.0}, "a soft cap", [backward]),
    ({"deterministic": True}, "deterministic", [backward]),
    ({"keys": 0}, "nothing to compute", [forward]),
    ({"keys": 0}, "an empty tensor", [backward]),
    ({"queries": 1 << 30}, "32 bits", [forward]),
    ({"scale": 0.0}, "scale", [forward, backward]),
    ({"scale": math.nan}, "scale", [forward, backward]),
    ({"k_strides": (0, 4096, 128, 1)}, "k has strides", [forward]),
    ({"k_strides": (0, 4096, 128, 1)}, "expanded", [backward]),
]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where CUDA C++ can be compiled and Gluon is there."""
    monkeypatch.setattr(nvrtc, "available", lambda _: True)
    monkeypatch.setattr(backward, "available", lambda _: True)
    monkeypatch.setattr(forward, "_missing", lambda: None)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("module", "changed", "reason"),
    [(module, changed, reason) for changed, reason, modules in REFUSED for module in modules],
)  # fmt: skip
def test_what_a_kernel_does_not_compute_is_refused(module: ModuleType, changed: dict[str, Any], reason: str) -> None:
    request = request_of()
    assert module.supports(request, H200) is None
    assert reason in str(module.supports(request._replace(**changed), H200))


@pytest.mark.usefixtures("built")
def test_heads_and_windows_that_are_taken() -> None:
    for width in (8, 40, 64, 72, 80, 96, 112, 128, 256):
        for left, right in ((None, None), (None, 0), (100, 0), (0, 7)):
            assert forward.supports(request_of(113, 203, width, left, right, softcap=20.0), H200) is None
            assert backward.supports(request_of(113, 203, width, left, right), H200) is None
    repeated_once = (0, 128, 128, 1)
    assert forward.supports(request_of(batch=1, k_strides=repeated_once), H200) is None


# Tiles and schedules.


def span_of(request: Request) -> Span:
    tiles = tiles_for(request, table=True)
    left, right = band(request)
    heads = request.batch * request.heads
    sizes = request.queries, request.keys, right, left, ROWS * tiles.consumers, tiles.block
    return Span(heads, *sizes, request.banded)


@settings(deadline=None, max_examples=60)
@given(
    queries=st.integers(1, 700),
    keys=st.integers(1, 700) | st.integers(2048, 2400),
    width=st.sampled_from([64, 128, 256]),
    left=st.none() | st.integers(0, 400),
    right=st.none() | st.integers(0, 400),
)
def test_a_tile_walks_every_key_that_is_seen(
    queries: int, keys: int, width: int, left: int | None, right: int | None
) -> None:
    request = request_of(queries, keys, width, left, right)
    span = span_of(request)
    assert span.row_blocks * span.row_block >= queries > (span.row_blocks - 1) * span.row_block
    place = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    seen = torch.ones_like(place, dtype=torch.bool)
    seen &= (place >= -left) if left is not None else seen
    seen &= (place <= right) if right is not None else seen
    masked = tiles_for(request, table=True).masked
    for block in range(span.row_blocks):
        rows = seen[block * span.row_block : (block + 1) * span.row_block]
        first, last = span.key_blocks(block)
        columns = rows.any(0).nonzero().flatten().tolist()
        if columns:
            assert first * span.key_block <= columns[0] and columns[-1] < last * span.key_block
        assert 0 <= first < last <= max(-(-keys // span.key_block), 1)
        assert_masked_where_needed(rows, span, first, last, masked)


def assert_masked_where_needed(rows: torch.Tensor, span: Span, first: int, last: int, masked: str) -> None:
    """`masked` holds for each warpgroup, whose walk begins at the last block of which it sees a key."""
    if masked == "any":
        return
    for part in rows.split(ROWS):
        columns = part.any(0).nonzero().flatten().tolist()
        own_last = columns[-1] // span.key_block + 1 if columns else first + 1
        whole = part[:, first * span.key_block : (own_last - 1) * span.key_block]
        assert whole.all()
        if masked == "never":
            assert part.all() and part.shape[1] % span.key_block == 0


@settings(deadline=None)
@given(
    heads=st.integers(1, 40),
    lengths=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    programs=st.integers(1, 132),
)
def test_the_schedule_holds_every_tile_once(heads: int, lengths: tuple[int, int], programs: int) -> None:
    queries, keys = lengths
    span = Span(heads, queries, keys, keys - queries, -NO_LIMIT, 128, 128, banded=True)
    programs = min(programs, span.tiles)
    made = table(span, programs, 1 << 20)
    begins, tiles = made[: programs + 1], made[programs + 1 :]
    assert begins[0] == programs + 1 and begins[-1] == len(made)
    assert all(a < b for a, b in itertools.pairwise(begins))
    assert sorted(tiles) == [head << 16 | block for head in range(heads) for block in range(span.row_blocks)]


# Machine code.


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("length", "width", "right", "left", "dtype"),
    [
        (1024, 128, 0, None, BF16), (8192, 64, 0, 500, FP16), (1024, 256, 0, None, BF16), (512, 64, 0, None, BF16),
        (256, 64, 0, None, FP16), (512, 128, 0, 100, BF16),
    ],
)  # fmt: skip
def test_the_forward_does_not_spill_or_wait(
    length: int, width: int, right: int, left: int | None, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the assembler that Triton brings reports it."""
    pytest.importorskip("triton")
    from triton import knobs

    from tilewright.kernels.attention.hopper.launch import compiled

    tiles = tiles_for(request_of(length, length, width, left, right, dtype=dtype), table=True)
    with knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        made = compiled(tiles)
    said = capsys.readouterr().out
    spilled = re.search(r"(\d+) bytes spill stores", said)
    assert spilled and int(spilled[1]) <= 64 and "serialized" not in said, said
    assert made.metadata.shared <= H200.shared_bytes_per_block


@pytest.mark.parametrize(
    ("shape", "banded", "dtype", "dq_warps", "ping_pong"),
    [
        (backward.SHAPES[64], False, BF16, True, False),
        (backward.SHAPES[64], True, FP16, False, False),
        (backward.SHAPES[128], True, FP16, True, False),
        (backward.SHAPES[128], False, BF16, False, True),
        (backward.SHAPES[256], True, BF16, False, False),
        (backward.SHORT, True, BF16, False, False),
    ],
)
def test_the_backward_does_not_wait(
    shape: backward.BackwardTiles, banded: bool, dtype: torch.dtype, dq_warps: bool, ping_pong: bool
) -> None:
    """The assembler makes matrix instructions wait for each other where it cannot follow the pipeline."""
    assert shape.shared_bytes <= H200.shared_bytes_per_block
    found = build(shape.source, shape.definitions(banded, dtype, dq_warps, ping_pong))
    # By the warps beside those that multiply, which have 24 registers.
    assert not found.serialized and max(found.spilled.values()) <= 96
