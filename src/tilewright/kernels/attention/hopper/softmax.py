"""Online softmax of a warpgroup's scores on Hopper: masks, running maximum and sum, rounded weights.

Scores lie in registers as `wgmma` leaves them: four lanes share a row, each has two of every eight columns. A
running maximum is kept times `scale` (log₂ e in it), sums are kept for each lane and added up once a tile.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.kernels.attention.hopper.walk import ROWS

LOWEST = gl.constexpr(-1.0e30)
"""A running maximum that stands for no key yet: -inf would make NaN of -inf - -inf."""
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def mma_layout(columns):
    """Of the result [64, columns] of a warpgroup's product."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def lanes_layout():
    """Of [64, 4]: a row's four columns lie in the four lanes that share it in `mma_layout`."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [ROWS.value, 4])


@gluon.constexpr_function
def element(tiles):
    return gl.float16 if tiles.half else gl.bfloat16


@gluon.constexpr_function
def first_keys(part, tiles):
    """Keys of the first block walked that any query of a warpgroup sees: on the diagonal the upper one sees half."""
    return 64 if tiles.masked == "diagonal" and part == 0 else tiles.block


@gluon.jit
def rounded(x, TILES: gl.constexpr):
    """To 16 bits, two values an instruction: the compiler's own conversion takes a permute for each pair more."""
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
    """[64, 4]: what each of the four lanes that share a row has of its sum."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    sums = gl.sum(gl.sum(gl.reshape(x, [M, N // 8, 4, 2]), axis=1), axis=2)
    return gl.convert_layout(sums, lanes_layout(), assert_trivial=True)


@gluon.jit
def row_sums(total, TILES: gl.constexpr):
    return gl.convert_layout(gl.sum(total, axis=1), gl.SliceLayout(1, mma_layout(TILES.block)))


@gluon.jit
def bent(s, p):
    """tanh(s · inner / 2): the soft cap but for its factor, which is in `scale`. tanh x = 1 - 2 / (1 + e²ˣ)."""
    grown = gl.exp2(s * p.inner) + 1.0
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [grown], dtype=gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * inverse


@gluon.jit
def hide(s, p, row, column, TILES: gl.constexpr):
    """Scores of 64 queries from `row` and keys from `column`, -inf where a key is not seen."""
    LAYOUT: gl.constexpr = s.type.layout
    columns = gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
    # Opaque, so that the column numbers are not kept in registers through the loop.
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
    """Whether any key of the block from `column` is hidden from any of the 64 queries from `row`."""
    return (column + TILES.block - 1 > gl.minimum(row + p.right, p.keys - 1)) | (column < row + ROWS - 1 + p.left)


@gluon.jit
def opened(s, p, row, column, VALUES: gl.constexpr, TILES: gl.constexpr):
    """Maximum, lanes' sums and rounded weights of a tile's first block; VALUES: columns of the next product."""
    if TILES.capped:
        s = bent(s, p)
    if TILES.masked != "never":
        s = hide(s, p, row, column, TILES)
    ROW: gl.constexpr = gl.SliceLayout(1, mma_layout(TILES.block))
    top = gl.convert_layout(gl.max(s, axis=1), ROW) * p.scale
    if TILES.masked != "never":
        top = gl.maximum(top, LOWEST)
    weights = gl.exp2(s * p.scale - gl.convert_layout(top, gl.SliceLayout(1, s.type.layout))[:, None])
    total = lane_sums(weights)
    return top, total, gl.convert_layout(rounded(weights, TILES), gl.DotOperandLayout(0, mma_layout(VALUES), 2))


@gluon.jit
def softened(s, top, total, p, row, column, TILES: gl.constexpr):
    """One block more: the new maximum, what old sums shrink by, the lanes' sums, the weights in fp32."""
    ROW: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    if TILES.capped:
        s = bent(s, p)
    if TILES.masked == "any":
        if needs_mask(p, row, column, TILES):
            s = hide(s, p, row, column, TILES)
        top = gl.maximum(top, LOWEST)
    higher = gl.maximum(top, gl.convert_layout(gl.max(s, axis=1), ROW) * p.scale)
    fresh = gl.exp2(s * p.scale - higher[:, None])
    shrink = gl.exp2(top - higher)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, lanes_layout()))[:, None]
    return higher, shrink, total + lane_sums(fresh), fresh


@gluon.jit
def inverse(total):
    """1 / total, and 0 for a query that has seen no key."""
    return gl.where(total == 0.0, 0.0, 1.0 / total)


@gluon.jit
def store_lse(p, batch, head, row, top, total):
    rows = row + gl.arange(0, ROWS, total.type.layout)
    lse = gl.where(total == 0.0, float("-inf"), (top + gl.log2(total)) * LN2)
    start = p.lse + (batch * p.heads + head).to(gl.int64) * p.queries
    gl.store(start + rows, lse, mask=rows < p.queries)
