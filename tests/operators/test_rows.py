"""Rows agree with their bodies: names of arguments, and FLOPs."""

import operator

import torch
import torch._inductor.inductor_prims

from tests.kernels.registered import all_operators
from tilewright.backend import backend, recording
from tilewright.kernels.dropout_add import philox
from tilewright.operators.table import rows
from tilewright.passes.norm import group as group_norm
from tilewright.passes.random import draws


def test_names_of_arguments_are_those_of_the_schemas() -> None:
    # Who defines tilewright's own operators.
    assert draws.draw_stream and philox.draw_philox and group_norm.group_norm and all_operators()
    for row in rows().values():
        if row.name == "keep_mask":
            continue
        schema = operator.attrgetter(row.name)(torch.ops)._schema
        names = tuple(argument.name for argument in schema.arguments)
        assert row.arguments == (names[: len(row.arguments)] if "..." in row.text else names), row.name


def test_a_multiply_add_of_dynamos_is_generated() -> None:
    a, b, c = (torch.randn(7, 33) for _ in range(3))
    run = torch.compile(lambda a, b, c: torch.ops.prims.fma(a, b, c).sin(), backend=backend, fullgraph=True)
    with recording() as record:
        torch.testing.assert_close(run(a, b, c), (a * b + c).sin())
    (graph,) = record.graphs
    assert [step.generated for step in graph.executable.steps] == [True]
