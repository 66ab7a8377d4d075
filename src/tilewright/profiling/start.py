"""What `tilewright profile -- python train.py` starts in the program's place: the recorder, then the program.

python -m tilewright.profiling.start train.py --lr 3
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tilewright.measure.profile import Plan, Recorder, Recording

PLAN = "TILEWRIGHT_PROFILE_PLAN"
FOLDER = "TILEWRIGHT_PROFILE_FOLDER"
STOP = "TILEWRIGHT_PROFILE_STOP"
RECORDING = "{}.recording.json"


def main() -> None:
    """Run the program that the command line names as Python would, and leave its trace in the folder."""
    plan, folder = Plan.from_json(os.environ.pop(PLAN)), Path(os.environ.pop(FOLDER))
    stop = bool(os.environ.pop(STOP, ""))
    name = f"rank{int(os.environ.get('RANK', '0')):05}"

    def kept(recording: Recording) -> None:
        # At once: the program may go on for hours, or be killed.
        _write(folder / RECORDING.format(name), recording)
        if stop and recording.trace:
            sys.exit(0)

    del sys.argv[0]
    recorder = Recorder(plan, folder, name=name, by_optimizer=True, kept=kept)
    recorder.start()
    try:
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        stop = False
        _write(folder / RECORDING.format(name), recorder.stop())


def _write(path: Path, recording: Recording) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(recording.as_json(), encoding="utf-8")
    partial.replace(path)


if __name__ == "__main__":
    main()
