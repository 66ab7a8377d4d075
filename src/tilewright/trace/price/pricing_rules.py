"""What a recorded call reads and writes: pointwise by broadcasting, and one rule for each other operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tilewright.cost.arithmetic import PER_RESULT, Arithmetic, Count, Launch, elements
from tilewright.trace.price.recorded_call import Call, Tensor, dense


@dataclass(frozen=True)
class Traffic:
    """What a call reads and writes, and the results that its FLOPs are counted by."""

    reads: Sequence[Tensor]
    writes: Sequence[Tensor]
    arithmetic: Arithmetic | None = None
    """Where the operator's own is not in the table."""
    operands: Sequence[Tensor] | None = None
    """As the formula has them, where they are not what is read."""


Rule = Callable[[Call, bool], Traffic | None]
"""`rule(call, inplace)`, the name of the call without the underscore of an in-place operator."""


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape that operands of these shapes give together.

    >>> broadcast([(4, 1), (3,)])
    (4, 3)
    """
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


_UNARY = "neg abs reciprocal sign relu isnan isinf sgn floor ceil trunc round leaky_relu clamp exp exp2 expm1 log log2"
_UNARY += " log10 log1p sqrt rsqrt erf erfc sin cos tan asin acos atan sinh cosh tanh sigmoid silu softplus clone"
_UNARY += " logical_not bitwise_not"
OPERANDS = {**dict.fromkeys(_UNARY.split(), 1), **dict.fromkeys(("where", "addcmul", "addcdiv", "lerp"), 3)}
"""Tensors that a pointwise operator takes, 2 unless listed; what follows them is `out=`, which is only written."""


def pointwise(call: Call, inplace: bool) -> Traffic | None:
    """The result is the operands' broadcast, or the first operand itself."""
    tensors = call.tensors[: OPERANDS.get(call.name, 2)]
    if not tensors:
        return None
    result = tensors[0] if inplace else dense(broadcast([tensor.shape for tensor in tensors]), _promoted(call, tensors))
    return Traffic(tensors, [result])


_TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", *(f"logical_{x}" for x in ("not", "and", "or", "xor")))


def _promoted(call: Call, tensors: Sequence[Tensor]) -> Tensor:
    """A tensor of the result's dtype: a tensor without axes does not widen the others."""
    if call.name in _TRUTHS:
        return Tensor((), 1, 1, "bool")
    values = tensors[1:] if call.name == "where" else tensors
    deciding = [tensor for tensor in values if tensor.shape] or list(values)
    return max(deciding, key=lambda tensor: ("float" in tensor.dtype, tensor.itemsize))


def per_element(flops: int, special: int) -> Arithmetic:
    """The cost of an operator that does so much for each element of its first result."""

    def of_result(launch: Launch) -> Count:
        return elements(launch.result())

    return Arithmetic(lambda launch: flops * of_result(launch), lambda launch: special * of_result(launch))


NOTHING = Arithmetic(lambda _: 0, lambda _: 0)


def _product(call: Call, _: bool) -> Traffic:
    # What follows the operands of the schema is `out=`.
    count = 3 if call.name in ("addmm", "baddbmm", "addmv") else 2
    operands = call.tensors[:count]
    left, right = operands[-2:]
    shape = (*left.shape[:-1], *right.shape[len(left.shape) - 1 :]) if len(right.shape) > 1 else left.shape[:-1]
    if call.name == "dot":
        shape = ()
    return Traffic(operands, [dense(shape, left)])


def _reduction(call: Call, _: bool) -> Traffic:
    source = call.tensors[0]
    dims, keep = call.value(1), call.value(2)
    axes = [dims] if isinstance(dims, int) else dims if isinstance(dims, list) and dims else range(len(source.shape))
    gone = {axis % max(len(source.shape), 1) for axis in axes}
    shape = [1 if i in gone else size for i, size in enumerate(source.shape) if i not in gone or keep is True]
    results = [dense(shape, source)]
    if call.name in ("max", "min") and isinstance(dims, int):
        results.append(Tensor(tuple(shape), prod(shape), 8, "int64"))
    return Traffic([source], results)


def _same(call: Call, _: bool) -> Traffic:
    """The result is like the first operand."""
    return Traffic(call.tensors, [dense(call.tensors[0].shape, call.tensors[0])])


def _softmax_backward(call: Call, _: bool) -> Traffic:
    gradient, output = call.tensors[:2]
    return Traffic([gradient, output], [dense(gradient.shape, gradient)])


def _copy(call: Call, _: bool) -> Traffic:
    into, source = call.tensors[:2]
    return Traffic([source], [into], NOTHING)


def _written(call: Call, _: bool) -> Traffic:
    """Only written: filled or drawn."""
    return Traffic([], [call.tensors[0]], NOTHING)


def _one_read(call: Call, _: bool) -> Traffic:
    return Traffic([dense((), call.tensors[0])], [], NOTHING)


def _layer_norm(call: Call, _: bool) -> Traffic:
    source = call.tensors[0]
    normalized = call.value(1)
    rows = source.shape[: len(source.shape) - len(normalized)] if isinstance(normalized, list) else source.shape[:-1]
    statistic = Tensor(rows, prod(rows), max(source.itemsize, 4), "float32")
    count = 2 if call.name == "native_layer_norm" else 1
    return Traffic(call.tensors, [dense(source.shape, source), *[statistic] * count])


def _norm_backward(call: Call, _: bool) -> Traffic:
    gradient = call.tensors[0]
    named = [operand for operand in call.operands[5:7] if isinstance(operand, Tensor)]
    if call.name == "_fused_rms_norm_backward":
        named = [operand for operand in call.operands[4:5] if isinstance(operand, Tensor)]
    bias = call.operands[6] if call.name == "native_layer_norm_backward" else None
    reads = [tensor for tensor in call.tensors if tensor is not bias]
    return Traffic(reads, [dense(gradient.shape, gradient), *(dense(tensor.shape, tensor) for tensor in named)])


def _dropout(call: Call, _: bool) -> Traffic:
    source = call.tensors[0]
    return Traffic([source], [dense(source.shape, source), Tensor(source.shape, prod(source.shape), 1, "bool")])


def _embedding(call: Call, _: bool) -> Traffic:
    weight, indices = call.tensors[:2]
    result = dense((*indices.shape, weight.shape[-1]), weight)
    gathered = Tensor(result.shape, min(result.own, weight.own), weight.itemsize, weight.dtype)
    return Traffic([gathered, indices], [result])


def _embedding_backward(call: Call, _: bool) -> Traffic | None:
    gradient, indices = call.tensors[:2]
    rows = call.value(2)
    if not isinstance(rows, int):
        return None
    return Traffic([gradient, indices], [dense((rows, gradient.shape[-1]), gradient)])


def _gathered(call: Call, _: bool) -> Traffic:
    source, *rest = call.tensors
    places = next(tensor for tensor in rest if tensor.dtype in ("int64", "int32"))
    if call.name == "gather":
        shape: tuple[int, ...] = places.shape
    else:
        axis = call.value(1)
        at = axis if isinstance(axis, int) else 0
        shape = tuple(prod(places.shape) if i == at % len(source.shape) else n for i, n in enumerate(source.shape))
    result = dense(shape, source)
    return Traffic([Tensor(shape, min(result.own, source.own), source.itemsize, source.dtype), places], [result])


def _cat(call: Call, _: bool) -> Traffic:
    parts = call.lists[0]
    total = sum(part.elements for part in parts)
    return Traffic(parts, [dense((total,), parts[0])])


def _loss(call: Call, _: bool) -> Traffic:
    first, second = call.tensors[:2]
    mean = call.value(2) in (1, 2)
    each = Arithmetic(lambda _: 3 * first.elements, lambda _: 0)
    return Traffic([first, second], [dense(() if mean else first.shape, first)], each)


def _loss_backward(call: Call, _: bool) -> Traffic:
    gradient, first, second = call.tensors[:3]
    return Traffic([gradient, first, second], [dense(first.shape, first)], per_element(3, 0))


def _nll(call: Call, _: bool) -> Traffic:
    source, target = call.tensors[:2]
    taken = Tensor(target.shape, target.own, source.itemsize, source.dtype)
    one = dense((), source)
    return Traffic([taken, target], [one, one])


def _nll_backward(call: Call, _: bool) -> Traffic:
    gradient, source, target = call.tensors[:3]
    return Traffic([gradient, target], [dense(source.shape, source)])


def _attention(causal: int, heads_first: bool) -> Rule:
    """[B, H, S, d], or [B, S, H, d] where heads are not first; a causal mask leaves half of the pairs.

    `causal` is the place of `is_causal`, or of the kind of mask, among the operands. Backward takes the result's
    gradient first.
    """

    def rule(call: Call, _: bool) -> Traffic:
        backward = call.name.endswith("_backward")
        query, key, value = call.tensors[1:4] if backward else call.tensors[:3]
        share = 2 if call.value(causal) else 1
        length = key.shape[-2] if heads_first else key.shape[-3]
        pairs = query.elements // query.shape[-1] * length
        widths = (3 if backward else 1) * query.shape[-1] + (2 if backward else 1) * value.shape[-1]
        cost = Arithmetic(lambda _: 2 * pairs * widths // share, lambda _: pairs // share)
        result = dense((*query.shape[:-1], value.shape[-1]), query)
        statistic = Tensor((pairs // length,), pairs // length, 4, "float32")
        if backward:
            reads = [call.tensors[0], query, key, value, result, statistic]
            writes = [dense(tensor.shape, tensor) for tensor in (query, key, value)]
            return Traffic(reads, writes, cost, [query])
        return Traffic([query, key, value], [result, statistic], cost, [query])

    return rule


def _foreach(call: Call, inplace: bool) -> Traffic | None:
    name = call.name.removeprefix("_foreach_")
    costs = PER_RESULT.get(name) or {"pow": (0, 1), "norm": (2, 0), "copy": (0, 0), "zero": (0, 0)}.get(name)
    if costs is None:
        return None
    lists = call.lists
    flat = [tensor for one in lists for tensor in one]
    flops, special = costs
    elements = sum(tensor.elements for tensor in lists[0])
    cost = Arithmetic(lambda _: flops * elements, lambda _: special * elements)
    only_written = name in ("zero",) or (name == "copy" and inplace)
    reads = [tensor for one in lists[1 if only_written else 0 :] for tensor in one]
    if name == "norm":
        return Traffic(flat, [dense((), tensor) for tensor in lists[0]], cost, flat)
    return Traffic([*reads, *call.tensors], [dense(tensor.shape, tensor) for tensor in lists[0]], cost, flat)


def _fused_optimizer(written: tuple[int, ...], flops: int, special: int) -> Rule:
    """Lists of parameters, gradients and states; `written` are those that the step changes."""

    def rule(call: Call, _: bool) -> Traffic:
        lists = [one for one in call.lists if one]
        elements = sum(tensor.elements for tensor in lists[0])
        cost = Arithmetic(lambda _: flops * elements, lambda _: special * elements)
        writes = [tensor for index in written if index < len(lists) for tensor in lists[index]]
        reads = [tensor for one in lists for tensor in one]
        return Traffic(reads, writes, cost, list(lists[0]))

    return rule


_REDUCTIONS = "sum mean prod amax amin max min argmax argmin any all var std linalg_vector_norm logsumexp"
_FOREACH = "add sub mul div neg abs reciprocal maximum minimum sign sqrt rsqrt exp log lerp addcmul addcdiv clamp_min"
_FOREACH += " clamp_max pow norm copy zero"

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot"), _product),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    "pow": pointwise,
    **dict.fromkeys(("cumsum", "cumprod", "_softmax", "_log_softmax", "gelu"), _same),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data", "gelu_backward"), _softmax_backward),
    "copy_": _copy,
    **dict.fromkeys(("fill_", "zero_", "random_", "uniform_", "normal_", "bernoulli_", "arange"), _written),
    "_local_scalar_dense": _one_read,
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), _layer_norm),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), _norm_backward),
    "native_dropout": _dropout,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("index_select", "gather"), _gathered),
    "cat": _cat,
    "mse_loss": _loss,
    "mse_loss_backward": _loss_backward,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll_backward,
    "_flash_attention_forward": _attention(8, False),
    "_flash_attention_backward": _attention(11, False),
    "_efficient_attention_forward": _attention(9, False),
    "_efficient_attention_backward": _attention(14, False),
    "_cudnn_attention_forward": _attention(10, True),
    "_cudnn_attention_backward": _attention(14, True),
    "_scaled_dot_product_flash_attention": _attention(4, True),
    "_scaled_dot_product_flash_attention_backward": _attention(11, True),
    "_scaled_dot_product_cudnn_attention": _attention(6, True),
    "_scaled_dot_product_cudnn_attention_backward": _attention(14, True),
    **{f"_foreach_{name}": _foreach for name in _FOREACH.split()},
    "_fused_adamw": _fused_optimizer((0, 2, 3), 14, 1),
    "_fused_adam": _fused_optimizer((0, 2, 3), 13, 1),
    "_fused_sgd": _fused_optimizer((0, 2), 4, 0),
}
