"""What rows say of themselves: names of arguments, and FLOPs that are those of the body."""

from __future__ import annotations

import operator

import torch
import torch._inductor.inductor_prims

from tests.kernels.registered import all_operators
from tilewright.backend import backend, recording
from tilewright.operators.counting import arithmetic_of, count_element
from tilewright.operators.table import row_of, rows
from tilewright.passes import draws, group_norm, philox


def test_names_of_arguments_are_those_of_the_schemas() -> None:
    # Who defines tilewright's own operators.
    assert draws.draw_stream and philox.draw_philox and group_norm.group_norm and all_operators()
    for row in rows().values():
        if row.name == "keep_mask":
            continue
        schema = operator.attrgetter(row.name)(torch.ops)._schema
        names = tuple(argument.name for argument in schema.arguments)
        assert row.arguments == (names[: len(row.arguments)] if "..." in row.text else names), row.name


def test_a_pointwise_row_counts_its_body() -> None:
    def counted(name: str, *given: object) -> tuple[int, int]:
        row = row_of(operator.attrgetter(name)(torch.ops.aten))
        assert row is not None and row.arithmetic is None and arithmetic_of(row) is not None
        return count_element(row, given)

    # x·½·(1 + erf(x/√2)); x·½·(1 + tanh(√(2/π)·(x + 0.044715·x³)))
    assert counted("gelu.default", ..., "none") == (4, 1)
    assert counted("gelu.default", ..., "tanh") == (8, 1)
    # g·(Φ(x) + x·φ(x)): Φ takes 3, φ 3 and the rest 3; with tanh the derivative's chain takes 17, where x² counts once.
    assert counted("gelu_backward.default", ..., ..., "none") == (9, 2)
    assert counted("gelu_backward.default", ..., ..., "tanh") == (17, 1)
    assert counted("add.Tensor", ..., ..., 1) == (1, 0)
    assert counted("add.Tensor", ..., ..., 3) == (2, 0)
    assert counted("pow.Tensor_Scalar", ..., 3) == (2, 0)
    assert counted("pow.Tensor_Scalar", ..., 0.3) == (0, 1)
    assert counted("softplus.default", ..., None, None) == (3, 2)


def test_a_multiply_add_of_dynamos_is_generated() -> None:
    a, b, c = (torch.randn(7, 33) for _ in range(3))
    run = torch.compile(lambda a, b, c: torch.ops.prims.fma(a, b, c).sin(), backend=backend, fullgraph=True)
    with recording() as record:
        torch.testing.assert_close(run(a, b, c), (a * b + c).sin())
    (graph,) = record.graphs
    assert [step.generated for step in graph.executable.steps] == [True]
