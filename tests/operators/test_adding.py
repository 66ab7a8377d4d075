"""Adding operators: one of PyTorch's and one of a package's own, and who sees them then.

In a process of its own: rows are added to the one table.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PACKAGE = '''
"""The declarations of a package that adds two operators."""

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.language import Value, where
from tilewright.operators.row import Call, body, own


@body("heaviside.default(self, values)", discontinuous=True)
def heaviside(c: Call, x: Value, y: Value) -> Value:
    return where(x.eq(0), y, (x > 0).to_compute(c.dtype))


own(
    "scratch_scale(Tensor x, float factor) -> Tensor",
    "pointwise",
    arithmetic=each(of_argument("x"), 1),
    dtypes=("x",),
    role="scaling",
)
'''
KERNEL = """
from tilewright.kernels.registration import define
import scratch.rows

scale = define("scratch_scale", lambda x, factor: x * factor, lambda x, factor: x.new_empty(x.shape))
"""
USE = """
import json

import duckdb
import torch
from scratch.kernel import scale

import tilewright
from tilewright import backend
from tilewright.trace.price.pricing import price
from tilewright.trace.price.recorded_call import read_call


def program(x, y):
    return scale(torch.heaviside(x, y).exp(), 0.5)


x, y = torch.rand(64, 48), torch.rand(64, 48)
explanation = tilewright.explain(program, x, y, on="h200")
with backend.recording() as compiled:
    result = torch.compile(program, backend="tilewright")(x, y)
with tilewright.profile() as run:
    program(x, y)
torch.testing.assert_close(result, program(x, y))
query = "SELECT operator, bytes, flops, transcendentals FROM operator_distance WHERE operator = 'aten::heaviside'"
recorded = read_call(
    "tilewright::scratch_scale",
    {"Input Dims": [[64, 48], []], "Input type": ["float", "Scalar"], "Concrete Inputs": ["", "0.5"]},
)
priced = price(recorded)
print(json.dumps({
    "explained": [
        (o.stage, o.target, o.cost.bytes, o.cost.flops, o.cost.transcendentals, o.shape_symbolic)
        for o in explanation.program.operators
    ],
    "fallbacks": [str(fallback) for fallback in compiled.fallbacks],
    "launches": [launch for graph in compiled.graphs for launch in graph.plan.launches()],
    "profiled": duckdb.connect(str(run.path), read_only=True).sql(query).fetchall(),
    "priced": (priced.cost.bytes, priced.cost.flops, priced.dtype),
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of `USE` for the two operators."""
    folder = tmp_path_factory.mktemp("adding")
    (folder / "scratch").mkdir()
    (folder / "scratch" / "rows.py").write_text(PACKAGE)
    (folder / "scratch" / "kernel.py").write_text(KERNEL)
    (folder / "use.py").write_text(USE)
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TILEWRIGHT_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


MOVED = 64 * 48 * 4
ELEMENTS = 64 * 48


def test_explain_knows_what_they_move_and_compute(seen: dict[str, Any]) -> None:
    before = {target: counts for stage, target, *counts in seen["explained"] if stage == "before"}
    assert before["aten.heaviside.default"][:3] == [3 * MOVED, 2 * ELEMENTS, 0]
    assert before["tilewright.scratch_scale.default"][:3] == [2 * MOVED, ELEMENTS, 0]


def test_the_one_with_a_body_is_compiled_and_the_other_called(seen: dict[str, Any]) -> None:
    assert seen["fallbacks"] == []
    after = [target for stage, target, *_ in seen["explained"] if stage == "after"]
    assert after == ["kernel", "tilewright.scratch_scale.default"]
    assert [kind for _, kind in seen["launches"]] == after
    assert seen["launches"][0][0].endswith("_heaviside_exp")


def test_a_profile_and_a_trace_price_them(seen: dict[str, Any]) -> None:
    assert seen["profiled"] == [["aten::heaviside", 3 * MOVED, 2 * ELEMENTS, 0]]
    assert seen["priced"] == [2 * MOVED, ELEMENTS, "float32"]
