"""Costs of eager operators against closed formulas, PyTorch's FLOP counter, products and offsets counted out."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from tests.cost.counted import assert_formulas_hold, cost_of, costs, program_costs
from tests.graph.captured import BLOCK_DISTINCT, BLOCK_EQUAL, DISTINCT, EQUAL, PROGRAMS, Program, block_shapes
from tests.kernels.registered import all_operators
from tests.passes.graphs import aten
from tilewright.cost.kinds import call_work
from tilewright.cost.operators import FREE, UNKNOWN, operator_cost
from tilewright.cost.symbols import pretty, shown, total
from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.dims import symbolic_shapes
from tilewright.kernels.attention.registered import attend
from tilewright.kernels.dropout_add import philox, stream
from tilewright.kernels.norm import group as group_norm
from tilewright.operators import table
from tilewright.operators.counting import arithmetic_of
from tilewright.records.program import Cost

# Closed formulas.


def test_naive_softmax_counts_as_the_definition_says() -> None:
    found = program_costs(PROGRAMS["naive softmax"], {"N": 100, "M": 5000})
    cost = total(found.values())
    assert pretty(cost.reads_symbolic or "", ["N", "M"]) == "5·N·M + 2·N"
    assert pretty(cost.writes_symbolic or "", ["N", "M"]) == "3·N·M + 2·N"
    assert pretty(cost.unused_symbolic or "", ["N", "M"]) == "N"
    assert (cost.reads, cost.writes, cost.unused) == (2_500_200, 1_500_200, 100)
    # The unused indices are 8 bytes each and really are written.
    assert (cost.bytes_read, cost.bytes_written) == (4 * 2_500_200, 4 * 1_500_200 + 8 * 100)
    # max, sub, sum and div, one each per element; exp apart.
    assert (cost.flops, cost.transcendentals) == (4 * 500_000, 500_000)
    assert found["max_1"].unused == 100
    assert all(found[name] == FREE for name in ("x_1", "getitem", "unsqueeze", "output"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_formulas_found_where_sizes_are_equal_hold_where_they_differ(name: str) -> None:
    program = PROGRAMS[name]
    shapes = program.shapes(program.graph(EQUAL), EQUAL)
    other = program.shapes(program.graph(DISTINCT), DISTINCT)
    assert_formulas_hold(shapes, EQUAL, other)


@pytest.mark.parametrize(("dropout", "fused"), [(0.0, False), (0.1, False), (0.1, True)])
def test_every_operator_of_the_block_forward_and_backward(dropout: float, fused: bool) -> None:
    pairs = zip(block_shapes(BLOCK_EQUAL, dropout, fused), block_shapes(BLOCK_DISTINCT, dropout, fused), strict=True)
    for shapes, other in pairs:
        assert_formulas_hold(shapes, BLOCK_EQUAL, other)


def test_block_in_closed_form() -> None:
    forward, backward = block_shapes(BLOCK_EQUAL, 0.1, True)
    names = ["B", "S", "D", "H"]
    compute = [
        total(
            operator_cost(node, shapes)
            for node in shapes.graph.nodes
            if (row := table.row_of(node.target)) and row.operator_class == "compute"
        )
        for shapes in (forward, backward)
    ]
    # Four projections and a feed-forward of width 4·D; two products of attention, five on the way back.
    assert pretty(compute[0].flops_symbolic or "", names) == "4·B·S²·D + 24·B·S·D²"
    assert pretty(compute[1].flops_symbolic or "", names) == "10·B·S²·D + 48·B·S·D²"
    assert total(costs(forward).values()).transcendentals == (
        BLOCK_EQUAL["B"] * BLOCK_EQUAL["S"] * (BLOCK_EQUAL["H"] * BLOCK_EQUAL["S"] + 4 * BLOCK_EQUAL["D"] + 2)
    )


# FLOPs against PyTorch's counter.


def test_flops_of_fused_attention_are_what_pytorch_counts() -> None:
    """PyTorch's counter does not see the CPU's kernel, but has the formulas of the GPU's."""
    query, key, value = (2, 3, 8, 4), (2, 3, 5, 4), (2, 3, 5, 4)

    def program(*inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(x.detach().requires_grad_() for x in inputs)
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs).sum(), inputs)

    inputs = tuple(f"float32{list(shape)}" for shape in (query, key, value))
    found = program_costs(Program(program, inputs), {})
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert found[name].flops == sdpa_flop_count(query, key, value)
    assert found[f"{name}_backward"].flops == sdpa_backward_flop_count(query, query, key, value)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (torch.mm, ("float32[5,7]", "float32[7,3]")),
        (torch.mv, ("float32[5,7]", "float32[7]")),
        (torch.addmm, ("float32[3]", "float32[5,7]", "float32[7,3]")),
        (torch.baddbmm, ("float32[2,5,3]", "float32[2,5,7]", "float32[2,7,3]")),
        (lambda x, w: F.conv2d(x, w, stride=2, padding=1), ("float32[2,4,9,8]", "float32[6,4,3,3]")),
        (lambda x, w: F.conv2d(x, w, groups=2), ("float32[2,4,9,8]", "float32[6,2,3,3]")),
        (lambda x, w: F.conv_transpose2d(x, w, stride=2), ("float32[2,4,9,8]", "float32[4,6,3,3]")),
        (lambda x, w: F.conv1d(x, w, dilation=2), ("float32[2,4,9]", "float32[6,4,3]")),
    ],
)
def test_flops_are_what_pytorch_counts(function: Callable[..., Tensor], inputs: tuple[str, ...]) -> None:
    program = Program(function, inputs)
    with FlopCounterMode(display=False) as counter:
        function(*program.tensors({}))
    # PyTorch's counter decomposes mv into nothing that it knows.
    expected = counter.get_total_flops() if function is not torch.mv else 2 * 5 * 7
    assert cost_of(function, *inputs).flops == expected


@pytest.mark.parametrize(
    ("left", "right", "shape"),
    [
        ((24, 16), (3, 16, 8), (24, 8)),
        ((16, 24), (24, 8), (3, 16, 8)),
        ((3, 16, 8), (8, 24), (16, 24)),
        ((3, 8, 16), (3, 16, 8), (3, 8, 8)),
    ],
    ids=["rows", "inner", "columns", "batch"],
)
def test_a_product_in_groups_takes_each_row_once(
    left: tuple[int, ...], right: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    ends = torch.tensor([8, 16, 24], dtype=torch.int32) if len(left) + len(right) < 6 else None
    graph = make_fx(lambda x, y: torch._grouped_mm(x, y, ends), tracing_mode="fake", _allow_non_fake_inputs=True)(
        torch.zeros(left, dtype=torch.bfloat16), torch.zeros(right, dtype=torch.bfloat16)
    ).graph
    (node,) = (node for node in graph.nodes if "grouped_mm" in str(node.target))
    cost = operator_cost(node, symbolic_shapes(graph, {}, {}))
    # 24 rows of 16 times 16 × 8 each; without groups three products of 8 × 16 times 16 × 8.
    assert tuple(node.meta["val"].shape) == shape and cost.flops == 2 * 24 * 16 * 8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_convolution_backward_takes_twice_the_forward(transposed: bool, groups: int) -> None:
    convolve = F.conv_transpose2d if transposed else F.conv2d
    weight = f"float32[4,{6 // groups},3,3]" if transposed else f"float32[6,{4 // groups},3,3]"

    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(convolve(x, w, groups=groups).sum(), (x, w))

    convolution = Program(program, ("float32[2,4,9,8]", weight))
    found = program_costs(convolution, {})
    assert found["convolution_backward"].flops == 2 * found["convolution"].flops
    if groups == 1:
        # With groups, PyTorch's counter takes the gradient of the weight for that of a whole one.
        with FlopCounterMode(display=False) as counter:
            program(*convolution.tensors({}))
        assert counter.get_total_flops() == 3 * found["convolution"].flops


def test_causal_attention_takes_half() -> None:
    sizes = {"B": 2, "H": 3, "N": 8, "d": 4}
    found = program_costs(PROGRAMS["sdpa"], sizes)["_scaled_dot_product_flash_attention_for_cpu"]
    assert pretty(found.flops_symbolic or "", list(sizes)) == "2·B·H·N²·d"
    assert found.transcendentals == 2 * 3 * 8 * 8 // 2
    assert pretty(found.unused_symbolic or "", list(sizes)) == "B·H·N"


def own_attention(q: Tensor, k: Tensor, v: Tensor, right: int | None = 0, left: int | None = None) -> Tensor:
    options = (None, None, None, None, q.shape[-1] ** -0.5, left, right, 0.0, 0.0, 0, 0, False, "auto")
    out: Tensor = attend(q, k, v, *options)[0]
    return out


@pytest.mark.parametrize("causal", [True, False])
def test_tilewrights_attention_costs_what_pytorchs_does(causal: bool) -> None:
    """In the same formulas, forward and backward; what each keeps for its backward apart."""
    sizes = {"B": 2, "H": 3, "N": 8, "M": 6, "d": 4}
    inputs = ("bfloat16[B,H,N,d]", "bfloat16[B,H,M,d]", "bfloat16[B,H,M,d]")

    def gradients(function: Callable[..., Tensor]) -> dict[str, Cost]:
        def program(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = tuple(x.detach().requires_grad_() for x in tensors)
            return torch.autograd.grad(function(*leaves).sum(), leaves)

        return program_costs(Program(program, inputs), sizes)

    ours = gradients(lambda q, k, v: own_attention(q, k, v, 0 if causal else None))
    theirs = gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal))
    for suffix in ("", "_backward"):
        own = ours[f"attention{suffix}"]
        peer = theirs[f"_scaled_dot_product_flash_attention_for_cpu{suffix}"]
        assert own.flops == peer.flops and own.flops_symbolic == peer.flops_symbolic
        assert own.transcendentals == peer.transcendentals
        assert own.bytes == peer.bytes and own.reads_symbolic == peer.reads_symbolic


def test_causal_attention_to_a_cache_sees_what_lies_before() -> None:
    """Queries stand at the end: of 2 after 6, the first sees 7 keys and the second 8; half of 2 pairs is hidden."""
    inputs = ("float32[B,N,M,d]", "float32[B,N,S,d]", "float32[B,N,S,d]")
    sizes = {"B": 2, "N": 3, "M": 2, "S": 8, "d": 4}
    found = program_costs(Program(lambda q, k, v: own_attention(q, k, v), inputs), sizes)["attention"]
    assert found.flops == 2 * 2 * 2 * 3 * (2 * 8 - 2 * 2 // 2) * 4
    assert pretty(found.flops_symbolic or "", list(sizes)) == "−2·B·N·M²·d + 4·B·N·M·S·d"


@pytest.mark.parametrize(
    ("left", "right"), [(0, 0), (3, 0), (40, 0), (None, 2), (0, 2), (3, 2), (3, None), (40, None), (5, -2), (-2, -3)]
)
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (3, 11), (11, 3), (1, 1), (1, 17)])
def test_attention_in_a_window_counts_the_pairs_it_sees(
    queries: int, keys: int, left: int | None, right: int | None
) -> None:
    shapes = (f"float32[2,3,{queries},4]", *[f"float32[2,3,{keys},4]"] * 2)
    found = program_costs(Program(lambda q, k, v: own_attention(q, k, v, right, left), shapes), {})["attention"]
    away = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    near = away <= (keys + queries if right is None else right)
    seen = near & (away >= -(keys + queries if left is None else left))
    pairs = 2 * 3 * int(seen.sum())
    assert (found.flops, found.transcendentals) == (2 * 2 * pairs * 4, pairs)
    assert found.flops_symbolic is None and found.provenance == "formula"
    # All queries; of keys and values those that lie within their windows, which are the last.
    reached = keys if left is None else min(keys, max(queries + left, 0))
    assert found.reads == 2 * 3 * 4 * (queries + 2 * reached)


def test_attention_over_packed_sequences_is_unknown() -> None:
    """How long they are is in a tensor."""

    def program(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return attend(q, k, v, None, None, starts, starts, 1.0, None, None, 0.0, 0.0, 8, 8, False, "auto")[0]  # type: ignore[no-any-return]

    shape = ("float32[1,3,8,4]",) * 3
    assert program_costs(Program(program, (*shape, "int32[3]")), {})["attention"] == UNKNOWN


# Reads: the elements of storage that a view addresses.

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:, :1].expand(-1, 9),
    "expanded in front": lambda x: x.expand(4, -1, -1),
    "slice": lambda x: x[1:4, ::2],
    "diagonal": lambda x: x.diagonal(),
    "windows": lambda x: x.unfold(1, 3, 1),
    "windows apart": lambda x: x.unfold(1, 2, 3),
    "one element": lambda x: x[0, 0].expand(5, 5),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_operand_counts_the_elements_it_addresses(name: str) -> None:
    view = VIEWS[name]
    storage = torch.arange(6 * 8).view(6, 8)
    cost = cost_of(lambda x: view(x).neg(), "float32[N,M]", N=6, M=8)
    assert cost.reads == view(storage).unique().numel()
    assert cost.writes == view(storage).numel()
    assert cost.bytes_read == 4 * cost.reads


def test_an_element_read_through_two_views_counts_once() -> None:
    for function in (lambda x: x * x, lambda x: x @ x.t(), lambda x: x[:, None] + x, lambda x: torch.cat([x, x])):
        assert cost_of(function, "float32[N,N]", N=5).reads_symbolic == "N**2"
    halves = cost_of(lambda x: x[:, :3] * x[:, 3:], "float32[N,6]", N=5)
    assert (halves.reads, halves.reads_symbolic) == (30, "6*N")


def test_a_broadcast_operand_counts_its_own_elements() -> None:
    cost = cost_of(lambda x, b: x + b, "bfloat16[N,M]", "bfloat16[M]", N=5, M=3)
    assert (cost.reads_symbolic, cost.writes_symbolic, cost.flops_symbolic) == ("M*N + M", "M*N", "M*N")
    assert (cost.bytes_read, cost.bytes_written) == (2 * 18, 2 * 15)


def test_a_copy_into_an_input_is_written_for_its_owner() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    copy = graph.call_function(torch.ops.aten.copy_.default, (x, y))
    graph.output(())
    for node, shape in ((x, (3, 5)), (y, (5,)), (copy, (3, 5))):
        node.meta["val"] = torch.zeros(shape)
    cost = operator_cost(copy, symbolic_shapes(graph, {"x": ("N", "M")}, {"N": 3, "M": 5}))
    assert (cost.reads_symbolic, cost.writes_symbolic, cost.unused) == ("M", "M*N", 0)


def test_what_is_never_read_is_not_counted() -> None:
    assert cost_of(torch.zeros_like, "float32[N]", N=7) == Cost(
        writes=7, bytes_written=28, reads_symbolic="0", writes_symbolic="N", unused_symbolic="0", flops_symbolic="0"
    )
    gather = cost_of(lambda table, i: F.embedding(i, table), "float32[V,D]", "int64[N]", V=50, D=4, N=3)
    assert (gather.reads, gather.bytes_read) == (3 * 4 + 3, 3 * 4 * 4 + 3 * 8)
    # More places than rows: no more than the whole table.
    assert cost_of(lambda table, i: F.embedding(i, table), "float32[V,D]", "int64[N]", V=5, D=4, N=99).reads == 119


def test_layer_norm_at_inference_writes_statistics_that_nobody_takes() -> None:
    found = program_costs(PROGRAMS["layer norm"], {"B": 2, "N": 3, "D": 5})["native_layer_norm"]
    assert pretty(found.unused_symbolic or "", ["B", "N"]) == "2·B·N"
    assert (found.reads, found.writes) == (2 * 3 * 5 + 2 * 5, 2 * 3 * 5)


# Arithmetic of the rows.


@pytest.mark.parametrize(
    ("function", "flops", "transcendentals"),
    [
        (lambda x: F.gelu(x), 4, 1),
        (lambda x: F.gelu(x, approximate="tanh"), 8, 1),
        (lambda x: x**2, 1, 0),
        (lambda x: x**3, 2, 0),
        (lambda x: x**0.3, 0, 1),
        (lambda x: torch.sigmoid(x), 3, 1),
        (lambda x: x.clone(), 0, 0),
        (lambda x: x.sum(1), 1, 0),
        (lambda x: x.softmax(1), 4, 1),
    ],
)
def test_arithmetic_per_element(function: Callable[[Tensor], Tensor], flops: int, transcendentals: int) -> None:
    cost = cost_of(function, "float32[N,M]", N=5, M=7)
    assert (cost.flops, cost.transcendentals) == (35 * flops, 35 * transcendentals)


def test_pools_count_the_elements_of_their_windows() -> None:
    sizes = {"N": 2, "C": 3, "H": 8, "W": 10}
    for function, flops in (
        (lambda x: torch.nn.functional.max_pool2d(x, 2), 2 * 3 * 4 * 5 * 4),
        (lambda x: torch.nn.functional.avg_pool2d(x, (3, 2), 1), 2 * 3 * 6 * 9 * 6),
        (lambda x: torch.nn.functional.adaptive_avg_pool2d(x, (4, 5)), 2 * 3 * 8 * 10),
    ):
        assert cost_of(function, "float32[N,C,H,W]", **sizes).flops == flops


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
UNCOUNTED = {
    *("sort", "mode", "isin"),
    *("nonzero", "masked_select", "masked_scatter", "multinomial"),
    *(f"{name}{many}.default" for name in COLLECTIVES for many in ("", "_coalesced")),
    *("all_to_all_single.default", "broadcast.default"),
    # Factorisations and others whose work depends on values, or that no model has.
    *("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_householder_product", "linalg_ldl_factor_ex"),
    *("linalg_lstsq", "linalg_matrix_exp", "linalg_pinv", "lu_unpack", "_trilinear", "gcd", "lcm"),
    *("_embedding_bag_forward_only", "_embedding_bag_backward", "segment_reduce", "_segment_reduce_backward"),
    *(f"_upsample_{kind}2d_aa{end}" for kind in ("bilinear", "bicubic") for end in ("", "_backward")),
    *("fractional_max_pool2d", "fractional_max_pool3d", "ormqr", "linalg_ldl_solve"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "histogram"),
    *("_histogramdd_bin_edges", "_histogramdd_from_bin_cts", "_embedding_bag_per_sample_weights_backward"),
}


def test_every_row_of_the_operator_table_has_its_arithmetic() -> None:
    # Who defines tilewright's own operators.
    assert stream.draw_stream and philox.draw_philox and group_norm.group_norm and all_operators()
    for row in table.rows().values():
        if row.name == "keep_mask":
            continue
        target = operator.attrgetter(row.name)(torch.ops)
        view = fx.Graph().call_function(target)
        uncounted = calls.operator_name(target) in UNCOUNTED
        assert calls.is_view(view) or (arithmetic_of(row) is None) == uncounted, row.name


# Unknown.


def test_an_operator_without_a_rule_is_unknown_and_marks_the_total() -> None:
    program = Program(lambda x: torch.sort(x + 1)[0], ("float32[N,M]",))
    found = program_costs(program, {"N": 3, "M": 4})
    assert found["sort"] == UNKNOWN
    whole = total(found.values())
    assert whole.provenance == "unknown"
    assert shown(whole.reads, whole.reads_symbolic, whole, ["N", "M"]) == "≥ N·M"
    assert shown(UNKNOWN.reads, UNKNOWN.reads_symbolic, UNKNOWN) == "unknown"
    add = found["add"]
    assert shown(add.reads, add.reads_symbolic, add, ["N", "M"]) == "N·M"


def test_complex_tensors_are_unknown() -> None:
    assert cost_of(lambda x: x * x, "complex64[N]", N=3).provenance == "unknown"


# Formulas.


def test_total_counts_a_missing_formula_with_its_number() -> None:
    whole = total([Cost(reads=6, reads_symbolic="N*M"), Cost(reads=5)])
    assert (whole.reads, whole.reads_symbolic, whole.flops_symbolic) == (11, "M*N + 5", None)
    assert total([]) == FREE


def works(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Work]:
    """The work of the products, convolutions and attention among the operators."""
    graph = aten(function, *inputs)
    shapes = symbolic_shapes(graph, {}, {})
    found = {node: call_work(node, operator_cost(node, shapes)) for node in graph.nodes if node.op == "call_function"}
    return {work.kind: work for work in found.values() if work.products}


def flops(work: Work) -> int:
    return sum(2 * batch * m * n * k for batch, m, n, k in work.products)


def gradients(x: Tensor, w: Tensor, stride: int, padding: int) -> list[Tensor]:
    y = F.conv2d(x, w, stride=stride, padding=padding)
    options: Any = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, False])
    found: list[Tensor] = torch.ops.aten.convolution_backward(y, x, w, *options)
    return found


@pytest.mark.parametrize(("size", "taps", "stride"), [(8, 3, 1), (8, 2, 2), (8, 1, 1)])
def test_a_convolution_and_its_gradients_are_products(size: int, taps: int, stride: int) -> None:
    x = torch.ones(2, 16, size, size).contiguous(memory_format=torch.channels_last)
    found = works(lambda x, w: gradients(x, w, stride, taps // 3), x, torch.ones(32, 16, taps, taps))
    forward, backward = (
        next(w for k, w in found.items() if k.startswith(name)) for name in ("convolution", "convolution backward")
    )
    pixels = 2 * (size // stride) ** 2
    assert forward.products == ((1, pixels, 32, 16 * taps**2),) and flops(forward) == forward.flops
    assert len(backward.products) == 2 and flops(backward) == backward.flops == 2 * forward.flops


def test_groups_of_channels_are_no_product() -> None:
    def function(x: Tensor, deep: Tensor, grouped: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, deep, groups=16), F.conv2d(x, grouped, groups=4)

    graph = aten(function, torch.ones(1, 16, 4, 4), torch.ones(16, 1, 3, 3), torch.ones(16, 4, 3, 3))
    shapes = symbolic_shapes(graph, {}, {})
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = [call_work(node, operator_cost(node, shapes)) for node in calls]
    assert [work.kind for work in found] == ["convolution, depthwise", "convolution, grouped"]
    assert not any(work.products for work in found)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_product_of_weights_and_values(causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]  # type: ignore[no-any-return]

    q, k = torch.ones(2, 3, 64, 16), torch.ones(2, 3, 512, 16)
    (work,) = works(function, q, k, k).values()
    ((batch, rows, width, depth),) = work.products
    # Of the hidden half of the keys a tile of 128 is computed.
    assert (batch, rows, width) == (6, 64, 16) and depth == 2 * (256 + 128 if causal else 512)
    assert work.flops == 2 * 6 * 64 * 16 * 2 * (256 if causal else 512) and work.draws == 0


@pytest.mark.parametrize(("left", "right", "ends"), [(None, None, 0), (None, 0, 1), (255, 0, 2)])
def test_attention_computes_tiles_at_each_end_of_what_queries_see(
    left: int | None, right: int | None, ends: int
) -> None:
    q = torch.ones(1, 2, 1024, 64)
    (work,) = works(lambda q: own_attention(q, q, q, right, left), q).values()
    pairs = work.transcendentals + ends * 128 * 2 * 1024
    assert work.products == ((2, 1024, 64, 2 * pairs // (2 * 1024)),)


@pytest.mark.parametrize(
    ("left", "right", "product"),
    [
        ((1024, 64), (8, 64, 32), (8, 128, 32, 64)),
        ((8, 32, 64), (64, 1024), (8, 32, 128, 64)),
        ((32, 1024), (1024, 64), (8, 32, 64, 128)),
    ],
)
def test_groups_of_rows_are_products_of_equal_groups(
    left: tuple[int, ...], right: tuple[int, ...], product: tuple[int, ...]
) -> None:
    offsets = torch.arange(128, 1025, 128, dtype=torch.int32)
    given = torch.ones(left, dtype=torch.bfloat16), torch.ones(right, dtype=torch.bfloat16), offsets
    found = works(torch.ops.aten._grouped_mm, *given)
    assert found["product, grouped"].products == (product,)


def test_sums_by_index_have_a_program_for_each_row_or_several_short_ones() -> None:

    def function(source: Tensor, index: Tensor, keys: Tensor, order: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
        own = torch.ops.tilewright
        return own.scatter_sums(source, index, 32), own.embedding_sums(source, keys, order, bounds, 5000, -1)

    given = torch.ones(128, 64), torch.zeros(128, 64, dtype=torch.int64), torch.zeros(128, dtype=torch.int32)
    graph = aten(function, *given, torch.arange(128), torch.zeros(5001, dtype=torch.int64))
    shapes = symbolic_shapes(graph, {}, {})
    calls = [node for node in graph.nodes if node.op == "call_function" and "sums" in str(node.target)]
    found = {work.kind: work for work in (call_work(node, operator_cost(node, shapes)) for node in calls)}
    assert (found["tilewright.scatter_sums"].programs, found["tilewright.scatter_sums"].combined) == (128, 64)
    assert (found["tilewright.embedding_sums"].programs, found["tilewright.embedding_sums"].combined) == (157, 1)
