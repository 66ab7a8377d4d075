"""FLOPs and exponentials of each ATen operator, one row each; an operator without a row is unknown, or in `cost/own`.

Counting: every addition, multiplication, division, negation, comparison, minimum and maximum is one
FLOP, a multiply-add is two; selections, logic, casts and copies are none. Exponentials, logarithms,
roots, error functions and trigonometry are *transcendentals*, counted apart. Values are counted as
the textbook formula has them, not as a library's polynomial computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import sympy

Count: TypeAlias = "int | sympy.Expr"
"""A number, or a formula in the case's named dimensions: every rule gives either, from shapes of either."""
Shape: TypeAlias = tuple[Count, ...]


class Launch(Protocol):
    """One kernel launch seen through numbers or through symbols."""

    def argument(self, name: str) -> object:
        """The argument `name` of the operator's schema."""

    def shape(self, name: str) -> Shape | None:
        """The shape of tensor argument `name`; None where it is absent."""

    def operand(self, index: int = 0) -> Shape:
        """The shape of the `index`-th tensor operand."""

    def result(self, index: int = 0) -> Shape:
        """The shape of the `index`-th result."""

    def number(self, count: Count) -> int:
        """A count at the sizes of this launch."""


Formula = Callable[[Launch], Count]


@dataclass(frozen=True)
class Arithmetic:
    """What one operator computes."""

    flops: Formula
    transcendentals: Formula


def elements(shape: Shape | None) -> Count:
    count: Count = 1 if shape is not None else 0
    for size in shape or ():
        count = count * size
    return count


def _table(text: str) -> dict[str, tuple[int, int]]:
    """Rows `FLOPs transcendentals: operators`."""
    rows = (line.split(":") for line in text.strip().splitlines())
    return {name: (int(costs[0]), int(costs[2])) for costs, names in rows for name in names.split()}


# For each element of the result.
PER_RESULT = _table("""
1 0: add sub rsub mul div neg abs reciprocal maximum minimum sign relu eq ne lt le gt ge isnan isinf
1 0: sgn floor ceil trunc round clamp_min clamp_max threshold_backward
2 0: clamp leaky_relu leaky_relu_backward native_dropout native_dropout_backward
3 0: addcmul addcdiv lerp sigmoid_backward tanh_backward
0 1: exp exp2 expm1 log log2 log10 log1p sqrt rsqrt erf erfc atan2 sin cos tan asin acos atan sinh cosh tanh
3 1: sigmoid
4 1: silu elu elu_backward
2 0: hardtanh hardtanh_backward _prelu_kernel
3 0: hardsigmoid_backward _prelu_kernel_backward
4 0: hardsigmoid mse_loss_backward
5 0: hardswish hardswish_backward huber_loss_backward
6 0: smooth_l1_loss_backward
7 0: binary_cross_entropy_backward
1 3: mish
9 4: mish_backward
8 1: silu_backward
3 2: softplus
5 1: softplus_backward
0 0: nan_to_num fill zero
0 0: where masked_fill logical_not logical_and logical_or logical_xor
0 0: bitwise_not bitwise_and bitwise_or bitwise_xor
0 0: convert_element_type.default
0 0: _to_copy clone copy copy_ lift_fresh_copy full full_like zeros ones zeros_like ones_like scalar_tensor arange
0 0: empty empty_like new_empty new_empty_strided new_full new_zeros new_ones eye
0 0: embedding index index_put index_select gather scatter slice_scatter select_scatter select_backward
0 0: slice_backward value_selecting_reduction_backward cat stack constant_pad_nd tril triu flip roll repeat
0 0: bernoulli keep_mask rand randn rand_like randn_like randint normal_functional uniform
0 0: tilewright.draw_stream tilewright.keep
""")

# For each element of the first operand.
PER_OPERAND = _table("""
1 0: sum mean prod amax amin max min argmax argmin cumsum cumprod embedding_dense_backward
0 0: any all
2 0: linalg_vector_norm
4 0: var std var_mean
3 1: logsumexp
3 0: mse_loss
8 0: smooth_l1_loss huber_loss
8 2: binary_cross_entropy_with_logits binary_cross_entropy
4 1: _softmax _log_softmax
4 0: _softmax_backward_data
3 1: _log_softmax_backward_data
""")


def _gelu(launch: Launch) -> Count:
    # x·½·(1 + erf(x/√2)); x·½·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
    return elements(launch.result()) * (8 if launch.argument("approximate") == "tanh" else 4)


def _gelu_backward(launch: Launch) -> Count:
    # g·(Φ(x) + x·φ(x)): Φ takes 3, φ 3 and the rest 3; with tanh the derivative's chain takes 17.
    return elements(launch.result()) * (17 if launch.argument("approximate") == "tanh" else 9)


def _gelu_backward_transcendentals(launch: Launch) -> Count:
    return elements(launch.result()) * (1 if launch.argument("approximate") == "tanh" else 2)


MULTIPLICATIONS: dict[object, int] = {2: 1, 3: 2}
"""How many multiplications a small power is."""


def _power(launch: Launch) -> Count:

    return elements(launch.result()) * MULTIPLICATIONS.get(launch.argument("exponent"), 0)


def _power_transcendentals(launch: Launch) -> Count:
    return 0 if launch.argument("exponent") in MULTIPLICATIONS else elements(launch.result())


def _wanted(launch: Launch, results: int) -> list[int]:
    """1 for each result that the call asks for, 0 for the others."""
    mask = launch.argument("output_mask")
    return [int(bool(wanted)) for wanted in mask] if isinstance(mask, Sequence) else [1] * results


def _layer_norm(launch: Launch) -> Count:
    # Mean 1, variance 3, scaling 1, and the weight and the bias where there are any.
    affine = sum(launch.shape(name) is not None for name in ("weight", "bias"))
    return elements(launch.shape("input")) * (5 + affine)


def _layer_norm_backward(launch: Launch) -> Count:
    # x̂ takes 2. Towards the input 7 (two sums, a product, the combination), 1 with a weight.
    source, weight, bias = _wanted(launch, 3)
    per_element = 2 + source * (7 + (launch.shape("weight") is not None)) + weight * 2 + bias
    return elements(launch.shape("input")) * per_element


def _batch_norm_inference(launch: Launch) -> Count:
    # Centring and scaling, and the weight and the bias where there are any.
    affine = sum(launch.shape(name) is not None for name in ("weight", "bias"))
    return elements(launch.shape("input")) * (2 + affine)


def _batch_norm_backward(launch: Launch) -> Count:
    # x̂ takes 2, its sums 3; towards the input 4 (the combination and the scale of the channel).
    return elements(launch.shape("input")) * (5 + 4 * _wanted(launch, 3)[0])


def _channels(launch: Launch) -> Count:
    """One root for each channel."""
    return elements(launch.shape("running_mean"))


def _rms_norm(launch: Launch) -> Count:
    return elements(launch.shape("input")) * (3 + (launch.shape("weight") is not None))


def _rms_norm_backward(launch: Launch) -> Count:
    source, weight = _wanted(launch, 2)
    per_element = 1 + source * (5 + (launch.shape("weight") is not None)) + weight * 2
    return elements(launch.shape("input")) * per_element


def _rows(launch: Launch) -> Count:
    """One root for each row that is normalised."""
    return elements(launch.result(1))


def _product(launch: Launch) -> Count:
    # A bias is what the accumulator starts from: no FLOPs of its own.
    left = launch.operand(-2)
    return 2 * elements(launch.result()) * left[-1]


def _linear(launch: Launch) -> Count:
    source = launch.shape("input")
    assert source is not None
    return 2 * elements(launch.result()) * source[-1]


def _batch_sum(launch: Launch) -> Count:
    # addbmm: every product of the batch is added into one result.
    left = launch.operand(-2)
    return 2 * elements(launch.result()) * left[-1] * left[0]


def _convolution_of(launch: Launch, result: Shape) -> Count:
    # [N, C, …] with a kernel of [out, in / groups, …], or [in, out / groups, …] transposed.
    source, weight = launch.shape("input"), launch.shape("weight")
    assert source is not None and weight is not None
    points = source if launch.argument("transposed") else result
    return 2 * points[0] * elements(points[2:]) * elements(weight)


def _convolution(launch: Launch) -> Count:
    return _convolution_of(launch, launch.result())


def _convolution_backward(launch: Launch) -> Count:
    source, weight, bias = _wanted(launch, 3)
    gradient = launch.shape("grad_output")
    assert gradient is not None
    return (source + weight) * _convolution_of(launch, gradient) + bias * elements(gradient)


def _attention_of(launch: Launch, key_products: int, value_products: int) -> Count:
    # Each product of a row with the keys (or the values) takes 2·d for each of their pairs.
    query, value = _operand(launch, "query"), _operand(launch, "value")
    return _pairs_twice(launch) * (key_products * query[-1] + value_products * value[-1])


def _operand(launch: Launch, name: str) -> Shape:
    """Of PyTorch's attention by its name, of tilewright's by the first letter."""
    shape = launch.shape(name) or launch.shape(name[0])
    assert shape is not None
    return shape


def _pairs_twice(launch: Launch) -> Count:
    """Two for each pair of a query and a key that it sees, in every head."""
    query, key = _operand(launch, "query"), _operand(launch, "key")
    heads, rows, keys = elements(query[:-2]), query[-2], key[-2]
    left, right = launch.argument("left"), launch.argument("right")
    if left is None and right in (None, 0):
        causal = bool(launch.argument("is_causal")) or right == 0
        # The last query stands at the last key: where there are more keys, each query sees those in front of all.
        before = rows * (keys - rows) if right == 0 and launch.number(keys - rows) > 0 else 0
        return heads * (rows * keys + before) if causal else 2 * heads * rows * keys
    return 2 * heads * _within(launch.number(rows), launch.number(keys), left, right)


def _within(rows: int, keys: int, left: object, right: object) -> int:
    """Pairs of a window, the last query in line with the last key: those up to its right end less those left of it."""
    most = _up_to(rows, keys, right) if isinstance(right, int) else rows * keys
    return max(most - _up_to(rows, keys, -left - 1), 0) if isinstance(left, int) else most


def _up_to(rows: int, keys: int, places: int) -> int:
    """Pairs whose key is at most so many places after the query."""

    def summed(last: int) -> int:
        # The numbers up to `last`, none below 0 and none above `keys`.
        inside = min(max(last, 0), keys)
        return inside * (inside + 1) // 2 + keys * max(last - keys, 0)

    return summed(keys + places) - summed(keys - rows + places)


def attention(launch: Launch) -> Count:
    return _attention_of(launch, 1, 1)


def attention_backward(launch: Launch) -> Count:
    # QKᵀ again, dQ and dK of width d; dP and dV of the values' width.
    return _attention_of(launch, 3, 2)


def attention_exponentials(launch: Launch) -> Count:
    return _pairs_twice(launch) // 2


def _per(shape: Formula, cost: int) -> Formula:
    return lambda launch: cost * shape(launch) if cost else 0


def _nothing(_: Launch) -> Count:
    return 0


def _of_result(launch: Launch) -> Count:
    return elements(launch.result())


def _of_operand(launch: Launch) -> Count:
    return elements(launch.operand())


PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul")
SDPA = "_scaled_dot_product"
ATTENTION = ["flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention"]

ARITHMETIC: dict[str, Arithmetic] = {
    **{name: Arithmetic(_per(_of_result, f), _per(_of_result, t)) for name, (f, t) in PER_RESULT.items()},
    **{name: Arithmetic(_per(_of_operand, f), _per(_of_operand, t)) for name, (f, t) in PER_OPERAND.items()},
    "gelu": Arithmetic(_gelu, _of_result),
    "gelu_backward": Arithmetic(_gelu_backward, _gelu_backward_transcendentals),
    "pow": Arithmetic(_power, _power_transcendentals),
    "native_layer_norm": Arithmetic(_layer_norm, _rows),
    "native_layer_norm_backward": Arithmetic(_layer_norm_backward, _nothing),
    "_native_batch_norm_legit_functional": Arithmetic(_layer_norm, _rows),
    "_native_batch_norm_legit_no_training": Arithmetic(_batch_norm_inference, _channels),
    "native_batch_norm_backward": Arithmetic(_batch_norm_backward, _nothing),
    "_fused_rms_norm": Arithmetic(_rms_norm, _rows),
    "_fused_rms_norm_backward": Arithmetic(_rms_norm_backward, _nothing),
    "nll_loss_forward": Arithmetic(lambda launch: elements(launch.shape("target")), _nothing),
    "nll_loss_backward": Arithmetic(lambda launch: elements(launch.shape("target")), _nothing),
    "scatter_add": Arithmetic(lambda launch: elements(launch.shape("src")), _nothing),
    **dict.fromkeys(PRODUCTS, Arithmetic(_product, _nothing)),
    "linear": Arithmetic(_linear, _nothing),
    "addbmm": Arithmetic(_batch_sum, _nothing),
    "convolution": Arithmetic(_convolution, _nothing),
    "convolution_backward": Arithmetic(_convolution_backward, _nothing),
    "scaled_dot_product_attention": Arithmetic(attention, attention_exponentials),
    **{f"{SDPA}_{kind}": Arithmetic(attention, attention_exponentials) for kind in ATTENTION},
    **{f"{SDPA}_{kind}_backward": Arithmetic(attention_backward, attention_exponentials) for kind in ATTENTION},
}
