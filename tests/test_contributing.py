"""The table of rooms in CONTRIBUTING.md has the order that import-linter checks."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_printed_order_is_the_checked_one() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    highest_first = [layer.strip("()") for layer in contract["layers"]]
    printed = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.M)
    assert printed == highest_first[::-1]
