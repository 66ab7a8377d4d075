"""The annotated tree of the reference block, read as a person would, and the source lines in it."""

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, fx, nn

from tests.graph import captured
from tests.graph.captured import (
    BLOCK_EQUAL,
    PROGRAMS,
    Program,
    block_graphs,
    block_shapes,
    fused_qkv,
    heads_there_and_back,
)
from tests.kernels.registered import all_operators
from tilewright import functional
from tilewright.graph import calls, source
from tilewright.graph.source import source_line
from tilewright.graph.tree import Group, OperatorNote, annotated_tree, render, steps
from tilewright.records.case import Case, InputSpec
from tilewright.verbs import explain_case

READING = (
    "LN → Q,K,V → heads → QKᵀ/√d → softmax → PV → merge → out-projection → residual → LN → FF1 → GELU → FF2 → residual"
)


def block_tree(dropout: float = 0.0, fused: bool = False, backward: bool = False) -> Group:
    return annotated_tree(
        block_graphs(**BLOCK_EQUAL, dropout=dropout, fused=fused)[backward],
        block_shapes(BLOCK_EQUAL, dropout, fused)[backward],
    )


def program_tree(program: Program, **sizes: int) -> Group:
    graph = program.graph(sizes)
    return annotated_tree(graph, program.shapes(graph, sizes))


def text_of(tree: Group) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(render(tree))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def notes(tree: Group, role: str) -> list[OperatorNote]:
    return [note for note in tree.operators() if note.role == role]


def test_the_block_reads_as_it_is_drawn() -> None:
    assert " → ".join(steps(block_tree())) == READING


def test_the_block_with_dropout_shows_where_it_draws() -> None:
    expected = READING.replace("→ residual", "→ dropout → residual")
    assert " → ".join(steps(block_tree(dropout=0.1))) == expected
    assert {note.operator_class for note in notes(block_tree(dropout=0.1), "dropout")} == {"random"}


def test_the_fused_block_has_attention_as_one_step() -> None:
    expected = READING.replace("QKᵀ/√d → softmax → PV", "attention")
    assert " → ".join(steps(block_tree(fused=True))) == expected


def test_the_tree_holds_every_operator_once_and_in_order() -> None:
    for backward in (False, True):
        graph = block_graphs(**BLOCK_EQUAL, dropout=0.1, fused=False)[backward]
        expected = [n.name for n in graph.nodes if n.op == "call_function" and "getitem" not in n.name]
        found = [note.name for note in block_tree(dropout=0.1, backward=backward).operators()]
        assert found == expected


def test_every_tensor_has_its_shape_and_dtype() -> None:
    (softmax,) = (note for note in block_tree().operators() if note.target == "aten._softmax.default")
    assert list(map(str, softmax.operands)) == ["float32[B, H, S, S]"]
    assert softmax.results[0].sizes == (2, 4, 16, 16)
    (norm, _) = notes(block_tree(), "LN")
    assert list(map(str, norm.operands)) == ["float32[B, S, D]", "float32[D]", "float32[D]"]
    assert list(map(str, norm.results)) == ["float32[B, S, D]", "float32[B, S, 1]", "float32[B, S, 1]"]


def test_modules_and_source_lines_are_the_users_own() -> None:
    tree = block_tree()
    assert all(isinstance(group, Group) for group in tree.children)
    modules = [(group.title, group.module) for group in tree.children if isinstance(group, Group)]
    assert ("FF1", "up") in modules and ("out-projection", "out") in modules
    assert [module for title, module in modules if title == "QKᵀ/√d"] == [""]
    code = Path(captured.__file__).read_text().splitlines()
    for note in tree.operators():
        assert note.source is not None
        place, line = note.source.split(": ", 1)
        assert place.startswith("captured.py:")
        assert code[int(place.split(":")[1]) - 1].strip() == line


def test_backward_is_grouped_by_the_modules_of_forward() -> None:
    tree = block_tree(dropout=0.1, backward=True)
    modules = [group.module for group in tree.children if isinstance(group, Group) and group.module]
    assert modules == ["dropout", "down", "up", "norm2", "dropout", "out", "value", "key", "query", "norm1"]
    assert "residual" not in steps(tree)
    assert "linear backward" in steps(tree)


def test_modules_nest() -> None:
    def graph_with(*stacks: dict[str, tuple[str, type]]) -> fx.Graph:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = torch.zeros(3)
        for stack in stacks:
            x = graph.call_function(torch.ops.aten.neg.default, (x,))
            x.meta |= {"val": torch.zeros(3), "nn_module_stack": stack}
        graph.output(x)
        return graph

    layers = {
        i: (f"L['self'].layers[{i}]" if i else "getattr(L['self'].layers, '0')", torch.nn.Sequential) for i in range(2)
    }
    inner = ("L['self']._modules['layers']._modules['1'].act", torch.nn.ReLU)
    graph = graph_with({"a": layers[0]}, {"b": layers[1]}, {"b": layers[1], "c": inner}, {"b": layers[1]})
    program = Program(torch.neg, ("float32[N]",))
    tree = annotated_tree(graph, program.shapes(graph, {"N": 3}))
    first, second = tree.children
    assert isinstance(first, Group) and isinstance(second, Group)
    assert (first.title, first.module) == ("neg", "layers.0")
    assert (second.title, second.module) == ("Sequential", "layers.1")
    assert [child.module for child in second.children if isinstance(child, Group)] == [
        "layers.1",
        "layers.1.act",
        "layers.1",
    ]


# Roles beside the block's.

WEIGHT = "float32[D,D]?"
ROLES: dict[str, tuple[Program, dict[str, int], str]] = {
    "one layer for queries, keys and values": (
        Program(fused_qkv, ("float32[B,N,D]", "float32[3*D,D]?")),
        *({"B": 2, "N": 8, "D": 8}, "Q,K,V → heads → QKᵀ/√d → softmax → PV"),
    ),
    "attention alone": (PROGRAMS["attention"], {"B": 2, "N": 8, "d": 4}, "QKᵀ/√d → softmax → PV"),
    "a softmax between linear layers": (
        Program(lambda x, w: F.linear(torch.softmax(F.linear(x, w), -1), w), ("float32[N,D]", WEIGHT)),
        *({"N": 3, "D": 4}, "linear → softmax → linear"),
    ),
    "layers between activations": (
        Program(
            lambda x, a, b, c: F.linear(F.gelu(F.linear(F.gelu(F.linear(x, a)), b)), c),
            ("float32[N,D]", WEIGHT, WEIGHT, WEIGHT),
        ),
        *({"N": 3, "D": 4}, "FF1 → GELU → linear → GELU → FF2"),
    ),
    "a sum of strangers": (Program(lambda x, y: x + y, ("float32[N]", "float32[N]")), {"N": 3}, "add"),
    "a residual": (
        Program(lambda x: heads_there_and_back(x, 2), ("float32[B,S,D]",)),
        *({"B": 2, "S": 3, "D": 4}, "view → residual"),
    ),
}


@pytest.mark.parametrize("name", ROLES)
def test_what_operators_are_there_for(name: str) -> None:
    program, sizes, expected = ROLES[name]
    assert " → ".join(steps(program_tree(program, **sizes))) == expected


def test_tilewrights_own_operators_are_named_by_what_they_stand_for() -> None:
    def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h, _ = functional.add_rms_norm(x, x)
        h = functional.linear_gelu(functional.layer_norm(functional.softmax(h)), up)
        h = functional.linear_dropout_add(h, down, None, x)
        h = functional.swiglu(functional.gelu(h, approximate="tanh"), h)
        return torch.ops.tilewright.dropout_add(h, x, 0.1, "none", 16)[0]  # type: ignore[no-any-return]

    assert all_operators()
    tree = program_tree(Program(block, ("float32[N,D]", "float32[4*D,D]?", "float32[D,4*D]?")), N=8, D=16)
    assert " → ".join(steps(tree)) == (
        "residual + RMS norm → softmax → LN → linear + GELU → linear → dropout + residual → GELU → SiLU + gate"
        " → dropout + residual"
    )
    backward = Program(lambda dy, x: torch.ops.tilewright.activation_backward(dy, x, "silu"), ("float32[N,D]",) * 2)
    assert steps(program_tree(backward, N=8, D=16)) == ["SiLU backward"]


# Rendering.


def test_the_terminal_shows_reading_modules_classes_and_shapes() -> None:
    text = text_of(block_tree())
    assert READING in text
    assert "FF1  up  captured.py:" in text
    assert "compute addmm.default  float32[4·D], float32[B·S, D], float32[D, 4·D] → float32[B·S, 4·D]" in text


def test_markup_in_a_users_line_is_shown_as_it_is() -> None:
    graph = PROGRAMS["naive softmax"].graph({"N": 2, "M": 3})
    for node in graph.nodes:
        node.meta["stack_trace"] = '  File "/home/ada/m.py", line 1, in f\n    x[red] = "[/red][bold]"\n'
    tree = annotated_tree(graph, PROGRAMS["naive softmax"].shapes(graph, {"N": 2, "M": 3}))
    assert 'm.py:1: x[red] = "[/red][bold]"' in text_of(tree)


def test_an_operator_without_a_row_is_unknown() -> None:
    tree = program_tree(Program(lambda x: torch._standard_gamma(x), ("float32[N,M]",)), N=2, M=3)
    assert "unknown" in {note.operator_class for note in tree.operators()}


# What a node was called with.


def test_a_placeholder_named_like_a_view_is_none() -> None:
    """A backward graph's inputs carry the names of the forward operators that made them."""
    graph = fx.Graph()
    assert not calls.is_view(graph.placeholder("_unsafe_view"))
    assert calls.is_view(graph.call_function(torch.ops.aten.view.default))


def test_arguments_have_their_names_and_defaults() -> None:
    node = fx.Graph().call_function(torch.ops.aten.sum.dim_IntList, (None, [1]), {"dtype": torch.float64})
    assert calls.arguments(node) == {"self": None, "dim": [1], "keepdim": False, "dtype": torch.float64}


def node_with(trace: str | None) -> fx.Node:
    node = fx.Graph().placeholder("x")
    if trace is not None:
        node.meta["stack_trace"] = trace
    return node


OURS = source.__file__
TORCH = str(Path(torch.__file__).parent / "nn" / "modules" / "module.py")
BESIDE = str(Path(torch.__file__).parent.parent / "torchvision" / "ops.py")


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        (None, None),
        ("", None),
        ("no frame here", None),
        ('  File "/a/b.py", line 3, in f\n    y = x + 1\n', "b.py:3: y = x + 1"),
        ('  File "/a/b.py", line 3, in f\n    y = x + 1\n        ~~^~~\n', "b.py:3: y = x + 1"),
        ('  File "/a/b.py", line 3, in f\n', "b.py:3"),
        ('  File "/a/b.py", line 3, in f\n  File "/a/c.py", line 4, in g\n    z\n', "c.py:4: z"),
        (f'  File "/a/b.py", line 3, in f\n    m(x)\n  File "{TORCH}", line 9, in g\n    t\n', "b.py:3: m(x)"),
        (f'  File "{TORCH}", line 9, in g\n    t\n', None),
        (
            f'  File "/a/b.py", line 3, in f\n    m(x)\n  File "{source.__file__}", line 9, in g\n    t\n',
            "b.py:3: m(x)",
        ),
        (f'  File "{BESIDE}", line 9, in g\n    t\n', "ops.py:9: t"),
        ('  File "/a/b.py", line 3, in f\n    m(x)\n  File "<eval_with_key>.3", line 5, in g\n    t\n', "b.py:3: m(x)"),
        ('  File "/a/b.py", line 3, in f\n    m(x)\nGradient addition node due to multiple use:', "b.py:3: m(x)"),
    ],
)
def test_the_source_line_is_the_innermost_of_the_users(trace: str | None, line: str | None) -> None:
    assert source_line(node_with(trace)) == line


def test_a_module_of_pytorchs_own_is_told_by_its_layers() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 4), nn.GELU()))
    case = Case("sequential", lambda: model, [InputSpec.parse("fp32[N=4,M=8]")], training=False)
    lines = {operator.name: operator.source for operator in explain_case(case, "cpu").program.operators}
    assert lines["native_layer_norm"] == "layer 0: LayerNorm"
    assert lines["gelu"] == "layer 1.1: GELU" and lines["addmm"] == "layer 1.0: Linear"
