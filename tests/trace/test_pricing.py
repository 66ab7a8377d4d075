"""Costs of recorded calls: against the costs of the captured nodes of the same calls, and closed formulas."""

import json
import operator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from tests import tables
from tests.kernels.registered import all_operators
from tests.operators import samples
from tests.tables import value
from tilewright.cost.operators import operator_cost
from tilewright.graph.dims import symbolic_shapes
from tilewright.operators.shapes import CallAxes, NumberAxes, UnknownShape
from tilewright.operators.table import rows
from tilewright.records.program import Cost
from tilewright.trace.price.pricing import price, price_generated
from tilewright.trace.price.recorded_call import PositionalCall, read_call
from tilewright.trace.price.recorded_call import Tensor as Operand

all_operators()
aten, own = torch.ops.aten, torch.ops.tilewright
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
Counts = tuple[int, int, int, int]


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


B, N, M, K = 3, 5, 7, 11
MATRIX, VECTOR, LOGITS, INDEX = ones(N, M), ones(M), ones(N, K), zeros(N)
# An LSTM of K features and M hidden: N steps of B sequences.
CELLS = [ones(4 * M, K), ones(4 * M, M), ones(4 * M), ones(4 * M), ones(B, M), ones(B, M)]
LSTM = (aten.mkldnn_rnn_layer, ones(N, B, K), *CELLS, False, [], 2, M, 1, True, False, False)
RUN = LSTM[0](*LSTM[1:], True)
PRODUCTS, OWN = (
    [value(f"({row['call']})", globals()) for row in tables.rows(Path(__file__).with_name("pricing.txt"), section)]
    for section in ("library", "own")
)
OWN_NAMES = [f"tilewright::{row.name.split('.')[1]}" for row in rows().values() if row.own]
COMMON = {
    "_log_softmax", "_softmax", "_softmax_backward_data", "add", "addcmul", "amax", "cat", "div", "exp", "gelu",
    "gelu_backward", "lt", "max", "max_pool2d_with_indices", "mean", "mul", "native_batch_norm_backward",
    "native_group_norm", "native_layer_norm", "native_layer_norm_backward", "relu", "sigmoid", "silu", "sub", "sum",
    "tanh", "threshold_backward", "var_mean", "where",
}  # fmt: skip
"""Samples that have a price; of others the results need not follow from what a trace tells of the call."""
ANOTHER_COST = {
    "aten.mkldnn_rnn_layer.default 0": "only the library knows the size of the workspace that it keeps for backward",
    "aten.gelu.default 1": "text is not recorded: the exact formula, which takes fewer FLOPs, is counted",
    "aten.gelu_backward.default 1": "text is not recorded",
    "aten.sum.dim_IntList 4": "the dtype that was asked for is not read",
    "aten._prelu_kernel_backward.default 0": "its row tells of one result",
    "aten.floor_divide.default 0": "a number is recorded as a tensor",
    "aten.div.Tensor_mode 2": "a number is recorded as a tensor",
}


def calls() -> dict[str, Call]:
    """A call of every operator above, and every call of a matrix in the operator table's samples."""
    found: dict[str, Call] = {}
    for number, (packet, *args) in enumerate(PRODUCTS + OWN):
        found[f"{packet.default} {number}"] = (packet.default, tuple(args), {})
    matrix = samples.operands("matrix", torch.float32)
    for name, makers in samples.CALLS.items():
        for number, make in enumerate(makers):
            args, kwargs = make(matrix)
            found[f"aten.{name} {number}"] = (operator.attrgetter(name)(aten), args, kwargs)
    return found


def cost_of_node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Counts:
    """The cost of the call in a graph where each operand is a separate tensor."""
    graph = fx.Graph()

    def placeholder(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, *fx.node.map_aggregate((args, kwargs), placeholder))
    node.meta["val"] = target(*args, **kwargs)
    graph.output(node)
    return counts(operator_cost(node, symbolic_shapes(graph, {}, {})))


def counts(cost: Cost) -> Counts:
    return cost.bytes_read, cost.bytes_written, cost.flops, cost.transcendentals


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Call, PositionalCall]]:
    """Each call that PyTorch has of such operands, and what its profiler wrote of it."""
    made: dict[str, Call] = {}
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        for label, (target, args, kwargs) in calls().items():
            with suppress(RuntimeError, NotImplementedError), record_function(f"call {label}"):
                target(*args, **kwargs)
                made[label] = target, args, kwargs
    path = tmp_path_factory.mktemp("recorded") / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    first = {mark["name"].removeprefix("call "): call for mark, call in pairwise(events)}
    found = {label: read_call(first[label]["name"], first[label]["args"]) for label in made}
    return {label: (made[label], call) for label, call in found.items() if call is not None}


def test_a_recorded_call_costs_what_its_captured_node_costs(recorded: dict[str, tuple[Call, PositionalCall]]) -> None:
    listed = {f"{packet.default} {number}" for number, (packet, *_) in enumerate(PRODUCTS + OWN)}
    assert listed <= recorded.keys()
    unpriced, differing = set(), set()
    for label, (call, positional) in recorded.items():
        priced = price(positional)
        if priced is None:
            unpriced.add(label)
        elif counts(priced.cost) != cost_of_node(*call):
            differing.add(label)
    assert differing == set(ANOTHER_COST)
    all_names, unpriced_names = (
        {label.removeprefix("aten.").split(".")[0] for label in labels} for labels in (recorded, unpriced)
    )
    assert all_names - unpriced_names >= COMMON and unpriced.isdisjoint(listed)


KINDS = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.float64: "double",
    torch.int64: "long int",
    torch.bool: "bool",
}


def written(*args: object) -> dict[str, object]:
    """The profiler's record of a call with these operands, for calls that no CPU runs."""
    numbers = [value is not None and not isinstance(value, Tensor | str) for value in args]
    return {
        "Input Dims": [list(value.shape) if isinstance(value, Tensor) else [] for value in args],
        "Input type": [
            KINDS[value.dtype] if isinstance(value, Tensor) else "Scalar" if number else ""
            for value, number in zip(args, numbers, strict=True)
        ],
        "Concrete Inputs": [str(value) if number else "" for value, number in zip(args, numbers, strict=True)],
    }


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0)])
def test_tilewrights_attention(window: tuple[int | None, int | None]) -> None:
    """A window of 4 keys for 9 queries at the end of 9 keys reaches all of them."""
    x, lse = meta(2, 4, 9, 64), meta(2, 4, 9, dtype=torch.float32)
    kept = (lse, meta(0, dtype=torch.float64), meta(0, dtype=torch.int64))
    options = (None, None, None, None, 0.125, *window, 0.0, 0.0, 0, 0, False, "auto")
    for name, tensors in (("attention", (x, x, x)), ("attention_backward", (x, None, x, x, x, x, *kept))):
        call = read_call(f"tilewright::{name}", written(*tensors, *options))
        assert call is not None and (priced := price(call)) is not None and priced.kind == "compute"
        assert counts(priced.cost) == cost_of_node(getattr(own, name).default, (*tensors, *options), {})


def test_an_lstm_multiplies_what_its_steps_multiply() -> None:
    def cell(x: Tensor, h: Tensor, c: Tensor, into: Tensor, again: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (x @ into.t() + h @ again.t()).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    _, x, into, again, _, _, h, c, *_ = LSTM
    with FlopCounterMode(display=False) as forward:
        for step in x:
            h, c = cell(step, h, c, into, again)
    cells = x[..., 0].numel() * h.shape[-1]
    _, _, flops, transcendentals = cost_of_node(LSTM[0].default, (*LSTM[1:], False), {})
    assert (flops, transcendentals) == (forward.get_total_flops() + 13 * cells, 5 * cells)
    _, _, flops, _ = cost_of_node(aten.mkldnn_rnn_layer_backward.default, PRODUCTS[1][1:], {})
    assert flops == 2 * forward.get_total_flops() + 26 * cells


def test_what_cudnn_runs_costs_what_a_cpu_s_library_would() -> None:
    x, weight, vector = meta(2, 8, 9, 7), meta(12, 4, 3, 3), meta(8, dtype=torch.float32)
    options = [1, 1], [2, 2], [1, 1], 2
    moments = (vector,) * 4
    for ours, theirs in (
        (
            ("cudnn_convolution", x, weight, *options, False, False, True),
            ("mkldnn_convolution", x, weight, None, *options),
        ),
        (("cudnn_batch_norm", x, *moments, True, 0.1, 1e-5), ("native_batch_norm", x, *moments, True, 0.1, 1e-5)),
        (
            ("cudnn_batch_norm_backward", x, x, vector, None, None, vector, vector, 1e-5, None),
            ("native_batch_norm_backward", x, x, vector, None, None, vector, vector, True, 1e-5, [True] * 3),
        ),
    ):
        calls = [read_call(f"aten::{name}", written(*args)) for name, *args in (ours, theirs)]
        costs = [priced.cost for call in calls if call is not None and (priced := price(call))]
        assert len(costs) == 2 and costs[0] == costs[1] and costs[0].flops


ATTENTION = [row.name.split(".")[1] for row in rows().values() if row.operator_class == "compute" and row.priced]
ATTENTION = [name for name in ATTENTION if name.startswith("_") and "attention" in name]


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_the_librarys_layout(name: str, causal: bool) -> None:
    """2·B·H·S²·d FLOPs for each of two products, five backward; half of them if causal, wherever the call says so."""
    B, S, H, d = 2, 128, 4, 64
    x = meta(B, H, S, d) if "scaled" in name or "cudnn" in name else meta(B, S, H, d)
    given: dict[str, object] = dict.fromkeys(("grad_out", "grad_out_", "query", "key", "value", "out"), x)
    given |= {"logsumexp": meta(B, H, S, dtype=torch.float32), "is_causal": causal, "custom_mask_type": int(causal)}
    arguments = [argument.name for argument in getattr(aten, name).default._schema.arguments]
    call = read_call(f"aten::{name}", written(*(given.get(argument, 0) for argument in arguments)))
    priced = call and price(call)
    assert priced is not None and priced.kind == "compute" and priced.dtype == "bfloat16"
    flops, whole, statistics = B * H * S * S * d // (2 if causal else 1), x.nbytes, B * S * H * 4
    expected = (
        (5 * whole + statistics, 3 * whole, 10 * flops)
        if name.endswith("_backward")
        else (3 * whole, whole + statistics, 4 * flops)
    )
    assert (priced.cost.bytes_read, priced.cost.bytes_written, priced.cost.flops) == expected


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
    x = ones(64, 32)
    call = read_call("triton_poi_fused_add_gelu_3", written(x, x.bool(), x, 7))
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
@pytest.mark.parametrize(
    "name", ["aten::mm", "aten::sum", "aten::native_layer_norm", "aten::_foreach_add_", *OWN_NAMES]
)
def test_what_no_such_operator_takes_has_no_cost_and_does_no_harm(name: str, args: dict[str, object]) -> None:
    call = read_call(name, args)
    priced = price(call) if call is not None else None
    assert priced is None or priced.cost.bytes >= 0


def test_text_among_the_operands_is_not_recorded() -> None:
    """A trace does not tell GELU's two formulas apart: the exact one, which takes fewer FLOPs, is counted."""
    call = read_call("aten::gelu", written(ones(2, 3), "tanh"))
    assert call is not None and (priced := price(call)) is not None and priced.cost.flops == 4 * 6


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
