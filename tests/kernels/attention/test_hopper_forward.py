"""The Hopper attention forward without a GPU: what it refuses, its tiles and schedule, its machine code."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import processes
from tilewright.kernels.attention.hopper.forward import refuses
from tilewright.kernels.attention.hopper.schedule import Span, table
from tilewright.kernels.attention.hopper.tiles import NO_LIMIT, ROWS, band, tiles_for
from tilewright.kernels.attention.request import Request

PROGRAMS = 132


def request_of(
    queries: int = 512,
    keys: int = 512,
    head_size: int = 128,
    left: int | None = None,
    right: int | None = None,
    **changed: object,
) -> Request:
    strides = (8 * queries * head_size, queries * head_size, head_size, 1)
    plain = Request(
        torch.device("cuda:0"), torch.bfloat16, 2, 8, 4, queries, keys, head_size, head_size, strides, strides, strides,
        True, head_size**-0.5, left, right,
    )  # fmt: skip
    return plain._replace(**changed)


def span_of(request: Request) -> Span:
    tiles = tiles_for(request, table=True)
    left, right = band(request)
    heads = request.batch * request.heads
    sizes = request.queries, request.keys, right, left, ROWS * tiles.consumers, tiles.block
    return Span(heads, *sizes, request.banded)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": torch.float32}, "16-bit"),
        ({"keys": 0}, "nothing to compute"),
        ({"head_size": 264}, "head size 264"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"value_size": 20}, "multiples of 16 bytes"),
        ({"k_strides": (0, 128, 128, 1)}, "k has strides"),
        ({"scale": 0.0}, "scale 0.0"),
        ({"scale": math.nan}, "scale nan"),
        ({"mask": "boolean"}, "a mask"),
        ({"alibi": True}, "ALiBi"),
        ({"dropout": 0.1}, "dropout"),
        ({"sequences": 3}, "packed sequences"),
        ({"queries": 1 << 30}, "32 bits"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_said(changed: dict[str, object], reason: str) -> None:
    assert reason in str(refuses(request_of(**changed)))  # type: ignore[arg-type]


def test_what_it_can_do() -> None:
    for head_size in (8, 40, 64, 72, 80, 96, 112, 128, 256):
        for left, right in ((None, None), (None, 0), (100, 0), (0, 7)):
            assert refuses(request_of(113, 203, head_size, left, right, softcap=20.0)) is None
    repeated_once = (0, 128, 128, 1)
    assert refuses(request_of(batch=1, k_strides=repeated_once)) is None


@settings(deadline=None, max_examples=60)
@given(
    queries=st.integers(1, 700),
    keys=st.integers(1, 700) | st.integers(2048, 2400),
    head_size=st.sampled_from([64, 128, 256]),
    left=st.none() | st.integers(0, 400),
    right=st.none() | st.integers(0, 400),
)
def test_a_tile_walks_every_key_that_is_seen(
    queries: int, keys: int, head_size: int, left: int | None, right: int | None
) -> None:
    request = request_of(queries, keys, head_size, left, right)
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
    """What `masked` says, of each warpgroup, for which the walk begins at the last block that it sees anything of."""
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


@pytest.mark.parametrize("length", [512, 1024, 2048, 4096, 8192, 16384])
def test_the_schedule_is_balanced(length: int) -> None:
    span = span_of(request_of(length, length, 128, right=0, batch=16384 // length, heads=16))
    made = table(span, PROGRAMS, 4 * length * 128)
    work = [sum(span.blocks(tile & 0xFFFF) for tile in made[made[i] : made[i + 1]]) for i in range(PROGRAMS)]
    assert max(work) <= 1.06 * sum(work) / PROGRAMS


def test_the_machine_code_does_not_spill_or_wait() -> None:
    """One build of each shape, as the assembler that Triton brings reports it."""
    pytest.importorskip("triton")
    printed, _ = processes.run(["-m", "tests.kernels.attention.hopper_code"], env={"TRITON_INTERPRET": "0"})
    reports = [json.loads(line) for line in printed.splitlines()]
    assert len(reports) == 7
    for report in reports:
        assert not report["serialized"], report
        assert report["spilled"] <= 64, report
        assert report["shared"] <= 227 * 1024, report
