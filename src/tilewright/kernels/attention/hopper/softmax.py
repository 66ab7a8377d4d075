"""Online softmax of a warpgroup's scores on Hopper: masks, soft cap, running maximum and sum, rounded P.

Scores are in registers as `wgmma` leaves them: four lanes share a row, each with two of every eight columns. The
running maximum is times `scale`, which holds log₂ e; each lane keeps sums of its own, added up once a tile.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.attention.hopper.pipeline import ROWS

MASKED_MAX = gl.constexpr(-1.0e30)
"""The running maximum of a row without a key: with -inf, -inf - -inf would be NaN."""
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def mma_layout(columns):
    """The layout of a product [64, columns] of a warpgroup."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def lanes_layout():
    """The layout of [64, 4] whose row is in the four lanes that share it in `mma_layout`."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS.value, 4])


@gluon.constexpr_function
def element(tiles):
    return gl.float16 if tiles.half else gl.bfloat16


@gluon.constexpr_function
def first_keys(part, tiles):
    """Keys of a tile's first block that a warpgroup multiplies: on the diagonal the upper one sees half of them."""
    return 64 if tiles.masked == "diagonal" and part == 0 else tiles.block


@gluon.jit
def rounded(x, TILES: gl.constexpr):
    """To 16 bits, two values an instruction; the compiler's own conversion adds a permute for each pair."""
    if TILES.half:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )


@gluon.jit
def lane_sums(x):
    """[64, 4]: the partial sums of a row in the four lanes that share it."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    sums = gl.sum(gl.sum(gl.reshape(x, [M, N // 8, 4, 2]), axis=1), axis=2)
    return gl.convert_layout(sums, lanes_layout(), assert_trivial=True)


@gluon.jit
def row_sums(row_sum, TILES: gl.constexpr):
    return gl.convert_layout(gl.sum(row_sum, axis=1), gl.SliceLayout(1, mma_layout(TILES.block)))


@gluon.jit
def softcap(s, p):
    """tanh(s · tanh_scale · ln 2 / 2), by tanh x = 1 - 2 / (1 + e²ˣ). The cap itself is in `scale`."""
    power = gl.exp2(s * p.tanh_scale) + 1.0
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * inverse


@gluon.jit
def apply_mask(s, p, row, column, TILES: gl.constexpr):
    """Scores of 64 queries from `row` and keys from `column` on, -inf where a key is hidden."""
    LAYOUT: gl.constexpr = s.type.layout
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    # Opaque to the compiler, which would keep the column numbers in registers through the loop.
    columns = column + gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [columns], dtype=gl.int32, is_pure=False, pack=1
    )
    if TILES.banded:
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        seen = columns[None, :] <= gl.minimum(rows + p.right, p.keys - 1)[:, None]
        if TILES.masked == "any":
            seen = seen & (columns[None, :] >= (rows + p.left)[:, None])
        return gl.where(seen, s, float("-inf"))
    else:
        return gl.where((columns < p.keys)[None, :], s, float("-inf"))


@gluon.jit
def needs_mask(p, row, column, TILES: gl.constexpr):
    """Whether any key of the block from `column` on is hidden from any of the 64 queries from `row` on."""
    return (column + TILES.block - 1 > gl.minimum(row + p.right, p.keys - 1)) | (column < row + ROWS - 1 + p.left)


@gluon.jit
def softmax_first(s, p, row, column, VALUES: gl.constexpr, TILES: gl.constexpr):
    """(maximum, lane sums, rounded P) of a tile's first block; VALUES: columns of P V."""
    if TILES.capped:
        s = softcap(s, p)
    if TILES.masked != "never":
        s = apply_mask(s, p, row, column, TILES)
    ROW: gl.constexpr = gl.SliceLayout(1, mma_layout(TILES.block))
    row_max = gl.convert_layout(gl.max(s, axis=1), ROW) * p.scale
    if TILES.masked != "never":
        row_max = gl.maximum(row_max, MASKED_MAX)
    weights = gl.exp2(s * p.scale - gl.convert_layout(row_max, gl.SliceLayout(1, s.type.layout))[:, None])
    row_sum = lane_sums(weights)
    return row_max, row_sum, gl.convert_layout(rounded(weights, TILES), gl.DotOperandLayout(0, mma_layout(VALUES), 2))


@gluon.jit
def softmax_update(s, row_max, row_sum, p, row, column, TILES: gl.constexpr):
    """(new maximum, factor of the old sums, lane sums, P in fp32) with one more block."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if TILES.capped:
        s = softcap(s, p)
    if TILES.masked == "any":
        if needs_mask(p, row, column, TILES):
            s = apply_mask(s, p, row, column, TILES)
        row_max = gl.maximum(row_max, MASKED_MAX)
    new_max = gl.maximum(row_max, gl.convert_layout(gl.max(s, axis=1), ROW) * p.scale)
    new_weights = gl.exp2(s * p.scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, lanes_layout()))[:, None]
    return new_max, rescale, row_sum + lane_sums(new_weights), new_weights


@gluon.jit
def safe_inverse(row_sum):
    """1 / row_sum, and 0 for a query that sees no key."""
    return gl.where(row_sum == 0.0, 0.0, 1.0 / row_sum)


@gluon.jit
def store_lse(p, batch, head, row, row_max, row_sum):
    rows = row + gl.arange(0, ROWS, row_sum.type.layout)
    lse = gl.where(row_sum == 0.0, float("-inf"), (row_max + gl.log2(row_sum)) * LN2)
    start = p.lse + (batch * p.heads + head).to(gl.int64) * p.queries
    gl.store(start + rows, lse, mask=rows < p.queries)
