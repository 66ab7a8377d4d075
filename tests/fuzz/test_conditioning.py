"""The judge of random programs leaves out what the contract leaves open, and nothing else."""

import pytest
import torch

from tests.fuzz.conditioning import unverified
from tests.fuzz.graphs import Graph, Input

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "statements", "judged"),
    [
        (BF16, ("x0 @ x1", "v0.argmax(0)"), True),
        (BF16, ("(x0 @ x1) @ x1", "v0.argmax(0)"), True),
        (BF16, ("torch.sin(x0 * 0.3)", "v0.argmax(0)"), True),
        # Kernels may keep the sine's operand and its result wider than eager, and so the product's terms.
        (BF16, ("torch.sin(x0 * 0.3) @ x1", "v0.argmax(0)"), False),
        (BF16, ("torch.softmax(x0 @ x1 * 0.1, -1) @ x1", "v0 * (v0 == v0.amax(0))"), False),
        (BF16, ("torch.sin(x0 * 0.3) @ x1", "v0 * 2"), True),
        (F32, ("torch.sin(x0 * 0.3) @ x1", "v0.argmax(0)"), True),
        (F32, ("torch.sin(x0 * 0.3).split(8)[1]", "v0.argmax(0)"), True),
        (F32, ("F.elu(x0 * torch.nan)",), False),
        (F32, ("x0[:1, :1] * torch.nan", "F.hardswish(v0)"), False),
        (F32, ("F.elu(x0)",), True),
        (F32, ("F.relu(x0 * torch.nan)",), True),
    ],
)
def test_decisions_that_eager_leaves_open_are_left_out(
    dtype: torch.dtype, statements: tuple[str, ...], judged: bool
) -> None:
    square = Input((16, 16), dtype, "contiguous")
    graph = Graph((square, square), statements, (f"v{len(statements) - 1}",))
    assert (unverified(graph.function(), graph.make_inputs(5), 5, training=True) == []) is judged
