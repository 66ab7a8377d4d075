"""The package: what the wheel holds, and that its version is said once."""

import re
import tomllib
from pathlib import Path, PurePosixPath

import tilewright

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
