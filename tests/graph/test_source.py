"""The line of the user's program that a node comes from, and what stands for it where there is none."""

from pathlib import Path

import pytest
import torch
from torch import fx, nn

from tilewright.graph import source
from tilewright.graph.source import source_line
from tilewright.records.case import Case, InputSpec
from tilewright.verbs import explain_case


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
