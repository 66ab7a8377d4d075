"""Costs of tilewright's own operators against closed formulas, and against the same mathematics in ATen's operators."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cost.counted import program_costs
from tests.graph.captured import Program
from tests.kernels.registered import all_operators
from tilewright import functional
from tilewright.cost.operators import operator_cost
from tilewright.cost.symbols import pretty, total
from tilewright.graph import calls
from tilewright.kernels.device import traced_for_gpu
from tilewright.records.program import Cost

all_operators()
own = torch.ops.tilewright
NAMES = ["B", "H", "K", "N", "M", "D", "V"]
SIZES = {"B": 3, "H": 4, "K": 2, "N": 6, "M": 10, "D": 14, "V": 22}


def gradients(function: Callable[..., object], *, again: bool = False) -> Callable[..., object]:
    """The function's gradients, `again` as if those of the gradients were wanted."""

    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors)
        found = function(*leaves)
        results = found if isinstance(found, tuple) else (found,)
        floating = [leaf for leaf in leaves if leaf.is_floating_point()]
        return torch.autograd.grad([y.sum() for y in results], floating, create_graph=again)

    return program


def own_cost(function: Callable[..., object], inputs: tuple[str, ...], name: str, sizes: Mapping[str, int]) -> Cost:
    """The cost of the one call of `tilewright::name` in a program."""
    # Without the options, which tracing would take for inputs.
    program = Program(lambda *tensors: function(*tensors), inputs)
    shapes = program.shapes(program.graph(sizes), sizes)
    (node,) = (node for node in shapes.graph.nodes if calls.operator_name(node.target) == f"tilewright.{name}")
    return operator_cost(node, shapes)


@dataclass(frozen=True)
class Counts:
    """The counts of one call, in the names of its inputs."""

    function: Callable[..., object]
    inputs: tuple[str, ...]
    reads: str
    writes: str
    flops: str
    unused: str = "0"
    transcendentals: str = "0"


MATRIX = "bfloat16[N,M]"
VECTOR = "bfloat16[M]"
LOGITS = (MATRIX, "int64[N]")
LINEAR = ("bfloat16[N,D]", "bfloat16[M,D]", "bfloat16[M]")
VOCABULARY = ("bfloat16[N,D]", "bfloat16[V,D]", "int64[N]")
COUNTS = {
    "activation": Counts(functional.gelu, (MATRIX,), "N·M", "N·M", "4·N·M", transcendentals="N·M"),
    "activation_backward": Counts(
        lambda dy, x: own.activation_backward(dy, x, "gelu_tanh"),
        (MATRIX, MATRIX),
        *("2·N·M", "N·M", "17·N·M"),
        transcendentals="N·M",
    ),
    "depthwise_convolution": Counts(
        lambda x, weight: own.depthwise_convolution(x, weight, [1], [1], [1]),
        ("bfloat16[N,M,D]", "bfloat16[M,1,3]"),
        *("N·M·D + 3·M", "14·N·M", "84·N·M"),
    ),
    "gated_activation": Counts(functional.swiglu, (MATRIX, MATRIX), "2·N·M", "N·M", "5·N·M", transcendentals="N·M"),
    "gated_activation_backward": Counts(
        gradients(functional.swiglu), (MATRIX, MATRIX), "2·N·M + 1", "2·N·M", "14·N·M", transcendentals="2·N·M"
    ),
    "softmax": Counts(functional.softmax, (MATRIX,), "N·M", "N·M", "4·N·M", transcendentals="N·M"),
    "softmax_backward": Counts(
        lambda y, dy: own.softmax_backward(y, dy, False), (MATRIX, MATRIX), "2·N·M", "N·M", "4·N·M"
    ),
    "norm": Counts(
        functional.layer_norm, (MATRIX, VECTOR, VECTOR), "N·M + 2·M", "N·M", "7·N·M", "2·N", transcendentals="N"
    ),
    # No gradient is asked for, so nobody takes what it keeps.
    "add_norm": Counts(
        functional.add_rms_norm, (MATRIX, MATRIX, VECTOR), "2·N·M + M", "2·N·M", "5·N·M", "N", transcendentals="N"
    ),
    "norm_backward": Counts(
        lambda dy, x, w, rstd: own.norm_backward(dy, x, None, w, False, rstd[:0], rstd, False),
        (MATRIX, MATRIX, VECTOR, "float32[N]"),
        *("2·N·M + N + M", "N·M + M", "9·N·M"),
    ),
    # Of all rows one loss; for each row its maximum and its sum are kept, and what one row counts for.
    "cross_entropy": Counts(
        functional.cross_entropy, LOGITS, "N·M + N", "1", "4·N·M + N", "2·N + 1", transcendentals="N·M"
    ),
    "cross_entropy_backward": Counts(
        gradients(functional.cross_entropy), LOGITS, "N·M + 3·N + 2", "N·M", "2·N·M + 3·N", transcendentals="N·M"
    ),
    "dropout_add": Counts(
        lambda x, r: functional.dropout_add(x, r, 0.1, activation="gelu"),
        (MATRIX, MATRIX),
        *("2·N·M", "N·M", "7·N·M", "2"),
        transcendentals="N·M",
    ),
    "dropout_add_backward": Counts(
        lambda dout, state: own.dropout_add_backward(dout, None, state, 0.1, "none", 16),
        (MATRIX, "int64[2]"),
        *("N·M + 2", "N·M", "2·N·M"),
    ),
    "linear_gelu": Counts(
        functional.linear_gelu, LINEAR, "N·D + M·D + M", "N·M", "2·N·M·D + 4·N·M", transcendentals="N·M"
    ),
    "linear_dropout_add": Counts(
        lambda x, w, b, r: functional.linear_dropout_add(x, w, b, r, 0.1),
        (*LINEAR, MATRIX),
        *("N·M + N·D + M·D + M", "N·M", "2·N·M·D + 3·N·M", "2"),
    ),
    "skinny_linear": Counts(
        lambda x, gate, up: own.skinny_linear(x, None, 0.0, gate, up, *[None] * 5, "swiglu", None)[0],
        ("bfloat16[N,D]", "bfloat16[M,D]", "bfloat16[M,D]"),
        *("N·D + 2·M·D", "N·M", "4·N·M·D"),
    ),
    "write_cache_": Counts(
        lambda keys, values, k, v, place: own.write_cache_(keys, values, k, v, place, None, None, None),
        (*["bfloat16[B,K,V,D]"] * 2, *["bfloat16[B,K,N,D]"] * 2, "int64[N]"),
        *("2·B·K·N·D + N", "2·B·K·N·D", "3·B·K·N·D"),
    ),
    # The logits are written and read once more; only with gradients are theirs written, and read by two products.
    "linear_cross_entropy": Counts(
        functional.linear_cross_entropy,
        VOCABULARY,
        *("N·D + N·V + D·V + N", "N·V + 1", "2·N·D·V + 4·N·V + N", "1"),
        transcendentals="N·V",
    ),
    "linear_cross_entropy_backward": Counts(
        gradients(functional.linear_cross_entropy, again=True),
        VOCABULARY,
        *("3·N·D + 3·N·V + 3·D·V + N + 1", "2·N·D + 2·N·V + 2·D·V", "6·N·D·V + N·D + 6·N·V + D·V + 4·N"),
        transcendentals="2·N·V",
    ),
    "scale_gradient_": Counts(
        lambda gradient, factor: (own.scale_gradient_(gradient, factor), gradient + 0)[1],
        (MATRIX, "float32[]"),
        *("N·M + 1", "N·M", "N·M"),
    ),
    "weighted_sum": Counts(functional.weighted_sum, (MATRIX, VECTOR), "N·M + M", "N", "2·N·M"),
    "weighted_sum_backward": Counts(
        lambda dy, x, w: own.weighted_sum_backward(dy, x, w, True, True),
        ("bfloat16[N]", MATRIX, VECTOR),
        *("N·M + N + M", "N·M + M", "3·N·M"),
    ),
    # 6 of 22 rows are read at most.
    "scatter_sums": Counts(
        lambda x, at: own.scatter_sums(x, at.expand(6, 10), 22), (MATRIX, "int64[M]"), "N·M + M", "22·N", "N·M"
    ),
    "index_sums": Counts(
        lambda x, at: own.index_sums(x, at.view(1, -1, 1).expand(x.shape), 22, False),
        ("bfloat16[1,N,M]", "int64[N]"),
        *("N·M + N", "22·M", "N·M"),
    ),
    "add_embedding_sums_": Counts(
        lambda table, dout, keys, order, bounds: own.add_embedding_sums_(table, dout, keys, order, bounds, -1),
        ("bfloat16[V,M]", MATRIX, "int64[N]", "int64[N]", "int64[D]"),
        *("2·N·M + 2·N + D", "N·M", "N·M"),
    ),
    "embedding_sums": Counts(
        lambda dout, keys, order, bounds: own.embedding_sums(dout, keys, order, bounds, 22, -1),
        (MATRIX, "int64[N]", "int64[N]", "int64[D]"),
        *("N·M + 2·N + D", "22·M", "N·M"),
    ),
    "sorted_bounds": Counts(lambda keys: own.sorted_bounds(keys, 22), ("int32[N]",), *("N", "23", "0")),
    "row_extremes": Counts(
        lambda rows, keys, order, bounds: own.row_extremes(rows, keys, order, bounds, 22, True, 0.0, True),
        (MATRIX, "int64[N]", "int64[N]", "int64[D]"),
        *("N·M + 2·N + D", "22·M", "N·M"),
    ),
    "matching_sums": Counts(
        lambda other, mine, rows, *sort: own.matching_sums(other, mine, rows, *sort),
        (MATRIX, "bfloat16[V,M]", MATRIX, "int64[N]", "int64[N]", "int64[D]"),
        *("2·N·M + M·V + 2·N + D", "M·V", "2·N·M"),
    ),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_in_closed_form(name: str) -> None:
    expected = COUNTS[name]
    # The size of what no input's axis names is the number in the call.
    with traced_for_gpu(True):
        cost = own_cost(expected.function, expected.inputs, name, SIZES)
    found = [pretty(text or "?", NAMES) for text in (cost.reads_symbolic, cost.writes_symbolic, cost.flops_symbolic)]
    assert found == [expected.reads, expected.writes, expected.flops]
    assert pretty(cost.unused_symbolic or "?", NAMES) == expected.unused
    assert cost.transcendentals == eval(expected.transcendentals.replace("·", "*"), {}, SIZES)


def test_every_operator_but_attention_is_counted_above() -> None:
    names = {name.removeprefix("tilewright::") for name in all_operators()}
    windows = {"window_attention", "window_attention_backward"}
    assert names - set(COUNTS) == {"attention", "attention_backward", "attention_prefix", *windows}


# The same mathematics in ATen's operators.


def arithmetic(function: Callable[..., object], *inputs: str) -> tuple[int, int]:
    """FLOPs and transcendentals of a whole program."""
    cost = total(program_costs(Program(lambda *tensors: function(*tensors), inputs), SIZES).values())
    assert cost.provenance == "formula"
    return cost.flops, cost.transcendentals


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def smoothed_and_squared(x: Tensor, target: Tensor) -> Tensor:
    logarithms = x.log_softmax(1)
    mixed = 0.9 * F.nll_loss(logarithms, target, reduction="none") - 0.01 * logarithms.sum(1)
    return (mixed + 1e-4 * (x[:, 0] - logarithms[:, 0]).square()).sum()


WRITTEN_OUT: dict[str, tuple[Callable[..., object], Callable[..., object], tuple[str, ...]]] = {
    "gelu": (functional.gelu, F.gelu, (MATRIX,)),
    "gelu tanh": (lambda x: functional.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), (MATRIX,)),
    "silu": (functional.silu, F.silu, (MATRIX,)),
    "swiglu": (functional.swiglu, lambda g, u: F.silu(g) * u, (MATRIX, MATRIX)),
    "geglu": (functional.geglu, lambda g, u: F.gelu(g) * u, (MATRIX, MATRIX)),
    "softmax": (functional.softmax, lambda x: x.softmax(-1), (MATRIX,)),
    "log softmax": (functional.log_softmax, lambda x: x.log_softmax(-1), (MATRIX,)),
    "layer norm": (
        functional.layer_norm,
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        (MATRIX, VECTOR, VECTOR),
    ),
    "layer norm alone": (functional.layer_norm, lambda x: F.layer_norm(x, x.shape[-1:]), (MATRIX,)),
    "added layer norm": (
        functional.add_layer_norm,
        lambda x, r, w: F.layer_norm(x + r, x.shape[-1:], w),
        (MATRIX, MATRIX, VECTOR),
    ),
    "cross entropy": (functional.cross_entropy, F.cross_entropy, LOGITS),
    "dropout and residual": (
        lambda x, r: functional.dropout_add(x, r, 0.1, activation="silu"),
        lambda x, r: torch.native_dropout(F.silu(x), 0.1, True)[0] + r,
        (MATRIX, MATRIX),
    ),
    "residual alone": (lambda x, r: own.dropout_add(x, r, 0.0, "none", 16)[0], torch.add, (MATRIX, MATRIX)),
    "linear and gelu": (functional.linear_gelu, lambda x, w, b: F.gelu(F.linear(x, w, b)), LINEAR),
    "linear and dropout": (
        lambda x, w, b, r: functional.linear_dropout_add(x, w, b, r, 0.1),
        lambda x, w, b, r: torch.native_dropout(F.linear(x, w, b), 0.1, True)[0] + r,
        (*LINEAR, MATRIX),
    ),
    "linear and cross entropy": (
        functional.linear_cross_entropy,
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        VOCABULARY,
    ),
    "weighted sum": (functional.weighted_sum, lambda x, w: (x * w).sum(-1), (MATRIX, VECTOR)),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_forward_computes_what_is_written_out(name: str) -> None:
    ours, written_out, inputs = WRITTEN_OUT[name]
    assert arithmetic(ours, *inputs) == arithmetic(written_out, *inputs)


def test_norms_and_losses_of_many_small_steps_compute_what_is_written_out_but_for_the_rows() -> None:
    """Written out, each row takes a few steps more: its mean is scaled, its class picked twice."""
    few = 2 * SIZES["N"]
    for ours, written_out, inputs in (
        (functional.rms_norm, rms_norm, (MATRIX, VECTOR)),
        (
            lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1, z_loss=1e-4, reduction="sum"),
            smoothed_and_squared,
            LOGITS,
        ),
    ):
        (flops, special), (expected, expected_special) = arithmetic(ours, *inputs), arithmetic(written_out, *inputs)
        assert abs(flops - expected) <= few and abs(special - expected_special) <= few


SAME_BACKWARD = (
    *("gelu", "gelu tanh", "silu", "softmax", "layer norm", "layer norm alone", "weighted sum"),
    *("linear and gelu",),
)
RECOMPUTED = {
    # act(gate) again, which eager keeps.
    "swiglu": (4, 1),
    "geglu": (4, 1),
}


@pytest.mark.parametrize("name", [*SAME_BACKWARD, *RECOMPUTED])
def test_a_backward_computes_what_is_written_out_and_what_it_computes_again(name: str) -> None:
    ours, written_out, inputs = WRITTEN_OUT[name]
    again = RECOMPUTED.get(name, (0, 0))
    each = SIZES["N"] * SIZES["M"]
    flops, special = arithmetic(gradients(written_out), *inputs)
    assert arithmetic(gradients(ours), *inputs) == (flops + again[0] * each, special + again[1] * each)


# Where it runs.


@pytest.mark.parametrize(("device", "mask"), [("cpu", 6 * 10), ("cuda", 2 * 8)])
def test_a_mask_is_stored_where_pytorch_draws_it(device: str, mask: int) -> None:
    """In bytes: one for each element, or the seed and the offset from which it is drawn again."""

    def program(x: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        return own.dropout_add(x, r, 0.1, "none", 16)  # type: ignore[no-any-return]

    with traced_for_gpu(device == "cuda"):
        cost = own_cost(program, (MATRIX, MATRIX), "dropout_add", SIZES)
    assert cost.bytes_written == 2 * 6 * 10 + mask


@pytest.mark.parametrize("shape", ["[0,7]", "[1,1]", "[7,0]"])
def test_empty_and_single_elements(shape: str) -> None:
    rows, columns = (int(size) for size in shape.strip("[]").split(","))
    cost = own_cost(functional.layer_norm, (f"float32{shape}",), "norm", {})
    assert (cost.reads, cost.writes, cost.unused) == (rows * columns, rows * columns, 2 * rows)
    assert (cost.flops, cost.transcendentals) == (5 * rows * columns, rows)
