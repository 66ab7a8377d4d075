"""Every file of `benchmarks/` imports: none names what the package has renamed."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_imports(name: str) -> None:
    assert importlib.import_module(f"benchmarks.{name}").__doc__
