"""Draws logs of `train.py`: loss over steps, and tokens/s and MFU beside each other.

python -m examples.gpt.plot eager.jsonl inductor.jsonl tilewright.jsonl --out gpt.png
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import altair as alt

from examples.gpt.compare import Rows, lines, medians, read


def chart(runs: Mapping[str, Rows]) -> alt.HConcatChart:
    """Loss over steps with a line a run; bars of the median tokens/s and MFU."""
    colour = alt.Color("run:N", title=None)
    rows = [row | {"run": name} for name, found in runs.items() for row in found]
    curves = alt.Chart(alt.InlineData(values=rows)).mark_line(opacity=0.7)
    losses = curves.encode(x="step:Q", y=alt.Y("loss:Q", title="loss, nats a byte"), color=colour)
    rates = alt.Chart(alt.InlineData(values=medians(runs))).mark_bar()
    tokens = rates.encode(x=alt.X("run:N", title=None), y=alt.Y("tokens_per_s:Q", title="tokens/s"), color=colour)
    share = rates.encode(x=alt.X("run:N", title=None), y=alt.Y("mfu:Q", title="MFU"), color=colour)
    return losses.properties(width=420, height=260) | tokens.properties(width=120) | share.properties(width=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="PNG, SVG or HTML")
    given = parser.parse_args()
    runs = read(given.logs)
    chart(runs).save(str(given.out))
    print(*lines(runs), sep="\n")


if __name__ == "__main__":
    main()
