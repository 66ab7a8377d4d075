"""Calls of libraries as the matrix products that they are, and the kinds of convolutions."""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING

from tilewright.cost.work import Product
from tilewright.graph import calls
from tilewright.operators.own.product import PRODUCTS_OF_PARTS
from tilewright.operators.table import row_of
from tilewright.records.program import Cost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node


ALIGNED = 8
"""16-bit channels that a matrix unit loads at once; libraries first pad other numbers of channels."""


def convolution_kind(node: Node) -> str:
    """`convolution` or `convolution backward`, followed by a comma and one of these words if it applies.

    `depthwise`: one channel per group; `grouped`: several groups of several channels; `padded`: 8 does not divide the
    channels; `across`: channels first in memory, which the library moves; `1x1`: a plain product.
    """
    name = "convolution backward" if _is_backward(node) else "convolution"
    x, weight, stride, groups = _operands(node)
    if groups > 1:
        return f"{name}, {'depthwise' if weight.shape[1] == 1 else 'grouped'}"
    if x.shape[1] % ALIGNED or weight.shape[0] % ALIGNED:
        return f"{name}, padded"
    if x.stride(1) != 1:
        return f"{name}, across"
    if prod(weight.shape[2:]) == 1 and prod(stride) == 1:
        return f"{name}, 1x1"
    return name


def convolution_products(node: Node) -> tuple[Product, ...]:
    """Forward: one product, pixels × channels of the result, with sums over channels × taps (implicit GEMM: Chetlur et
    al., "cuDNN: Efficient Primitives for Deep Learning", 2014). Backward: one product for each computed gradient, of
    input and of weight. Empty for several groups, which are no such product, and for a transposed convolution."""
    x, weight, _, groups = _operands(node)
    if groups > 1 or node.args[7 if _is_backward(node) else 6]:
        return ()
    made, inner, taps = weight.shape[0], weight.shape[1], prod(weight.shape[2:])
    if not _is_backward(node):
        y = calls.outputs(node)[0]
        assert y is not None
        return ((1, y.shape[0] * prod(y.shape[2:]), made, inner * taps),)
    gradient = calls.tensor(node.args[0])
    pixels, of_input = (t.shape[0] * prod(t.shape[2:]) for t in (gradient, x))
    both = ((1, of_input, inner, made * taps * pixels // of_input), (1, made, inner * taps, pixels))
    wanted: list[bool] = node.args[10]  # type: ignore[assignment]
    return tuple(product for product, is_wanted in zip(both, wanted[:2], strict=True) if is_wanted)


def _is_backward(node: Node) -> bool:
    return "backward" in calls.operator_name(node.target)


def _operands(node: Node) -> tuple[Tensor, Tensor, list[int], int]:
    """Input, weight, stride and groups of `convolution` or `convolution_backward`."""
    first, strides, groups = (1, 4, 9) if _is_backward(node) else (0, 3, 8)
    x, weight = (calls.tensor(operand) for operand in node.args[first : first + 2])
    return x, weight, node.args[strides], calls.number(node.args[groups])  # type: ignore[return-value]


FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2)}
"""For each operator, the positions of the two factors among its arguments."""
EDGE = 128
"""Keys that a kernel computes in vain for each query at each end of the keys that a mask lets it see: the mask hides
half the pairs of a tile of 128 × 128 there, and comparing positions takes as long as another half of a tile."""


def products_of(node: Node, cost: Cost) -> tuple[Product, ...]:
    """(batch, M, N, K) of the products in a matrix product, a convolution or attention on [B, H, S, d], else ().

    Groups of rows, whose sizes are in a tensor, count as equal.
    """
    name = calls.operator_name(node.target)
    if "convolution" in name:
        return convolution_products(node) if name in ("convolution", "convolution_backward") else ()
    if is_attention(node):
        return _attention_product(node, cost)
    if name == "_grouped_mm":
        return _grouped_product(node)
    if name == "tilewright.product":
        left, right = map(shape_of, node.args[:2])
        return (in_parts((prod(left[:-2]), left[-2], right[-1], left[-1])),)
    if name == "tilewright.linear_gelu":
        x, weight = map(shape_of, node.args[:2])
        return ((1, prod(x[:-1]), weight[0], x[-1]),)
    places = FACTORS.get(name)
    if places is None:
        return ()
    left, right = (shape_of(node.args[place]) for place in places)
    return ((prod(left[:-2]), left[-2], right[-1], left[-1]),)


def in_parts(product: Product) -> Product:
    """A product of fp32 as the one of bf16 that `tilewright.product` computes."""
    batch, m, n, k = product
    return batch, m, n, PRODUCTS_OF_PARTS * k


def rate_dtype(node: Node) -> str:
    """The dtype at whose rate a call computes products: of its first result, if its row names no other."""
    row, value = row_of(calls.launched(node)), next((v for v in calls.outputs(node) if v is not None), None)
    if row is not None and row.rate:
        return row.rate
    return "" if value is None else calls.dtype_name(value.dtype)


def alignment_of(node: Node) -> int:
    """The least `rows_alignment` of a matrix product's operands and result; `ALIGNED` for other calls."""
    places = FACTORS.get(calls.operator_name(node.target), ())
    tensors = [calls.tensor(x) for x in (*(node.args[place] for place in places), node)] if places else []
    return min((rows_alignment(x) for x in tensors), default=ALIGNED)


def rows_alignment(x: Tensor) -> int:
    """The largest power of two of 16-bit elements, at most `ALIGNED`, at whose multiples all rows of x begin.

    `ALIGNED` for dtypes of other sizes, for which the slowdown was not measured.
    """
    if x.dtype.itemsize != 2:
        return ALIGNED
    offset, *strides = (calls.number(d) if calls.is_known(d) else ALIGNED for d in (x.storage_offset(), *x.stride()))
    rows = [stride for size, stride in zip(calls.shape_of(x), strides, strict=True) if size > 1 and stride != 1]
    return gcd(ALIGNED, offset, *rows)


def is_attention(node: Node) -> bool:
    """Whether the operator, PyTorch's or our own, is attention or its gradients."""
    row = row_of(node.target)
    return row is not None and row.role in ("attention", "attention backward")


def _grouped_product(node: Node) -> tuple[Product, ...]:
    """[T, K] × [E, K, N], [E, M, K] × [K, T] or [M, T] × [T, N], with T in E groups (`operators/products.py`)."""
    left, right = map(shape_of, node.args[:2])
    rows, depth, columns = left[-2], left[-1], right[-1]
    if len(left) == len(right) == 2:
        groups = shape_of(node)[0]
        return ((groups, rows, columns, -(-depth // groups)),)
    groups = (left if len(left) == 3 else right)[0]
    if len(left) == 2:
        rows = -(-rows // groups)
    if len(right) == 2:
        columns = -(-columns // groups)
    return ((groups, rows, columns, depth),)


def _attention_product(node: Node, cost: Cost) -> tuple[Product, ...]:
    """All products of an attention as one; M is the number of queries of a head, or in backward of keys.

    K is such that the FLOPs of all products count, and those of pairs that are computed although a mask hides them.
    """
    arguments = calls.arguments(node)
    query, key = (shape_of(arguments.get(name, arguments.get(name[0]))) for name in ("query", "key"))
    if len(query) != 4 or calls.operator_name(node.target).startswith(("_flash", "_efficient")):
        return ()
    heads, queries, width = prod(query[:2]), *query[2:]
    rows = key[2] if "backward" in calls.operator_name(node.target) else queries
    ends = sum(isinstance(arguments.get(name), int) for name in ("left", "right")) + bool(arguments.get("is_causal"))
    # An attention's transcendental functions are the exponentials of its pairs.
    pairs = cost.transcendentals
    computed = min(pairs + ends * EDGE * heads * queries, heads * queries * key[2])
    return ((heads, rows, width, cost.flops * computed // (2 * heads * rows * width * pairs or 1)),)


def shape_of(operand: object) -> tuple[int, ...]:
    """The shape of the tensor of an operand, or of a call with one result."""
    return calls.shape_of(calls.tensor(operand))
