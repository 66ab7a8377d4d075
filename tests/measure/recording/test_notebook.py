"""The code of a notebook's cell is shown as that cell."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import duckdb
import pytest
import torch

import tilewright
from tilewright.graph.source import place_text

_FILE = "/tmp/ipykernel_17/99.py"
_CELL = """
def step(x):
    y = torch.tanh(x)
    return y @ y

for _ in range(3):
    step(x)
"""


def _name(file: str) -> tuple[str, str] | None:
    """As IPython's `CachingCompiler.format_code_name`."""
    return ("Cell", "In[3]") if file == _FILE else None


@pytest.fixture(autouse=True)
def _ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=_name))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_line_of_a_graph_is_in_a_cell() -> None:
    assert place_text(_FILE, 12, " y = x + 1") == "In [3]:12: y = x + 1"
    assert place_text("/home/ada/model.py", 12, "") == "model.py:12"


def test_every_view_of_a_profile_names_the_cell() -> None:
    with tilewright.profile(layers=False) as run:
        exec(compile(_CELL, _FILE, "exec"), {"torch": torch, "x": torch.randn(64, 64)})
    with duckdb.connect(str(run.path), read_only=True) as connection:
        found = connection.execute("SELECT source, operator FROM distance WHERE operator IN ('aten::mm', 'aten::tanh')")
        assert {*found.fetchall()} == {("In [3]:4", "aten::mm"), ("In [3]:3", "aten::tanh")}
        lines = connection.execute("SELECT DISTINCT source FROM host_cause WHERE class = 'operators'").fetchall()
        assert {("In [3]:3",), ("In [3]:4",)} <= {*lines}
        columns = connection.execute(
            "SELECT table_name, column_name FROM duckdb_columns() WHERE data_type = 'VARCHAR' AND NOT internal"
        ).fetchall()
        for table, column in columns:
            seen = connection.execute(
                f'SELECT "{column}" FROM "{table}" WHERE "{column}" LIKE \'%ipykernel%\''
            ).fetchall()
            assert seen == [], (table, column)
