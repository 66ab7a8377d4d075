"""Draws logs of `train.py`: loss over steps, and tokens/s and MFU beside each other.

python -m examples.gpt.plot eager.jsonl inductor.jsonl tilewright.jsonl --out gpt.png
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

FIRST = 10
"""Steps that compile and warm up; rates leave them out."""


def chart(rows: Sequence[dict[str, Any]]) -> alt.HConcatChart:
    """Loss over steps with a line a backend; bars of the median tokens/s and MFU."""
    colour = alt.Color("backend:N", title=None)
    curves = alt.Chart(alt.InlineData(values=list(rows))).mark_line(opacity=0.7)
    losses = curves.encode(x="step:Q", y=alt.Y("loss:Q", title="loss, nats a byte"), color=colour)
    rates = alt.Chart(alt.InlineData(values=medians(rows))).mark_bar()
    tokens = rates.encode(x=alt.X("backend:N", title=None), y=alt.Y("tokens_per_s:Q", title="tokens/s"), color=colour)
    share = rates.encode(x=alt.X("backend:N", title=None), y=alt.Y("mfu:Q", title="MFU"), color=colour)
    return losses.properties(width=420, height=260) | tokens.properties(width=120) | share.properties(width=120)


def medians(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median tokens/s and MFU of each backend after its first steps."""
    found = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        mine = mine[FIRST:] or mine
        rates = {key: statistics.median(row[key] for row in mine) for key in ("tokens_per_s", "mfu")}
        found.append({"backend": backend} | rates)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or HTML")
    given = parser.parse_args()
    rows = [json.loads(line) for log in given.logs for line in log.read_text().splitlines()]
    chart(rows).save(str(given.out))
    for found in medians(rows):
        print(f"{found['backend']:11} {found['tokens_per_s']:12,.0f} tokens/s   MFU {found['mfu']:.3f}")


if __name__ == "__main__":
    main()
