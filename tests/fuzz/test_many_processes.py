"""`benchmarks/random_programs.py`: a process that crashes, hangs or raises costs one program, and each is named."""

import json
import os
import signal
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from benchmarks.random_programs import Outcome, Run

NAMES = ["right", "killed", "hangs", "raises", "hangs later", "exits", "right", "wrong", "refused"]


def planted(number: int, device: str) -> Iterator[Outcome]:
    name = NAMES[number]
    assert (device, os.environ["TILEWRIGHT_STRICT"]) == ("planted", "1")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "exits":
        os._exit(3)
    if name == "hangs later":
        yield "wrong", "whole"
    if name.startswith("hangs"):
        time.sleep(60)
    if name in ("right", "refused"):
        yield name, ""
    else:
        yield "raised" if name == "raises" else "wrong", "whole"
        yield "raised" if name == "raises" else "wrong", f"part of {name}"


def test_each_program_is_judged_and_each_failure_has_a_line(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = Namespace(device="planted", first=0, jobs=2, seconds=60, limit=3, out=out)
    run = Run(options, list(range(len(NAMES))), planted)
    run.programs()
    run.summary()
    *failures, summary = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["number"]: (row["kind"], row["message"]) for row in failures} == {
        1: ("crashed", "signal SIGKILL"),
        2: ("hung", "no result after 3 s"),
        3: ("raised", "part of raises"),
        4: ("wrong", "whole"),
        5: ("crashed", "exit code 3"),
        7: ("wrong", "part of wrong"),
    }
    counts = {"right": 2, "refused": 1, "crashed": 2, "hung": 1, "raised": 1, "wrong": 2, "not started": 0}
    assert {name: summary[name] for name in counts} == counts


def test_what_the_time_did_not_reach_is_counted(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run = Run(Namespace(device="planted", first=0, jobs=1, seconds=0, limit=60, out=out), [0, 0], planted)
    run.programs()
    run.summary()
    assert json.loads(out.read_text())["not started"] == 2
