"""The line of the user's program that a node comes from, and what stands for it where there is none."""

from __future__ import annotations

from torch import nn
from torch.fx import Graph

from tilewright.graph import source
from tilewright.graph.source import source_line
from tilewright.records.case import Case, InputSpec
from tilewright.verbs import explain_case


def test_frames_of_torch_and_of_tilewright_are_nobodys_line() -> None:
    node = Graph().placeholder("x")
    frames = [("/home/ada/model.py", "y = norm(x)"), (source.__file__, "return f(x)"), (nn.__file__, "return g(x)")]
    node.meta["stack_trace"] = "\n".join(f'  File "{file}", line 12, in f\n    {code}' for file, code in frames)
    assert source_line(node) == "model.py:12: y = norm(x)"
    node.meta["stack_trace"] = f'  File "{source.__file__}", line 12, in f\n    return f(x)\n'
    assert source_line(node) is None


def test_a_module_of_pytorchs_own_is_told_by_its_layers() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 4), nn.GELU()))
    case = Case("sequential", lambda: model, [InputSpec.parse("fp32[N=4,M=8]")], training=False)
    lines = {operator.name: operator.source for operator in explain_case(case, "cpu").program.operators}
    assert lines["native_layer_norm"] == "layer 0: LayerNorm"
    assert lines["gelu"] == "layer 1.1: GELU" and lines["addmm"] == "layer 1.0: Linear"
