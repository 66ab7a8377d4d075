"""Costs of tilewright's own operators against closed formulas, and against the same mathematics in ATen's operators."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cost.counted import program_costs
from tests.graph.captured import Program
from tests.kernels.registered import all_operators
from tests.tables import rows, value
from tilewright import functional
from tilewright.cost.operators import operator_cost
from tilewright.cost.symbols import pretty, total
from tilewright.graph import calls
from tilewright.kernels.device import traced_for_gpu
from tilewright.records.program import Cost

all_operators()
own = torch.ops.tilewright
TABLE = Path(__file__).with_name("own.txt")
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


NAMED = {"functional": functional, "gradients": gradients}
"""Of the table's expressions."""


def own_cost(function: Callable[..., object], inputs: tuple[str, ...], name: str, sizes: Mapping[str, int]) -> Cost:
    """The cost of the one call of `tilewright::name` in a program."""
    # Without the options, which tracing would take for inputs.
    program = Program(lambda *tensors: function(*tensors), inputs)
    shapes = program.shapes(program.graph(sizes), sizes)
    (node,) = (node for node in shapes.graph.nodes if calls.operator_name(node.target) == f"tilewright.{name}")
    return operator_cost(node, shapes)


MATRIX = "bfloat16[N,M]"
VECTOR = "bfloat16[M]"
LOGITS = (MATRIX, "int64[N]")
LINEAR = ("bfloat16[N,D]", "bfloat16[M,D]", "bfloat16[M]")
VOCABULARY = ("bfloat16[N,D]", "bfloat16[V,D]", "int64[N]")
COUNTS = {row["operator"]: row for row in rows(TABLE, "counts")}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_in_closed_form(name: str) -> None:
    expected = COUNTS[name]
    with traced_for_gpu(True):
        cost = own_cost(value(expected["call"], NAMED), tuple(expected["inputs"].split()), name, SIZES)
    found = [pretty(text or "?", NAMES) for text in (cost.reads_symbolic, cost.writes_symbolic, cost.flops_symbolic)]
    assert found == [expected["reads"], expected["writes"], expected["flops"]]
    assert pretty(cost.unused_symbolic or "?", NAMES) == (expected["unused"] or "0")
    assert cost.transcendentals == value((expected["transcendentals"] or "0").replace("·", "*"), SIZES)


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


WRITTEN_OUT = {
    row["name"]: (value(row["ours"], NAMED), value(row["theirs"], NAMED), tuple(row["inputs"].split()))
    for row in rows(TABLE, "written out")
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
