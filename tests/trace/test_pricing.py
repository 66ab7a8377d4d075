"""Costs of recorded calls: against the costs of the captured graph of the same program, and closed formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile

from tests.graph.captured import Program
from tests.kernels.registered import all_operators
from tilewright.cost.operators import operator_cost
from tilewright.graph import calls
from tilewright.graph.dims import symbolic_shapes
from tilewright.kernels.device import traced_for_gpu
from tilewright.operators.shapes import CallAxes, NumberAxes, UnknownShape
from tilewright.operators.table import rows
from tilewright.records.program import Cost
from tilewright.trace.price.pricing import price, price_generated
from tilewright.trace.price.recorded_call import Tensor as Operand
from tilewright.trace.price.recorded_call import read_call

all_operators()
aten = torch.ops.aten
Sizes = dict[str, int]
SIZES: Sizes = {"B": 3, "N": 5, "M": 7, "K": 11}


def recorded(
    function: Callable[..., object], tensors: list[Tensor], folder: Path
) -> list[tuple[str, dict[str, object]]]:
    """Name and arguments of every operator that the profiler saw."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function(*tensors)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    return [(event["name"], event["args"]) for event in events if event.get("cat") == "cpu_op"]


def counts(cost: Cost) -> tuple[int, int, int, int]:
    return cost.bytes_read, cost.bytes_written, cost.flops, cost.transcendentals


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda a, b: aten.mm(a, b), ("float32[N,K]", "float32[K,M]")),
        (lambda a, b: aten.mm(a.t(), b), ("bfloat16[K,N]", "bfloat16[K,M]")),
        (lambda c, a, b: aten.addmm(c, a, b), ("float32[M]", "float32[N,K]", "float32[K,M]")),
        (lambda a, b: aten.bmm(a, b), ("float32[B,N,K]", "float32[B,K,M]")),
        (lambda a, b: aten.mv(a, b), ("float32[N,K]", "float32[K]")),
        (lambda a, b: aten.add(a, b), ("float32[N,M]", "float32[N,M]")),
        (lambda a, b: aten.add(a, b), ("float32[N,1]", "float32[M]")),
        (lambda a, b: aten.mul(a, b.expand(5, 7)), ("float32[N,M]", "float32[1]")),
        (lambda a: aten.exp(a), ("float64[N,M]",)),
        (lambda a: aten.sum(a, [0], True), ("float32[N,M]",)),
        (lambda a: aten.sum(a, [-1]), ("float32[B,N,M]",)),
        (lambda a: aten.sum(a), ("float32[N,M]",)),
        (lambda a: aten.max(a, 1), ("float32[N,M]",)),
        (lambda a: aten.amax(a, [-1], True), ("float32[N,M]",)),
        (lambda a: aten._softmax(a, -1, False), ("float32[B,N,M]",)),
        (lambda g, y: aten._softmax_backward_data(g, y, -1, torch.float32), ("float32[N,M]", "float32[N,M]")),
        (lambda a: aten.gelu(a), ("float32[N,M]",)),
        (lambda a, b: aten.lt(a, b), ("float32[N,M]", "float32[N,M]")),
        (lambda a, b: aten.add(a, b), ("bfloat16[N,M]", "float32[N,M]")),
        (lambda g, a: aten.gelu_backward(g, a), ("float32[N,M]", "float32[N,M]")),
        (lambda a, w, b: aten.native_layer_norm(a, [7], w, b, 1e-5), ("float32[B,N,M]", "float32[M]", "float32[M]")),
        (lambda a: aten.native_layer_norm(a, [7], None, None, 1e-5), ("float32[N,M]",)),
        (
            lambda g, a, m, r, w, b: aten.native_layer_norm_backward(g, a, [7], m, r, w, b, [True, True, True]),
            ("float32[N,M]", "float32[N,M]", "float32[N,1]", "float32[N,1]", "float32[M]", "float32[M]"),
        ),
        (lambda a: aten.native_dropout(a, 0.1, True), ("float32[N,M]",)),
        (lambda w, i: aten.embedding(w, i), ("float32[K,M]", "int64[N]")),
        (lambda g, i: aten.embedding_dense_backward(g, i, 11, -1, False), ("float32[N,M]", "int64[N]")),
        (lambda a: aten.pow(a, 2), ("float32[N,M]",)),
        (lambda a, b, c: aten.addcmul(a, b, c), ("float32[N,M]", "float32[N,M]", "float32[N,M]")),
        (lambda c, a, b: aten.where(c, a, b), ("bool[N,M]", "float32[N,M]", "float32[N,M]")),
        (lambda a, b: aten.add(a, b), ("float32[0,M]", "float32[0,M]")),
        (lambda a, b: aten.mm(a, b), ("float32[1,1]", "float32[1,1]")),
    ],
)
def test_a_recorded_call_costs_what_its_captured_node_costs(
    function: Callable[..., object], inputs: tuple[str, ...], tmp_path: Path
) -> None:
    program = Program(function, inputs)
    shapes = program.shapes(program.graph(SIZES), SIZES)
    expected = {
        f"aten::{calls.operator_name(node.target)}": counts(operator_cost(node, shapes))
        for node in shapes.graph.nodes
        if node.op == "call_function" and not calls.is_view(node) and calls.operator_name(node.target) != "getitem"
    }
    found = {}
    for name, args in recorded(function, program.tensors(SIZES), tmp_path):
        call = read_call(name, args)
        priced = price(call) if call is not None and name in expected else None
        if priced is not None:
            found[name] = counts(priced.cost)
    assert found == expected and found


own = torch.ops.tilewright
MATRIX, LOGITS, VECTOR = "float32[N,M]", ("float32[N,K]", "int64[N]"), "float32[M]"


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x: own.activation(x, "gelu"), (MATRIX,)),
        (lambda dy, x: own.activation_backward(dy, x, "gelu"), (MATRIX, MATRIX)),
        (lambda g, u: own.gated_activation(g, u, "gelu"), (MATRIX, MATRIX)),
        (lambda dy, g, u: own.gated_activation_backward(dy, g, u, "gelu"), (MATRIX,) * 3),
        (lambda x: own.softmax(x, True, "auto"), ("bfloat16[B,N,M]",)),
        (lambda y, dy: own.softmax_backward(y, dy, True, "auto"), (MATRIX, MATRIX)),
        (lambda x, w, b: own.norm(x, w, b, 1e-5, True), ("bfloat16[B,N,M]", VECTOR, VECTOR)),
        (lambda x: own.norm(x, None, None, 1e-5, False), (MATRIX,)),
        (lambda x, r, w: own.add_norm(x, r, w, None, 1e-5, False), (MATRIX, MATRIX, VECTOR)),
        (
            lambda dy, x, w, mean, rstd: own.norm_backward(dy, x, None, w, True, mean, rstd, True),
            (MATRIX, MATRIX, VECTOR, "float32[N]", "float32[N]"),
        ),
        (lambda x, t: own.cross_entropy(x, t, -100, 0.1, 1e-4, "mean", False, "auto"), LOGITS),
        (
            lambda g, x, t, s, w: own.cross_entropy_backward(g, x, t, s, w, -100, 0.0, 0.0, 0, "auto"),
            ("float32[]", *LOGITS, "float32[2,N]", "float32[]"),
        ),
        (lambda x, r: own.dropout_add(x, r, 0.1, "none", 16), (MATRIX, MATRIX)),
        (lambda d, mask: own.dropout_add_backward(d, None, mask, 0.1, "none", 16), (MATRIX, "bool[N,M]")),
        (lambda x, w, b: own.linear_gelu(x, w, b, "none", True), (MATRIX, "float32[K,M]", "float32[K]")),
        (lambda x, w: own.linear_gelu(x, w, None, "none", False), (MATRIX, "float32[K,M]")),
        (
            lambda x, w, r: own.linear_dropout_add(x, w, None, r, 0.0),
            (MATRIX, "float32[K,M]", "float32[N,K]"),
        ),
        (lambda x, w: own.weighted_sum(x, w), (MATRIX, VECTOR)),
        (lambda dy, x, w: own.weighted_sum_backward(dy, x, w, False, True), ("float32[N]", MATRIX, VECTOR)),
        (lambda d, k, i: own.embedding_sums(d, k, i, 11, -1), (MATRIX, "int64[N]", "int64[N]")),
        (lambda x, i: own.scatter_sums(x, i, 11), (MATRIX, "int64[N,M]")),
        (lambda x, i: own.index_sums(x, i, 11, True), ("float32[B,N,M]", "int64[B,N,M]")),
        (lambda x: own.softmax(x, False, "auto"), ("float32[0,M]",)),
    ],
)
def test_tilewrights_operators_cost_in_a_trace_what_they_cost_in_a_graph(
    function: Callable[..., object], inputs: tuple[str, ...], tmp_path: Path
) -> None:
    program = Program(function, inputs)
    with traced_for_gpu(True):
        shapes = program.shapes(program.graph(SIZES), SIZES)
    (node,) = (node for node in shapes.graph.nodes if str(node.target).startswith("tilewright."))
    ((name, args),) = (
        event
        for event in recorded(function, program.tensors(SIZES), tmp_path)
        if event[0] == f"tilewright::{calls.operator_name(node.target).removeprefix('tilewright.')}"
    )
    call = read_call(name, args)
    assert call is not None and (priced := price(call)) is not None
    assert counts(priced.cost) == counts(operator_cost(node, shapes))


@pytest.mark.parametrize("direction", ["", "_backward"])
@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0)])
def test_tilewrights_attention(direction: str, window: tuple[int | None, int | None]) -> None:
    graph = fx.Graph()
    schema = getattr(own, f"attention{direction}").default._schema
    shapes = {"lse": ([2, 4, 9], torch.float32), "lse64": ([0], torch.float64), "state": ([0], torch.int64)}
    says = {"left": window[0], "right": window[1], "scale": 0.125, "softcap": 0.0, "dropout": 0.0, "impl": "auto"}
    says |= {"longest_q": 0, "longest_k": 0, "deterministic": False}
    arguments, operands, values = [], [], []
    for argument in schema.arguments:
        if argument.name in ("q", "k", "v", "out", "dout") or argument.name in shapes:
            shape, dtype = shapes.get(argument.name, ([2, 4, 9, 64], torch.bfloat16))
            node = graph.placeholder(argument.name)
            node.meta["val"] = torch.zeros(shape, dtype=dtype)
            arguments.append(node)
            kinds = {torch.bfloat16: "c10::BFloat16", torch.float64: "double", torch.int64: "long int"}
            operands.append((shape, kinds.get(dtype, "float")))
            values.append("")
        else:
            found = says.get(argument.name)
            arguments.append(found)
            operands.append(([], "" if found is None or isinstance(found, str) else "Scalar"))
            values.append("" if found is None or isinstance(found, str) else str(found))
    operator = getattr(own, f"attention{direction}").default
    node = graph.call_function(operator, tuple(arguments))
    fakes = fx.node.map_arg(tuple(arguments), lambda n: n.meta["val"].to("meta"))
    node.meta["val"] = operator(*fakes)
    graph.output(node)
    name = f"tilewright::attention{direction}"
    call = read_call(name, recorded_call(name, *operands, values=values))
    assert call is not None and (priced := price(call)) is not None and priced.kind == "compute"
    expected = operator_cost(node, symbolic_shapes(graph, {}, {}))
    assert (priced.cost.flops, priced.cost.transcendentals) == (expected.flops, expected.transcendentals)
    assert priced.cost.bytes_written == expected.bytes_written
    # A window of 4 keys for 9 queries at the end of 9 keys reaches all of them.
    assert priced.cost.bytes_read == expected.bytes_read


def recorded_call(name: str, *operands: tuple[list[int], str], values: list[str] | None = None) -> dict[str, object]:
    return {
        "Input Dims": [shape for shape, _ in operands],
        "Input type": [kind for _, kind in operands],
        "Concrete Inputs": values or [""] * len(operands),
    }


OWN = [f"tilewright::{row.name.split('.')[1]}" for row in rows().values() if row.own]
ATTENTION = [row.name.split(".")[1] for row in rows().values() if row.operator_class == "compute" and row.priced]
ATTENTION = [name for name in ATTENTION if name.startswith("_") and "attention" in name]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_the_librarys_layout(name: str, causal: bool) -> None:
    """2·B·H·S²·d FLOPs for each of two products, five backward; half of them if causal, wherever the call says so."""
    B, S, H, d = 2, 128, 4, 64
    heads_first = "scaled" in name or "cudnn" in name
    one = ([B, H, S, d] if heads_first else [B, S, H, d], "c10::BFloat16")
    operands: list[tuple[list[int], str]] = []
    values: list[str] = []
    for argument in getattr(aten, name).default._schema.arguments:
        is_tensor = argument.name in ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")
        lse = ([B, H, S], "float")
        operands.append((lse if argument.name == "logsumexp" else one) if is_tensor else ([], "Scalar"))
        says = {"is_causal": str(causal), "custom_mask_type": str(int(causal))}
        values.append(says.get(argument.name, "" if is_tensor else "0"))
    call = read_call(f"aten::{name}", recorded_call(name, *operands, values=values))
    priced = call and price(call)
    assert priced is not None and priced.kind == "compute" and priced.dtype == "bfloat16"
    backward = name.endswith("_backward")
    assert priced.cost.flops == (10 if backward else 4) * B * H * S * S * d // (2 if causal else 1)
    whole, statistics = B * S * H * d * 2, B * S * H * 4
    assert priced.cost.bytes_read == (5 * whole + statistics if backward else 3 * whole)
    assert priced.cost.bytes_written == (3 * whole if backward else whole + statistics)


def test_an_optimizers_lists() -> None:
    shapes = [[256], [64, 3]]
    elements = 256 + 192
    args = {"Input Dims": [shapes, shapes, []], "Input type": ["TensorList", "TensorList", "Scalar"]}
    call = read_call("aten::_foreach_lerp_", args | {"Concrete Inputs": ["", "", "0.1"]})
    priced = call and price(call)
    assert priced is not None
    assert counts(priced.cost) == (2 * elements * 4, elements * 4, 3 * elements, 0)
    half = read_call("aten::_foreach_lerp_", args | {"Concrete Inputs": ["", "", "0.1"]}, "c10::Half")
    assert half is not None and (found := price(half)) is not None and found.cost.bytes_written == elements * 2


def test_a_generated_kernel_moves_its_arguments() -> None:
    args = recorded_call("f", ([64, 32], "float"), ([64, 32], "bool"), ([64, 32], "float"), ([], "Scalar"))
    call = read_call("triton_poi_fused_add_gelu_3", args)
    priced = call and price_generated(call)
    assert priced is not None
    assert priced.cost.bytes == 2048 * (4 + 1 + 4)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"Input Dims": "no", "Input type": []},
        {"Input Dims": [[2, 3]], "Input type": ["float", "float"]},
        {"Input Dims": [[-1, 3], [3, 4]], "Input type": ["float", "float"]},
        {"Input Dims": [[2, 3], [4, [5]]], "Input type": ["float", "float"]},
        {"Input Dims": [[], []], "Input type": ["float", "float"]},
        {"Input Dims": [[2, 3]], "Input type": ["__import__('os')"], "Concrete Inputs": ["__import__('os')"]},
        {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "[" * 10_000]},
        {"Input Dims": [[2, 3], [3, 4]], "Input type": [[[]], {"a": 1}]},
        {"Input Dims": [[(1 << 62) - 1] * 100_000, [3, 4]], "Input type": ["float", "float"]},
        {
            "Input Dims": [*[[1, 1, 1 << 60, 1]] * 3, *[[]] * 13],
            "Input type": [*["float"] * 3, *["Scalar"] * 13],
            "Concrete Inputs": [*[""] * 3, *["3"] * 13],
        },
        {"Input Dims": [[2, 3], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "'exp'"]},
    ],
)
@pytest.mark.parametrize("name", ["aten::mm", "aten::sum", "aten::native_layer_norm", "aten::_foreach_add_", *OWN])
def test_what_no_such_operator_takes_has_no_cost_and_does_no_harm(name: str, args: dict[str, object]) -> None:
    call = read_call(name, args)
    priced = price(call) if call is not None else None
    assert priced is None or priced.cost.bytes >= 0


def test_text_among_the_operands_is_not_recorded() -> None:
    """A trace does not tell GELU's two formulas apart: the exact one, which takes fewer FLOPs, is counted."""
    call = read_call("aten::gelu", recorded_call("f", ([2, 3], "float"), ([], "")))
    assert call is not None and (priced := price(call)) is not None and priced.cost.flops == 4 * 6


def test_an_unknown_operator_is_unknown() -> None:
    call = read_call("mine::special", recorded_call("f", ([2, 3], "float")))
    assert call is not None and price(call) is None


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    sizes = NumberAxes()
    call = CallAxes(sizes, {}, lambda _: None, [], None, None, str)
    return tuple(map(sizes.size_of, call.broadcast(*map(sizes.unknown_shape, shapes))))


def test_broadcasting_is_pytorchs() -> None:
    for shapes in ([(4, 1), (3,)], [(), (2,)], [(1, 5, 1), (7, 1, 6)], [(0, 3), (1, 3)]):
        assert broadcast(*shapes) == tuple(torch.broadcast_shapes(*shapes))
    with pytest.raises(UnknownShape):
        broadcast((2, 3), (2,))


def test_an_operand_counts_the_storage_that_it_addresses() -> None:
    args = {"Input Dims": [[5, 7], [5, 7]], "Input type": ["float", "float"], "Input Strides": [[7, 1], [0, 1]]}
    call = read_call("aten::add", args)
    assert call is not None
    assert [operand.own for operand in call.operands if isinstance(operand, Operand)] == [35, 7]
