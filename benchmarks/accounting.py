"""Where recorded training steps went, one line of JSON a trace.

    python -m benchmarks.accounting tests/trace/fixtures/block_*.json.gz [--out FILE]

`classes_ms` is the mean step by class, `known_percent` the share of the device's time that is attributed to an
operator, a source line, bytes and FLOPs, and a verdict.
"""

from __future__ import annotations

import argparse
import json
from importlib.resources import files
from pathlib import Path

import duckdb

from tilewright.trace import analyse, load_traces


def account(path: Path) -> dict[str, object]:
    """The accounting of one trace."""
    connection = duckdb.connect()
    connection.execute(files("tilewright.store").joinpath("schema.sql").read_text("utf-8"))
    load_traces([path], connection)
    analyse(connection)
    device = connection.execute(
        "SELECT str_value::JSON->>'$[0].name' FROM metadata WHERE name = 'deviceProperties'"
    ).fetchone()
    classes = connection.execute(
        "SELECT class, ms_per_step, steps FROM step_account ORDER BY ms_per_step DESC, class"
    ).fetchall()
    known = connection.execute("SELECT what, percent FROM attribution ORDER BY what").fetchall()
    percent = connection.execute(
        "SELECT min(p), max(p) FROM (SELECT sum(percent) AS p FROM accounting GROUP BY step_ts)"
    )
    return {
        "trace": path.name,
        "device": device[0] if device else None,
        "steps": classes[0][2] if classes else 0,
        "step_ms": round(sum(ms for _, ms, _ in classes), 4),
        "classes_ms": {name: round(ms, 4) for name, ms, _ in classes},
        "adds_up_to_percent": [round(value, 6) for value in percent.fetchone() or ()],
        "known_percent": {name: round(value, 2) for name, value in known},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    lines = [json.dumps(account(path)) for path in asked.traces]
    print("\n".join(lines))
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
