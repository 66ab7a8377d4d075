"""Compares logs of `train.py`: rates, and how far each loss curve is from eager's.

    python -m examples.gpt.train --backend eager --draws 1 --curve eager_again.jsonl
    python -m examples.gpt.compare eager.jsonl eager_again.jsonl inductor.jsonl tilewright.jsonl

The distance of two curves is that of the means of `WINDOW` steps, where they are farthest apart, over the steps that
both have. Eager runs that differ in dropout's seed alone (`--draws`) say how far apart curves may be: a run is within
their spread if it is no farther from the nearest of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

WINDOW = 50
"""Steps whose losses are averaged."""
FIRST = 10
"""Steps that compile and warm up; rates leave them out."""
RATES = ("tokens_per_s", "mfu")
Rows = list[dict[str, Any]]


def read(logs: Iterable[Path]) -> dict[str, Rows]:
    """The rows of each log by the name of its file, without its ending."""
    return {log.stem: [json.loads(line) for line in log.read_text().splitlines()] for log in logs}


def medians(runs: Mapping[str, Rows]) -> list[dict[str, Any]]:
    """Median tokens/s and MFU of each run after its first steps."""
    found = []
    for name, rows in runs.items():
        later = rows[FIRST:] or rows
        found.append({"run": name} | {key: statistics.median(row[key] for row in later) for key in RATES})
    return found


def distance(a: Rows, b: Rows) -> float:
    """How far two curves are apart where they are farthest, in nats.

    >>> ten = [{"step": step, "loss": 4.0} for step in range(10)]
    >>> distance(ten, [row | {"loss": 3.5} for row in ten[5:]])
    0.5
    """
    first, second = ({row["step"]: row["loss"] for row in rows} for rows in (a, b))
    common = sorted(first.keys() & second.keys())
    windows = [common[start : start + WINDOW] for start in range(0, len(common), WINDOW)]
    return max(abs(statistics.fmean(first[step] - second[step] for step in window)) for window in windows)


def lines(runs: Mapping[str, Rows]) -> list[str]:
    """A line a run: its rates, last losses, peak memory, and distance from the nearest other eager run."""
    eager = {name: rows for name, rows in runs.items() if rows[0]["backend"] == "eager"}
    found = []
    for rates, (name, rows) in zip(medians(runs), runs.items(), strict=True):
        apart = [distance(rows, other) for place, other in eager.items() if place != name]
        validation = [row["validation_loss"] for row in rows if "validation_loss" in row]
        found.append(
            f"{name:16} {len(rows):5} steps  {rates['tokens_per_s']:11,.0f} tokens/s  MFU {rates['mfu']:.3f}"
            f"  loss {statistics.fmean(row['loss'] for row in rows[-WINDOW:]):.4f}"
            f"  validation {validation[-1] if validation else float('nan'):.4f}  peak {rows[-1]['peak_MiB']:.0f} MiB"
            + (f"  from eager {min(apart):.4f}" if apart else "")
        )
    pairs = [distance(a, b) for a, b in combinations(eager.values(), 2)]
    return found + ([f"eager runs are {max(pairs):.4f} nats apart"] if pairs else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    print(*lines(read(parser.parse_args().logs)), sep="\n")


if __name__ == "__main__":
    main()
