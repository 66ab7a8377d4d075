"""Products of at most 64 rows with weights, which occur in decoding, run at the memory bandwidth of the weights.

    q = mm(x, t(wq)); k = mm(x, t(wk)); v = mm(x, t(wv))       →   q, k, v = skinny_linear(x, wq, wk, wv)
    y = mul(silu(mm(x, t(wg))), mm(x, t(wu)))                  →   y, … = skinny_linear(x, wg, wu, "swiglu")
    y = gelu(addmm(b, x, t(w)))                                →   y, … = skinny_linear(x, w, b, "gelu")
    y = add(r, mm(x, t(w)))                                    →   y, … = skinny_linear(x, w, residual=r)
    x = rms_norm(z, g) of one row, without other readers       →   skinny_linear(z, …, gain=g)

Only for inference, since a backward needs the intermediate values. Taken if predicted to be faster than the library's
products with the kernels after them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.choose.chooser import chosen
from tilewright.choose.generated import work_of
from tilewright.cost.work import Work, predicted_us
from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_call
from tilewright.graph.specialise import has_symbols
from tilewright.graph.undefined import gradients
from tilewright.hardware.profiles import DeviceProfile
from tilewright.hardware.target import Target
from tilewright.kernels.offer import Offer
from tilewright.kernels.skinny_linear import ALIGNED, MOST_ROWS, plan
from tilewright.passes.rule import Value, call, matches, roots
from tilewright.passes.zeros import shared_zeros

aten: Any = torch.ops.aten
MOST_WEIGHTS = 3
NORM = call(aten._fused_rms_norm.default, "source", Value("shape"), "gain", Value("eps"), alone=True)
NORMED = call(operator.getitem, NORM, 0)
GATED = call(aten.mul.Tensor, call(aten.silu.default, "product", alone=True), "up")
AFTER = {
    "gelu": call(aten.gelu.default, "product"),
    "gelu_tanh": call(aten.gelu.default, "product", approximate=lambda kind: kind == "tanh"),
    "silu": call(aten.silu.default, "product"),
    "none": call(aten.add.Tensor, "product", "residual"),
}
"""By activation, what one product's launch computes behind it."""
VIEWS = {aten.view.default, aten._unsafe_view.default}
TRANSPOSED = call((aten.t.default, aten.transpose.int, aten.permute.default), "weight", ...)
PRODUCT = call(aten.mm.default, "x", TRANSPOSED), call(aten.addmm.default, "bias", "x", TRANSPOSED)
SMALLEST = torch.finfo(torch.float32).eps
"""Default eps of PyTorch's RMS norm."""
LIBRARY_SHARE = 0.65
"""Share of the memory bandwidth that cuBLAS reaches in products of few rows (H200)."""
COLD = 2**40
"""More bytes than caches hold: all of a model is read before a weight is read again."""


@dataclass(frozen=True, eq=False)
class _Product:
    """x [rows, columns] · weightᵀ + bias."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None

    def is_ready(self, place: fx.Node, order: Mapping[fx.Node, int]) -> bool:
        """Whether weight and bias are computed before `place`: autocast may cast them later."""
        return all(node is None or order[node] < order[place] for node in (self.weight, self.bias))


@dataclass(frozen=True, eq=False)
class _Match:
    """Products that one launch computes, and the operators fused with them."""

    products: tuple[_Product, ...]
    result: fx.Node | None = None
    """The node of the operator after the products, if the same launch computes it."""
    activation: str = "none"
    """Applied to the first product; "swiglu" multiplies it with the second."""
    residual: fx.Node | None = None
    """Added to the first product."""

    @property
    def nodes(self) -> list[fx.Node]:
        return [product.node for product in self.products]

    @property
    def last(self) -> fx.Node:
        return self.result or self.products[0].node


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for each possible launch, in an inference graph of ATen operators."""
    if target.language != "triton" or gradients(graph):
        return
    for match in _matches(graph):
        yield [_offer(match, target.profile)]


def _matches(graph: fx.Graph) -> Iterator[_Match]:
    products = {node: found for node in roots(PRODUCT, graph) if (found := _product(node)) is not None}
    taken: set[fx.Node] = set()
    for node in roots(GATED, graph):
        if (match := _match(node, {"swiglu": GATED}, products)) is not None and not taken & set(match.nodes):
            taken.update(match.nodes)
            yield match
    by_x: dict[fx.Node, list[_Product]] = {}
    for product in products.values():
        if product.node not in taken:
            by_x.setdefault(product.x, []).append(product)
    # A product that shares x saves more in one launch with the others of x than with the operator after it.
    alone = {group[0].node: group[0] for group in by_x.values() if len(group) == 1}
    for node in list(graph.nodes):
        if (match := _match(node, AFTER, alone)) is not None and not taken & set(match.nodes):
            taken.update(match.nodes)
            yield match
    order = {node: number for number, node in enumerate(graph.nodes)}
    for group in by_x.values():
        left = [product for product in group if product.node not in taken]
        while left:
            together = [product for product in left if product.is_ready(left[0].node, order)][:MOST_WEIGHTS]
            left = [product for product in left if product not in together]
            yield _Match(tuple(together))


def _product(node: fx.Node) -> _Product | None:
    found = next(matches(PRODUCT, node), None)
    if found is None:
        return None
    x, weight, bias = found["x"], found["weight"], found.get("bias")
    left, own, result = values = [calls.tensor(n) for n in (x, weight, node)]
    if any(value.dim() != 2 or has_symbols(value) for value in values):
        return None
    fits = own.shape == (result.shape[1], left.shape[1]) and 1 <= left.shape[0] <= MOST_ROWS and own.numel() > 0
    narrow = {left.dtype, own.dtype} in ({torch.bfloat16}, {torch.float16})
    if not fits or not narrow or not all(map(_is_aligned, (left, own))):
        return None
    if bias is not None and not (calls.shape_of(row := calls.tensor(bias)) == own.shape[:1] and row.is_contiguous()):
        return None
    return _Product(node, x, weight, bias)


def _is_aligned(value: torch.Tensor) -> bool:
    step = ALIGNED // value.element_size()
    return value.stride(1) == 1 and value.stride(0) % step == 0 and value.storage_offset() % step == 0


def _product_of(node: object, products: dict[fx.Node, _Product]) -> _Product | None:
    """The product that `node` is or shows, if it has no other reader."""
    if not isinstance(node, fx.Node):
        return None
    product = calls.through(node, lambda view: view.target in VIEWS and len(view.users) == 1)
    return products.get(product) if len(product.users) == 1 else None


def _match(node: fx.Node, patterns: Mapping[str, Any], products: dict[fx.Node, _Product]) -> _Match | None:
    """The products whose launch can compute `node` too, by the pattern of an activation that fits."""
    for kind, pattern in patterns.items():
        for found in matches(pattern, node):
            terms = [_product_of(found[name], products) for name in ("product", "up") if name in found]
            known, residual = tuple(one for one in terms if one is not None), found.get("residual")
            alike = len(known) == len(terms) and len({(one.x, one.weight.meta["val"].shape) for one in known}) == 1
            if alike and all(_is_whole(x, known[0]) for x in (node, residual) if x is not None):
                return _Match(known, node, kind, residual)
    return None


def _is_whole(node: fx.Node, product: _Product) -> bool:
    """Whether `node` has the elements, the dtype and the order in memory of the product's result."""
    value, own = calls.tensor(node), calls.tensor(product.node)
    return value.numel() == own.numel() and value.dtype == own.dtype and value.is_contiguous()


def _offer(match: _Match, profile: DeviceProfile) -> Offer:
    first, count, rows = match.products[0], len(match.products), _rows(match.products[0])
    what = f"{'a product' if count == 1 else f'{count} products'} of {'one row' if rows == 1 else f'{rows} rows'}"
    return Offer(
        "tilewright.skinny_linear", what, match.last, lambda: _apply(match), work=(_own_work(match),),
        instead=(*(_library_us(product, profile) for product in match.products), *_after(match)), producer=first.x,
    )  # fmt: skip


def _rows(product: _Product) -> int:
    return int(product.x.meta["val"].shape[0])


def _own_work(match: _Match) -> Work:
    x = match.products[0].x.meta["val"]
    weights = sum(product.weight.meta["val"].numel() for product in match.products)
    written = sum(product.node.meta["val"].numel() for product in match.products)
    written //= 1 + (match.activation == "swiglu")
    read = weights + x.numel() + (0 if match.residual is None else written)
    return Work(
        "tilewright.skinny_linear", 2 * read, 2 * written, 2 * x.shape[0] * weights, dtype=calls.dtype_name(x.dtype),
        distances=((2 * weights, COLD), (2 * (read - weights), 0)),
    )  # fmt: skip


def _library_us(product: _Product, profile: DeviceProfile) -> float:
    work = work_of([product.node])
    return max(predicted_us(work, profile), work.bytes / (profile.read_GBps * 1e3 * LIBRARY_SHARE))


def _after(match: _Match) -> Sequence[Work]:
    """The kernel that computes `match.result` from the library's products.

    None for a residual of several rows: the next norm's kernel adds it. For one row, the next product contains that
    norm.
    """
    is_added_later = match.residual is not None and _rows(match.products[0]) > 1
    return () if match.result is None or is_added_later else (work_of([match.result]),)


def _apply(match: _Match) -> fx.Node:
    import tilewright.kernels.skinny_linear  # noqa: F401, defines the operator

    place, first = match.last, match.products[0]
    none: list[fx.Node | None] = [None] * (MOST_WEIGHTS - len(match.products))
    weights = [*(product.weight for product in match.products), *none]
    biases = [*(product.bias for product in match.products), *none]
    x, gain, eps = _normed(match, place)
    residual = match.residual
    rows, columns = first.x.meta["val"].shape
    if residual is not None:
        residual = insert_call(place, aten.view.default, residual, [rows, first.weight.meta["val"].shape[0]])
    outputs = [product.weight.meta["val"].shape[0] for product in match.products]
    gated = match.activation == "swiglu"
    # Only the number of splits depends on the multiprocessors, not that of blocks: 1 stands for any device.
    blocks = plan(rows, columns, outputs[:1] if gated else outputs, gated, 1).blocks
    zeros = shared_zeros(first.x, blocks) if rows > 1 else None
    options = (*biases, residual, match.activation, zeros)
    new = insert_call(place, torch.ops.tilewright.skinny_linear.default, x, gain, eps, *weights, *options)
    replaced = [place] if match.result is not None else [product.node for product in match.products]
    for number, old in enumerate(replaced):
        result = insert_call(place, operator.getitem, new, number)
        if calls.shape_of(result.meta["val"]) != calls.shape_of(old.meta["val"]):
            result = insert_call(place, aten.view.default, result, list(calls.shape_of(old.meta["val"])))
        old.replace_all_uses_with(result)
    return new


def _shows_all(view: fx.Node) -> bool:
    """Whether a view has all elements of its operand, in their order."""
    shown, seen = (calls.output(node) for node in (view.all_input_nodes[0], view))
    alike = shown is not None and seen is not None and shown.numel() == seen.numel()
    return bool(alike and shown.is_contiguous() and seen.is_contiguous())  # type: ignore[union-attr]


def _normed(match: _Match, place: fx.Node) -> tuple[fx.Node, fx.Node | None, float]:
    """The launch's input, gain and eps: those of the RMS norm before x if only `match` reads it; else x, None and 0."""
    x = match.products[0].x
    if _rows(match.products[0]) > 1:
        return x, None, 0.0
    result = calls.through(x, lambda y: y.target is not operator.getitem and calls.is_view(y) and _shows_all(y))
    found = next(matches(NORMED, result), None)
    if found is None or not set(readers(result)) <= set(match.nodes):
        return x, None, 0.0
    source, gain, eps, own = found["source"], found["gain"], found["eps"], calls.tensor(x)
    value, scale, columns = calls.tensor(source), calls.tensor(gain), own.shape[1]
    if found["shape"] != [columns] or calls.shape_of(scale) != (columns,) or value.dtype != own.dtype:
        return x, None, 0.0
    if not value.is_contiguous() or not scale.is_contiguous():
        return x, None, 0.0
    before = insert_call(place, aten.view.default, source, [1, columns])
    return before, gain, SMALLEST if eps is None else float(eps)


skinny_products = chosen("skinny products", offers)
