"""`torch.compile(model, backend="tilewright")` finds the backend by the name that the package declares."""

import tomllib
from pathlib import Path

from tests.processes import ROOT, run

PROGRAM = """
import sys, torch
assert "tilewright" not in sys.modules
x = torch.randn(20, 30)
y = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="tilewright")(x)
torch.testing.assert_close(y, torch.softmax(x, -1) * 2)
assert "tilewright.backend" in sys.modules
"""


def test_the_installed_package_declares_the_backend(tmp_path: Path) -> None:
    """Metadata as pip writes them from pyproject.toml; the package is imported by PyTorch alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "tilewright-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tilewright\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    run(["-c", PROGRAM], path=[tmp_path])
