"""Runs the fast tests under several installations of PyTorch: `python -m benchmarks.versions PYTHON…`.

Each PYTHON is an interpreter with a PyTorch and the other dependencies. What it passed is a line of
`results/versions.jsonl`, which replaces an older one of the same versions and device; `python -m benchmarks.tables`
writes the README's table from the file. With a GPU, `--gpu` runs the GPU's tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "versions.jsonl"
VERSIONS = """
import json, platform, torch, triton
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(json.dumps({"torch": torch.__version__.split("+")[0], "triton": triton.__version__,
                  "python": platform.python_version(), "device": device}))
"""
COUNT = re.compile(r"(\d+) (passed|failed|skipped|error)")


def counts(summary: str) -> dict[str, int]:
    """The counts in pytest's last line.

    >>> counts("1 failed, 717 passed, 3 skipped in 96.02s")
    {'failed': 1, 'passed': 717, 'skipped': 3}
    """
    return {what: int(number) for number, what in COUNT.findall(summary)}


def tested(python: str, arguments: Sequence[str]) -> dict[str, object]:
    """The line of one interpreter. Raises CalledProcessError where it has no PyTorch or no Triton."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    versions = subprocess.run([python, "-c", VERSIONS], env=env, check=True, capture_output=True, text=True).stdout
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *arguments]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = counts(lines[-1] if lines else "")
    row = json.loads(versions) | {
        "passed": found.get("passed", 0),
        "failed": failed,
        "skipped": found.get("skipped", 0),
    }
    return row | {"commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def keep(row: dict[str, object], path: Path = RESULTS) -> None:
    """Write the line, in place of one of the same versions and device."""
    rows = read(path)
    name = ("torch", "triton", "python", "device")
    rows = [old for old in rows if [old[key] for key in name] != [row[key] for key in name]] + [row]
    rows.sort(key=lambda one: (one["device"] != "CPU", [int(part) for part in re.findall(r"\d+", str(one["torch"]))]))
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")


def read(path: Path = RESULTS) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def versions(markdown: Callable[..., str]) -> str:
    """The README's table."""
    headings = ["PyTorch", "Triton", "Python", "on", "tests passed", "failed", "commit"]
    return markdown(
        headings,
        (
            [
                *(str(row[key]) for key in ("torch", "triton", "python", "device", "passed")),
                str(len(failed)),
                commit[:8],
            ]
            for row in read()
            if isinstance(failed := row["failed"], list) and isinstance(commit := row["commit"], str)
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--gpu", action="store_true", help="the tests that need a GPU, in place of the fast ones")
    given = parser.parse_args()
    arguments = ["-m", "gpu", "tests/gpu"] if given.gpu else ["-m", "not slow", "tests"]
    for python in given.pythons:
        row = tested(python, arguments)
        keep(row)
        print(f"torch {row['torch']}, Triton {row['triton']}, {row['device']}: {row['passed']} passed")
        for name in row["failed"] if isinstance(row["failed"], list) else ():
            print(f"  failed: {name}")


if __name__ == "__main__":
    main()
