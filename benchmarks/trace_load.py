"""How fast a trace becomes a run: wall and processor seconds, memory, size, and the first questions after.

    python -m benchmarks.trace_load [--megabytes 300 1000] [--repeats 5] [--since-1970] [--out FILE]

The trace is synthetic (`benchmarks.synthetic_trace`). Each load is a process of its own, as `tilewright trace` is,
and is timed from its first to its last instruction; the page cache holds the trace. `load` is the schema alone,
`trace` the whole verb, accounting of time included. Medians; the spread is the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

from benchmarks import synthetic_trace
from tilewright.store import latest_run, query
from tilewright.store.query import reading

AGGREGATE = "SELECT name, count(*), sum(dur) FROM slice GROUP BY name ORDER BY sum(dur) DESC LIMIT 10"
LOAD = """
import sys
from pathlib import Path
from tilewright.store import Run, new_run_path
from tilewright.trace import load_traces
with Run.create(new_run_path("bench"), command="bench", target=sys.argv[1], case="bench") as run:
    load_traces([Path(sys.argv[1])], run.connection)
"""
COMMANDS = {"load": ["-c", LOAD], "trace": ["-m", "tilewright.cli", "trace", "--quiet"]}


@dataclass(frozen=True)
class Result:
    """Seconds, except where the name says otherwise."""

    what: str
    megabytes: float
    events: int
    repeats: int
    wall: float
    fastest: float
    slowest: float
    cpu: float
    peak_megabytes: float
    run_megabytes: float
    reopen: float
    aggregate: float
    load_average: float
    processors: int
    date: str


def measure(what: str, path: Path, events: int, repeats: int) -> Result:
    """Load `path` as often as told; each time a new run in the home of this process."""
    walls, cpus, peaks = [], [], []
    for _ in range(repeats):
        began = time.perf_counter()
        child = subprocess.Popen([sys.executable, *COMMANDS[what], str(path)], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        walls.append(time.perf_counter() - began)
        if status:
            raise SystemExit(f"loading failed: {status}")
        cpus.append(usage.ru_utime + usage.ru_stime)
        peaks.append(usage.ru_maxrss / 1e3)
    run = latest_run()
    return Result(
        what=what,
        megabytes=round(path.stat().st_size / 1e6),
        events=events,
        repeats=repeats,
        wall=round(median(walls), 2),
        fastest=round(min(walls), 2),
        slowest=round(max(walls), 2),
        cpu=round(median(cpus), 2),
        peak_megabytes=round(max(peaks)),
        run_megabytes=round(run.stat().st_size / 1e6),
        reopen=round(_reopened(run), 4),
        aggregate=round(_asked(run), 4),
        load_average=round(os.getloadavg()[0], 1),
        processors=len(os.sched_getaffinity(0)),
        date=date.today().isoformat(),
    )


def _reopened(run: Path) -> float:
    """The median time of opening the run and asking one small question."""
    times = []
    for _ in range(9):
        began = time.perf_counter()
        query(run, "SELECT count(*) FROM slice")
        times.append(time.perf_counter() - began)
    return median(times)


def _asked(run: Path) -> float:
    """The median time of the aggregate query on an open run."""
    times = []
    with reading(run) as connection:
        for _ in range(9):
            began = time.perf_counter()
            connection.execute(AGGREGATE).fetchall()
            times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[300, 1000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--since-1970", action="store_true", help="times of the calendar, with fractions")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TILEWRIGHT_HOME"] = folder
        results = []
        for megabytes in given.megabytes:
            path = Path(folder) / f"{megabytes:g}.json"
            events = sum(synthetic_trace.write(path, megabytes, since_1970=given.since_1970).values())
            for what in COMMANDS:
                results.append(measure(what, path, events, given.repeats))
                print(json.dumps(asdict(results[-1])), flush=True)
            path.unlink()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text("".join(json.dumps(asdict(result)) + "\n" for result in results))


if __name__ == "__main__":
    main()
