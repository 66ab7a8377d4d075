"""Symbolic shapes against what PyTorch gives at other sizes: what is found at one must hold at another."""

from collections.abc import Mapping

import pytest
import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graph.captured import (
    BLOCK_DISTINCT,
    BLOCK_EQUAL,
    DISTINCT,
    EQUAL,
    PROGRAMS,
    Program,
    block_graphs,
    block_shapes,
    convolved,
    fused_qkv,
    heads_there_and_back,
    mlp,
)
from tilewright.graph import calls
from tilewright.graph.dims import SymbolicShapes, axis_text, symbolic_shapes
from tilewright.records.errors import CaptureError


def at(shapes: SymbolicShapes, node: fx.Node, sizes: Mapping[str, int]) -> list[tuple[int, ...] | None]:
    """The symbolic shapes of a node's results at other sizes."""
    values = {sympy.Symbol(name, positive=True, integer=True): size for name, size in sizes.items()}
    return [
        None if shape is None else tuple(int(sympy.sympify(axis).subs(values)) for axis in shape)
        for shape in shapes.of_outputs(node)
    ]


def numeric(node: fx.Node) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tuple(tensor.shape) for tensor in calls.outputs(node)]


def same_nodes(graph: fx.Graph, other: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    pairs = list(zip(graph.nodes, other.nodes, strict=True))
    assert all(str(a.target) == str(b.target) for a, b in pairs), "the two captures are different programs"
    return [(a, b) for a, b in pairs if a.op != "output"]


def texts(graph: fx.Graph, shapes: SymbolicShapes) -> dict[str, str]:
    tensors = [node for node in graph.nodes if calls.output(node) is not None]
    return {node.name: f"[{', '.join(map(axis_text, shapes[node]))}]" for node in tensors}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_found_where_sizes_are_equal_hold_where_they_differ(name: str) -> None:
    program = PROGRAMS[name]
    graph = program.graph(EQUAL)
    shapes = program.shapes(graph, EQUAL)
    for node, other in same_nodes(graph, program.graph(DISTINCT)):
        assert at(shapes, node, EQUAL) == numeric(node)
        assert at(shapes, node, DISTINCT) == numeric(other), f"{node.format_node()}: {shapes[node]}"


@pytest.mark.parametrize(("dropout", "fused"), [(0.0, False), (0.1, False), (0.1, True)])
def test_block_forward_and_backward_hold_where_sizes_differ(dropout: float, fused: bool) -> None:
    graphs = block_graphs(**BLOCK_EQUAL, dropout=dropout, fused=fused)
    others = block_graphs(**BLOCK_DISTINCT, dropout=dropout, fused=fused)
    for graph, other, shapes in zip(graphs, others, block_shapes(BLOCK_EQUAL, dropout, fused), strict=True):
        for node, partner in same_nodes(graph, other):
            assert at(shapes, node, BLOCK_EQUAL) == numeric(node)
            assert at(shapes, node, BLOCK_DISTINCT) == numeric(partner), f"{node.format_node()}: {shapes[node]}"


def test_block_reads_in_the_names_of_its_case() -> None:
    forward, _ = block_graphs(**BLOCK_EQUAL, dropout=0.0, fused=False)
    found = texts(forward, block_shapes(BLOCK_EQUAL, 0.0, False)[0])
    assert found["_softmax"] == "[B, H, S, S]"
    assert found["bmm"] == "[B·H, S, S]"
    assert found["gelu"] == "[B, S, 4·D]"
    assert [found[name] for name in found if name.startswith("transpose")][:3] == ["[B, H, S, D/H]"] * 3
    parameters = [found[node.name] for node in forward.nodes if node.op == "placeholder"]
    assert sorted(set(parameters)) == sorted(["[B, S, D]", "[D]", "[D, D]", "[4·D, D]", "[4·D]", "[D, 4·D]"])


def test_heads_take_the_name_that_the_case_gives_them() -> None:
    sizes = {"B": 2, "S": 8, "D": 16}
    graph = Program(lambda x: heads_there_and_back(x, 4), ("float32[B,S,D]",)).graph(sizes)
    named = symbolic_shapes(graph, {"x_1": ("B", "S", "D")}, sizes | {"H": 4})
    unnamed = symbolic_shapes(graph, {"x_1": ("B", "S", "D")}, sizes)
    assert texts(graph, named)["view"] == "[B, S, H, D/H]"
    assert texts(graph, unnamed)["view"] == "[B, S, 4, 4]"
    # Back together, the two numbers are D again.
    assert [texts(graph, shapes)["view_1"] for shapes in (named, unnamed)] == ["[B, S, D]", "[B, S, D]"]


def test_an_input_dimension_never_names_heads() -> None:
    """B happens to be 4, as many as there are heads: the split of D has nothing to do with it."""
    sizes = {"B": 4, "S": 8, "D": 16}
    graph = Program(lambda x: heads_there_and_back(x, 4), ("float32[B,S,D]",)).graph(sizes)
    shapes = symbolic_shapes(graph, {"x_1": ("B", "S", "D")}, sizes)
    assert texts(graph, shapes)["view"] == "[B, S, 4, 4]"


def test_parameters_are_named_by_use_then_by_their_neighbour() -> None:
    program = Program(fused_qkv, ("float32[B,N,D]", "float32[3*D,D]?"))
    sizes = {"B": 2, "N": 8, "D": 8}
    graph = program.graph(sizes)
    found = texts(graph, program.shapes(graph, sizes))
    assert found["weight_1"] == "[3·D, D]"
    assert found["bmm"] == "[B, N, N]"
    assert found["bmm_1"] == "[B, N, D]"


def test_a_kernels_size_is_never_a_dimensions() -> None:
    """A 3×3 kernel over three channels, of images of three rows."""
    sizes = {"B": 2, "C": 3, "N": 3, "M": 7}
    program = Program(convolved, ("float32[B,C,N,M]", "float32[11,C,3,3]?", "float32[11]?"))
    graph = program.graph(sizes)
    found = texts(graph, program.shapes(graph, sizes))
    assert found["weight_1"] == "[11, C, 3, 3]"


def test_a_parameter_without_one_reading_keeps_its_number() -> None:
    program = Program(mlp, ("float32[B,D]", "float32[100,D]?", "float32[100]?", "float32[10,100]?"))
    sizes = {"B": 5, "D": 7}
    graph = program.graph(sizes)
    found = texts(graph, program.shapes(graph, sizes))
    assert (found["up_1"], found["bias_1"]) == ("[100, D]", "[100]")
    assert found[list(found)[-1]].startswith("[B, ")


def test_a_name_of_another_size_is_not_believed() -> None:
    graph = PROGRAMS["naive softmax"].graph({"N": 3, "M": 5})
    shapes = symbolic_shapes(graph, {"x_1": ("N", "M")}, {"N": 4, "M": 5})
    assert texts(graph, shapes)["exp"] == "[3, M]"


def test_a_name_that_no_formula_can_hold_stays_a_number() -> None:
    graph = PROGRAMS["naive softmax"].graph({"N": 3, "M": 5})
    shapes = symbolic_shapes(graph, {"x_1": ("batch size", "lambda")}, {"batch size": 3, "lambda": 5})
    assert texts(graph, shapes)["exp"] == "[3, 5]"


@pytest.mark.parametrize("sizes", [{"N": 0, "M": 5}, {"N": 3, "M": 1}, {"N": 1, "M": 1}])
def test_sizes_zero_and_one(sizes: dict[str, int]) -> None:
    program = PROGRAMS["naive softmax"]
    graph = program.graph(sizes)
    assert texts(graph, program.shapes(graph, sizes))["div"] == "[N, M]"


def test_a_parameter_without_elements() -> None:
    graph = PROGRAMS["mlp"].graph({"B": 3, "D": 0})
    shapes = PROGRAMS["mlp"].shapes(graph, {"B": 3, "D": 0})
    assert all(at(shapes, node, shapes.sizes) == numeric(node) for node in graph.nodes if node.op != "output")


def test_an_operator_without_a_rule_gives_numbers_until_a_use_names_them() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x + torch.linalg.pinv(x).mT

    graph = make_fx(program, tracing_mode="fake")(torch.zeros(3, 5)).graph
    shapes = symbolic_shapes(graph, {"x_1": ("N", "M")}, {"N": 3, "M": 5})
    assert all(at(shapes, node, {"N": 3, "M": 5}) == numeric(node) for node in graph.nodes if node.op != "output")
    assert texts(graph, shapes)["add"] == "[N, M]"


def test_data_dependent_sizes_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        x = torch.zeros(7)
    graph = make_fx(lambda x: x.nonzero() + 1, tracing_mode="real")(torch.zeros(7)).graph
    for node in graph.nodes:
        if node.op == "call_function":
            arguments = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
            with mode:
                node.meta["val"] = node.target(*arguments)
        elif node.op == "placeholder":
            node.meta["val"] = x
    with pytest.raises(CaptureError, match="depends on the data"):
        symbolic_shapes(graph, {"x_1": ("N",)}, {"N": 7})


def test_channels_do_not_take_the_name_of_a_batch_of_their_size() -> None:
    def convolved_alone(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, w, padding=1)

    graph = make_fx(convolved_alone)(torch.zeros(16, 3, 8, 8), torch.zeros(16, 3, 3, 3)).graph
    shapes = symbolic_shapes(graph, {"x_1": ("B", "C", None, None)}, {"B": 16, "C": 3})
    assert texts(graph, shapes) == {"x_1": "[B, C, 8, 8]", "w_1": "[16, C, 3, 3]", "convolution": "[B, 16, 8, 8]"}
