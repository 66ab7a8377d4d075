"""The package: what the wheel holds, and that its version is said once."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

import setup
import tilewright
from benchmarks.contract import SMALL, check
from tests import processes
from tilewright import functional

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_every_file_that_is_no_python_is_package_data() -> None:
    """Sources of the executor and of kernels, SQL, templates and scripts would be missing from the wheel."""
    patterns = SETTINGS["tool"]["setuptools"]["package-data"]["tilewright"]
    suffixes = {pattern.removeprefix("**/*") for pattern in patterns}
    package = ROOT / "src" / "tilewright"
    files = [PurePosixPath(path.relative_to(package)) for path in package.rglob("*") if path.is_file()]
    others = [file for file in files if file.suffix not in (".py", ".pyc")]
    assert others and not [file for file in others if file.suffix not in suffixes and str(file) not in patterns]


def test_the_citation_names_the_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [tilewright.__version__]


def test_a_wheel_has_the_examples_and_the_runs_that_lessons_read(tmp_path: Path) -> None:
    setup.copy_examples(tmp_path)
    sources = {file.relative_to(ROOT) for file in (ROOT / "examples").rglob("*") if file.is_file()}
    copied = {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    assert {file for file in sources if "__pycache__" not in file.parts} <= copied
    lessons = (ROOT / "examples" / "lessons" / "catalogue.py").read_text("utf-8")
    recorded = {Path(f"benchmarks/results/h200/{name}.jsonl") for name in re.findall(r'recorded_\w+\("(\w+)"', lessons)}
    assert recorded and copied - sources == recorded
    source_distribution = (ROOT / "MANIFEST.in").read_text("utf-8")
    assert all(part in source_distribution for part in setup.PARTS)


PAIRS = [("fp32", False, True), ("fp32", True, False), ("bf16", False, False), ("bf16", True, True)]
"""Each two of dtype, training and contiguous operands in every combination."""


@pytest.mark.parametrize(("dtype", "training", "contiguous"), PAIRS)
@pytest.mark.parametrize("example", SMALL)
def test_example_keeps_the_numbers_contract(example: str, dtype: str, training: bool, contiguous: bool) -> None:
    verified = check(replace(SMALL[example](dtype), training=training), "cpu", contiguous)
    assert any(v.direction == "bwd" for v in verified) == training
    assert [v for v in verified if not v.ok] == []


def test_the_package_lists_what_it_offers() -> None:
    assert set(dir(tilewright)) == {*tilewright.__all__, "__version__"}
    assert tilewright.functional is functional and set(dir(functional)) == set(functional.__all__)
    assert all(getattr(tilewright, name) is not None for name in dir(tilewright))


@pytest.mark.parametrize("name", functional.__all__)
def test_every_name_is_a_documented_function(name: str) -> None:
    function = getattr(functional, name)
    assert callable(function)
    assert function.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sotfmax'"):
        _ = functional.sotfmax


@pytest.mark.parametrize("modules", ["tilewright.functional", "tilewright.store", "tilewright.report.page"])
def test_importing_loads_nothing_heavy(modules: str) -> None:
    heavy = "{'torch', 'duckdb', 'sympy', 'jinja2', 'triton', 'tilewright.kernels'} & set(sys.modules)"
    assert processes.run(["-c", f"import sys, {modules}; print(sorted({heavy}))"])[0] == "[]\n"
