"""The module that `tilewright profile -- python train.py` runs: it starts the recorder, then the program.

python -m tilewright.profiling.start train.py --lr 3
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewright.measure.recording.plan import Recording

FOLDER = "TILEWRIGHT_PROFILE_FOLDER"
"""The variable that names the folder through which both processes exchange files."""
ASKED = "asked"
"""File: a pickled `RecordingPlan`, and whether the program ends once its steps are recorded."""
RECORDED = "rank{:05}.recorded"
"""File of each process: its pickled `Recording` and `Program`, and the number of processes."""


def main() -> None:
    """Run the program of the command line as Python would, and write its trace to the folder."""
    del sys.argv[0]
    _check(sys.argv)
    # Here, so that neither the process that starts this one, and imports the names above, imports PyTorch, nor one that
    # has nothing to run. The compiler is imported by programs that compile.
    from tilewright.compile.recording import recording as compilations
    from tilewright.measure.recording.recorder import Recorder
    from tilewright.profiling.compiled import program_of
    from tilewright.profiling.regions import marked_regions

    folder, process = Path(os.environ.pop(FOLDER)), os.getpid()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    plan, stop = pickle.loads((folder / ASKED).read_bytes())

    def kept(recording: Recording) -> None:
        # Write now: the program may run on for hours, or be killed.
        keep(recording)
        if stop and recording.trace:
            sys.exit(0)

    def keep(recording: Recording) -> None:
        if os.getpid() != process:
            return
        path = folder / RECORDED.format(rank)
        partial = path.with_suffix(".partial")
        partial.write_bytes(pickle.dumps((recording, program_of(record), ranks)))
        partial.replace(path)

    sys.excepthook = _of_the_program
    recorder = Recorder(plan, folder, name=f"rank{rank:05}", by_optimizer=True, by_calls=True, kept=kept)
    with compilations() as record, marked_regions(recorder):
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
            with _uninterrupted():
                keep(recorder.stop())


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Another Ctrl-C waits, and what fails is said and changes nothing of how the program ends."""
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if on_main else None
    try:
        yield
    except Exception as error:
        print(f"tilewright: the recording is not kept: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        if before is not None:
            signal.signal(signal.SIGINT, before)


def _check(words: list[str]) -> None:
    """End as Python does where there is no such program."""
    if words[0] == "-m":
        try:
            found = importlib.util.find_spec(words[1]) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            sys.exit(f"{sys.executable}: No module named {words[1]}")
    elif not Path(words[0]).exists():
        print(f"{sys.executable}: can't open file {words[0]!r}: No such file or directory", file=sys.stderr)
        sys.exit(2)


def _of_the_program(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback without the frames that started the program."""
    while trace and trace.tb_frame.f_code.co_filename.startswith((__file__, "<frozen runpy>")):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    main()
