"""Where a Transformer training step goes, how much of that is known, and what it costs to find out.

    python -m benchmarks.accounting --out benchmarks/results/h200/accounting.jsonl

One line of JSON an implementation. Each is profiled on the GPU as `tilewright profile` does it, with AdamW:
`classes_ms` is the mean step by class, `known_percent` the share of the device's time that is attributed to an
operator, a source line, bytes and FLOPs, and a verdict. `bare_ms` and `recorded_ms` are a step on the wall clock
without and with the recording, medians of several recordings; `overhead_percent` has the quartiles of what each cost.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import torch

from tilewright.case_names import load_case
from tilewright.hardware.ceilings import device_name
from tilewright.hardware.detect import detect
from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.measure.recording.recorder import Recorder
from tilewright.profiling.saved import SavedProfile
from tilewright.profiling.steps import IMPLS, profile_case, step_of
from tilewright.records.case import Case
from tilewright.store.query import reading
from tilewright.verbs import Subject

_TARGET = f"{Path(__file__).parents[1] / 'examples' / 'transformer_block.py'}:block_large"
_OPTIMIZER = "adamw"


def account(done: SavedProfile) -> dict[str, object]:
    """The accounting of one profile."""
    with reading(done.run) as connection:
        classes = connection.execute("SELECT class, ms_per_step, steps FROM step_account").fetchall()
        known = connection.execute("SELECT what, percent FROM attribution ORDER BY what").fetchall()
        sums = connection.execute("SELECT sum(percent) FROM accounting GROUP BY step_ts").fetchall()
        lost = connection.execute("SELECT count(*) FROM loss").fetchall()
    return {
        "steps": classes[0][2] if classes else 0,
        "step_ms": round(sum(ms for _, ms, _ in classes), 4),
        "classes_ms": {name: round(ms, 4) for name, ms, _ in classes},
        "adds_up_to_percent": [round(pick(percent for (percent,) in sums), 6) for pick in (min, max)],
        "known_percent": {name: round(value, 2) for name, value in known},
        "losses": lost[0][0],
    }


def recordings(case: Case, impl: str, device: str, steps: int, repeats: int) -> list[Recording]:
    """Several recordings of one program, each of bare steps and of as many recorded ones; the first is a warm-up."""
    subject = Subject(case, device)
    subject.call(impl)
    found = []
    for _ in range(repeats + 1):
        with TemporaryDirectory() as folder:
            recorder = Recorder(RecordingPlan(wait=steps + 1, active=steps), Path(folder))
            step = step_of(subject, impl, _OPTIMIZER, recorder)
            recorder.start()
            while not recorder.done:
                step()
                recorder.step()
            found.append(recorder.stop())
    return found[1:]


def overhead(found: Sequence[Recording]) -> dict[str, object]:
    times = [(it.bare_us, it.recorded_us) for it in found if it.bare_us and it.recorded_us]
    more = [100 * (recorded / bare - 1) for bare, recorded in times]
    return {
        "bare_ms": round(median(bare for bare, _ in times) / 1e3, 4),
        "recorded_ms": round(median(recorded for _, recorded in times) / 1e3, 4),
        "overhead_percent": [round(value, 1) for value in quantiles(more, n=4)],
        "recordings": len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    where = {"device": device_name(detect(), "cuda"), "torch": str(torch.__version__), "date": str(date.today())}
    case = load_case(_TARGET)
    lines = []
    for impl in IMPLS:
        done = profile_case(case, RecordingPlan(active=asked.steps), impl=impl, optimizer=_OPTIMIZER, device="cuda")
        assert done is not None, "no NVTX was asked for"
        cost = overhead(recordings(case, impl, "cuda", asked.steps, asked.repeats))
        lines.append(json.dumps({"case": case.name, "impl": impl} | account(done) | cost | where))
        print(lines[-1], flush=True)
    if asked.out:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
