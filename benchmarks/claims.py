"""Writes docs/claims.md and docs/zh/claims.md from the result files: `python -m benchmarks.claims`.

They are measured by

    tilewright claims --device cuda --out benchmarks/results/h200/claims.jsonl
    tilewright claims --device cpu --out benchmarks/results/cpu/claims.jsonl

The Chinese page has the measured values as the command prints them; all other words are in `claims_in_chinese.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tables import markdown
from examples.claims.check import Row, documents, read_rows
from examples.claims.claim import TOLERANCE

ROOT = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
CHINESE = PAGE.parent / "zh" / PAGE.name
DEVICES = ("h200", "cpu")
INTRODUCTION = """# Claims of the reference documents

tilewright was asked to implement what five documents on GPUs and PyTorch describe. Each of their claims, in our words,
is checked here by a command:

```
tilewright claims --only H37          # one, or a pattern: "V*"
tilewright claims --device cpu        # all that a CPU can check
```

A verdict follows from values that the run computes, by four rules:

- A statement, count, name or shape is **reproduced** if it is true or equal, else **refuted**.
- A ratio, share or derived figure is reproduced within {tolerance} of the document's.
- An order of times is reproduced if each median lies outside its neighbours' 20th to 80th percentiles, refuted if the
  order is the reverse, and **undecided** between.
- An absolute figure of another machine cannot be reproduced on this one: its **direction holds** if the order or sign
  that it shows does.

What a device cannot check is **not here**. The claims and their checks are in `examples/claims`; this page is written
by `python -m benchmarks.claims`.
"""


@dataclass(frozen=True)
class Language:
    """The words of a page. What `verdicts`, `documents` and `claims` leave out is in the rows' own words."""

    introduction: str
    verdict: str
    columns: tuple[str, str, str, str]
    """Headings of a claim's number, its text, the document's figure and what decides it."""
    machine: str
    threads: str
    comma: str
    colon: str
    verdicts: Mapping[str, str]
    documents: Mapping[str, Sequence[str]]
    """Title and machine of a document."""
    claims: Mapping[str, Sequence[str]]
    """Of a claim its text, the document's figure, and what decides it."""


ENGLISH = Language(
    INTRODUCTION,
    "verdict",
    ("id", "claim", "theirs", "what decides it"),
    "Their machine: {}.",
    ", threads: {}",
    ", ",
    ": ",
    {},
    {},
    {},
)


def chinese() -> Language:
    words = json.loads((Path(__file__).parent / "claims_in_chinese.json").read_text(encoding="utf-8"))
    return Language(**words | {"columns": tuple(words["columns"])})


def page(found: Mapping[str, Sequence[Row]], words: Language = ENGLISH) -> str:
    """The page, from the rows of each device."""
    introduction = words.introduction.format(tolerance=f"{TOLERANCE:.0%}")
    tables = (_document(title, found, words) for title in _titles())
    return "\n".join([introduction, _summary(found, words), *tables])


def _titles() -> list[str]:
    return [document.title for document in documents()]


def _summary(found: Mapping[str, Sequence[Row]], words: Language) -> str:
    counts = {device: Counter(row.verdict for row in rows) for device, rows in found.items()}
    verdicts = dict.fromkeys(row.verdict for rows in found.values() for row in rows)
    headings = [words.verdict, *(_where(device, rows[0], words) for device, rows in found.items())]
    rows = ([words.verdicts.get(name, name), *(str(of[name]) for of in counts.values())] for name in verdicts)
    return markdown(headings, rows)


def _where(device: str, row: Row, words: Language) -> str:
    threads = words.threads.format(row.threads) if device == "cpu" else ""
    return words.comma.join([f"{device}{words.colon}{row.device}{threads}", f"torch {row.torch}", row.date])


def _document(title: str, found: Mapping[str, Sequence[Row]], words: Language) -> str:
    rows = {device: {row.id: row for row in of if row.document == title} for device, of in found.items()}
    first = next(iter(rows.values()))
    title, machine = words.documents.get(title, (title, next(iter(first.values())).machine))
    number, text, theirs, why = words.columns
    lines = []
    for id_, row in first.items():
        said, figure, decided = words.claims.get(id_, (row.claim, row.theirs, row.why))
        here = (_cell(of[id_], words) for of in rows.values())
        lines.append([id_, _plain(said), _plain(figure), *here, _plain(decided)])
    table = markdown([number, text, theirs, *found, why], lines)
    return f"## {title}\n\n{words.machine.format(machine)}\n\n{table}"


def _cell(row: Row, words: Language) -> str:
    verdict = words.verdicts.get(row.verdict, row.verdict)
    return verdict if row.verdict == "not here" else f"**{verdict}**{words.colon}{_plain(row.ours)}"


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
    for path, words in ((PAGE, ENGLISH), (CHINESE, chinese())):
        path.write_text(page(results(), words), encoding="utf-8")


if __name__ == "__main__":
    main()
