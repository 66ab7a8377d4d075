"""Writes docs/claims.md from the result files: `python -m benchmarks.claims`.

They are measured by

    tilewright claims --device cuda --out benchmarks/results/h200/claims.jsonl
    tilewright claims --device cpu --out benchmarks/results/cpu/claims.jsonl
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.tables import markdown
from examples.claims.check import Row, documents, read_rows
from examples.claims.claim import TOLERANCE

ROOT = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
DEVICES = ("h200", "cpu")
INTRODUCTION = f"""# Claims of the reference documents

tilewright was asked to implement what five documents on GPUs and PyTorch describe. Each of their claims, in our words,
is checked here by a command:

```
tilewright claims --only H37          # one, or a pattern: "V*"
tilewright claims --device cpu        # all that a CPU can check
```

A verdict follows from values that the run computes, by four rules:

- A statement, count, name or shape is **reproduced** if it is true or equal, else **refuted**.
- A ratio, share or derived figure is reproduced within {TOLERANCE:.0%} of the document's.
- An order of times is reproduced if each median lies outside its neighbours' 20th to 80th percentiles, refuted if the
  order is the reverse, and **undecided** between.
- An absolute figure of another machine cannot be reproduced on this one: its **direction holds** if the order or sign
  that it shows does.

What a device cannot check is **not here**. The claims and their checks are in `examples/claims`; this page is written
by `python -m benchmarks.claims`.
"""


def page(found: Mapping[str, Sequence[Row]]) -> str:
    """The page, from the rows of each device."""
    return "\n".join([INTRODUCTION, _summary(found), *(_document(title, found) for title in _titles())])


def _titles() -> list[str]:
    return [document.title for document in documents()]


def _summary(found: Mapping[str, Sequence[Row]]) -> str:
    counts = {device: Counter(row.verdict for row in rows) for device, rows in found.items()}
    verdicts = dict.fromkeys(row.verdict for rows in found.values() for row in rows)
    headings = ["verdict", *(_where(device, rows[0]) for device, rows in found.items())]
    return markdown(headings, ([verdict, *(str(of[verdict]) for of in counts.values())] for verdict in verdicts))


def _where(device: str, row: Row) -> str:
    threads = f", threads: {row.threads}" if device == "cpu" else ""
    return f"{device}: {row.device}{threads}, torch {row.torch}, {row.date}"


def _document(title: str, found: Mapping[str, Sequence[Row]]) -> str:
    rows = {device: {row.id: row for row in of if row.document == title} for device, of in found.items()}
    first = next(iter(rows.values()))
    machine = next(iter(first.values())).machine
    table = markdown(
        ["id", "claim", "theirs", *found, "what decides it"],
        (
            [id_, *map(_plain, (row.claim, row.theirs)), *(_cell(of[id_]) for of in rows.values()), _plain(row.why)]
            for id_, row in first.items()
        ),
    )
    return f"## {title}\n\nTheir machine: {machine}.\n\n{table}"


def _cell(row: Row) -> str:
    if row.verdict == "not here":
        return row.verdict
    return f"**{row.verdict}**: {_plain(row.ours)}"


def _plain(text: str) -> str:
    """Names of kernels and formulas have characters that Markdown reads."""
    for sign in "\\|*_<":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def results() -> dict[str, list[Row]]:
    """The rows of each device that was measured."""
    files = {device: ROOT / device / "claims.jsonl" for device in DEVICES}
    return {device: read_rows(path) for device, path in files.items() if path.exists()}


def main() -> None:
    PAGE.write_text(page(results()), encoding="utf-8")


if __name__ == "__main__":
    main()
