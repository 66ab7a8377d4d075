"""The elements that a fused kernel moves, as closed formulas in the case's own names and as numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.graph.captured import naive_softmax
from tests.passes.graphs import aten
from tilewright.compile.price import price_case
from tilewright.cost.kinds import LONG, nest_arithmetic
from tilewright.cost.symbols import pretty
from tilewright.hardware.target import target_named
from tilewright.loops.lower import lower
from tilewright.records.case import Case, InputSpec
from tilewright.records.program import Cost, GraphName, Program, Region

N, M = 12, 40
NAMES = ["N", "M"]


def plan(function: Callable[..., Any], inputs: str, *, training: bool = False) -> Program:
    case = Case("case", lambda: function, InputSpec.parse_many(inputs), training=training)
    return price_case(case, target_named("cpu")).program


def regions(program: Program, graph: GraphName = "forward") -> list[Region]:
    return [region for region in program.regions if region.graph == graph]


def only(program: Program, graph: GraphName = "forward") -> Cost:
    (region,) = regions(program, graph)
    return region.cost


def formulas(cost: Cost) -> tuple[str, str]:
    assert cost.reads_symbolic is not None and cost.writes_symbolic is not None
    return pretty(cost.reads_symbolic, NAMES), pretty(cost.writes_symbolic, NAMES)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2), ("fp64", 8)])
def test_naive_softmax_reads_and_writes_each_value_once(dtype: str, width: int) -> None:
    program = plan(naive_softmax, f"{dtype}[N={N},M={M}]")
    cost = only(program)
    assert formulas(cost) == ("N·M", "N·M")
    assert (cost.reads, cost.writes, cost.unused) == (N * M, N * M, 0)
    assert (cost.bytes_read, cost.bytes_written) == (width * N * M, width * N * M)
    # max, sub, sum and div; exp apart: fusing changes what is moved, not what is computed.
    assert (cost.flops, cost.transcendentals) == (4 * N * M, N * M)
    before = [op.cost for op in program.operators if op.stage == "before"]
    assert sum(c.flops for c in before) == cost.flops
    assert sum(c.reads for c in before) == 5 * N * M + 2 * N


def test_gelu_dropout_residual_reads_its_two_operands_and_the_mask() -> None:
    program = plan(lambda x, r: F.dropout(F.gelu(x), 0.1) + r, f"fp32[N={N},M={M}],fp32[N={N},M={M}]", training=True)
    forward, backward = only(program), only(program, "backward")
    assert formulas(forward) == ("3·N·M", "N·M")
    assert forward.bytes_read == (4 + 4 + 1) * N * M and forward.bytes_written == 4 * N * M
    # The gradient of the result, the mask and x; r's gradient is the incoming one.
    assert formulas(backward) == ("3·N·M", "N·M")
    assert backward.bytes_read == (4 + 4 + 1) * N * M and backward.bytes_written == 4 * N * M
    (draw,) = [op for op in program.operators if op.stage == "after" and op.name.startswith("keep_mask")]
    assert draw.operator_class == "random" and draw.cost.provenance == "formula"
    assert (draw.cost.reads, draw.cost.writes, draw.cost.bytes) == (0, N * M, N * M)


def test_a_mask_drawn_in_the_kernel_is_no_traffic() -> None:
    """Forward and backward read the generator's state of 8 rows; no mask is written, kept or read."""
    inputs = "fp32[N=160,M=300],fp32[N=160,M=300]"
    program = plan(lambda x, r: F.dropout(F.gelu(x), 0.1) + r, inputs, training=True)
    state = 8 * 626
    for graph in ("forward", "backward"):
        cost = only(program, graph)
        assert formulas(cost) == (f"2·N·M + {state}", "N·M")
        assert cost.bytes_read == 4 * (2 * 160 * 300 + state) and cost.bytes_written == 4 * 160 * 300
        assert cost.provenance == "formula"
    # x·Φ(x) takes 4, the mask and its scale 2, the sum 1.
    assert only(program).flops == 7 * 160 * 300
    (draw,) = [op for op in program.operators if op.stage == "after" and op.name.startswith("draw_stream")]
    assert draw.operator_class == "random"
    assert (draw.cost.reads, draw.cost.writes, draw.cost.bytes) == (0, state, 4 * state)
    held = max(point.live_bytes for point in program.memory if point.stage == "after" and point.graph == "forward")
    assert held == 4 * (160 * 300 + state)


def test_layer_norm_forward_and_backward() -> None:
    def program(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (M,), weight, bias)

    found = plan(program, f"fp32[N={N},M={M}],fp32[M={M}],fp32[M={M}]", training=True)
    forward, backward = only(found), only(found, "backward")
    # x, weight and bias; the result, and each row's mean and 1/σ for backward.
    assert formulas(forward) == ("N·M + 2·M", "N·M + 2·N")
    assert (forward.reads, forward.writes) == (N * M + 2 * M, N * M + 2 * N)
    # The gradient of the result, x, weight, mean and 1/σ; the gradients of x, weight and bias.
    assert formulas(backward) == ("2·N·M + 2·N + M", "N·M + 2·M")
    assert (backward.reads, backward.writes) == (2 * N * M + 2 * N + M, N * M + 2 * M)
    assert backward.bytes == 4 * (backward.reads + backward.writes)


def test_a_broadcast_operand_counts_its_own_elements() -> None:
    cost = only(plan(lambda x, r, c: x * r + c, f"fp32[N={N},M={M}],fp32[M={M}],fp32[N={N},1]"))
    assert formulas(cost) == ("N·M + N + M", "N·M")
    expanded = only(plan(lambda r: r.expand(N, M).exp(), f"fp32[M={M}]"))
    assert (expanded.reads, expanded.writes) == (M, N * M)


def test_a_tensor_read_twice_counts_once() -> None:
    assert formulas(only(plan(lambda x: x.exp() + x.sin(), f"fp32[N={N},M={M}]"))) == ("N·M", "N·M")
    # Itself and its transpose are the same elements.
    assert formulas(only(plan(lambda x: x + x.t(), "fp32[N=16,N=16]"))) == ("N²", "N²")


def test_a_slice_counts_what_it_shows() -> None:
    cost = only(plan(lambda x: x[: N // 2].exp(), f"fp32[N={N},M={M}]"))
    assert (cost.reads, cost.writes) == (N // 2 * M, N // 2 * M)


def test_mixed_dtypes_count_their_own_bytes() -> None:
    cost = only(plan(lambda x, m: x.masked_fill(m, 0.0).half(), f"fp32[N={N},M={M}],bool[N={N},M={M}]"))
    assert (cost.bytes_read, cost.bytes_written) == ((4 + 1) * N * M, 2 * N * M)


def test_several_results_are_written_once_each() -> None:
    cost = only(plan(lambda x: ((e := x.exp()), e.sum(1), e.sum(0)), f"fp32[N={N},M={M}]"))
    assert formulas(cost) == ("N·M", "N·M + N + M")


def arithmetic(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int]:
    """Simple and special operations of the nest of the whole function."""
    graph = aten(function, *inputs)
    members = [node for node in graph.nodes if node.op == "call_function"]
    return nest_arithmetic(lower(members, members[-1:], "all", "triton").nest)


def test_an_operation_counts_as_often_as_its_nest_computes_it() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x)[None] * y

    # An exponential of each column; a product, or a quotient, of each element.
    assert arithmetic(function, torch.ones(M), torch.ones(N, M)) == (N * M, M)
    assert arithmetic(lambda x, y: x[None] / y, torch.ones(M), torch.ones(N, M)) == (0, N * M)


def test_integers_of_64_bits_take_several_instructions() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return (x + y).float()

    long, short = (torch.ones(N, dtype=dtype) for dtype in (torch.int64, torch.int32))
    assert arithmetic(function, long, long) == (LONG * N, N)
    assert arithmetic(function, short, short) == (N, 0)
