"""Puts the examples into the wheel: lessons, claims and the bench run them. Other settings are in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PARTS = ("examples", "benchmarks/results/h200/gelu.jsonl", "benchmarks/results/h200/softmax.jsonl")
"""What a wheel has beside the package's own files; lessons read the recorded runs. MANIFEST.in lists the same."""


def copy_examples(package: Path) -> None:
    """Copy `PARTS` into the folder of the package, where they have the same paths as in the repository."""
    for part in PARTS:
        source, target = ROOT / part, package / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)


class BuildWithExamples(build_py):
    """An editable installation reads them in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            copy_examples(Path(self.build_lib) / "tilewright")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithExamples})
