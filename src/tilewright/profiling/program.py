"""Records an unmodified program: `python train.py`, or torchrun with all its ranks."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tilewright.measure.recording.recorder import Recording, RecordingPlan
from tilewright.profiling.compiled import merged
from tilewright.profiling.saved import SavedProfile, save
from tilewright.profiling.start import ASKED, FOLDER
from tilewright.records.errors import TargetError, UsageError

_STARTER = ["-m", "tilewright.profiling.start"]
# Prints the packages that the recorder imports and the program's Python lacks.
_LACKED = "import importlib.util as u; print(*(name for name in ('torch', 'tilewright') if u.find_spec(name) is None))"
# Python's options that take a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def profile_program(
    words: Sequence[str],
    plan: RecordingPlan,
    *,
    stop: bool = False,
    command: str = "tilewright.profile",
    tell: Callable[[str], None] = lambda _: None,
) -> SavedProfile | None:
    """Run `words` (`python train.py --lr 3`, `torchrun --nproc-per-node 2 train.py`) and make a run of its traces.

    An optimizer's step ends a step. Each rank writes a trace, and the run has all of them. With `stop` the program
    ends when its steps are recorded. The program's output is not redirected. Returns None with `plan.nvtx`, where
    Nsight Systems records. A program that fails or is interrupted keeps what was recorded of it; its exit code is the
    profile's.

    Raises UsageError (`words` start no Python program), TargetError (it cannot be started, or failed before anything
    was recorded, with its exit code), TraceError (it ended before recording began) or StoreError.
    """
    started = started_under_recorder(words)
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as folder:
        (Path(folder) / ASKED).write_bytes(pickle.dumps((plan, stop)))
        tell("running the program")
        code = _run(started, os.environ | {FOLDER: folder})
        # In the order of the ranks.
        recorded = [pickle.loads(path.read_bytes()) for path in sorted(Path(folder).glob("*.recorded"))]
        recordings: list[Recording] = [recording for recording, _ in recorded]
        if plan.nvtx and not code:
            return None
        # A shell's convention: 128 + the signal's number.
        code = 128 - code if code < 0 else code
        if code and not any(recording.trace for recording in recordings):
            failed = TargetError(f"{' '.join(words)} ended with exit code {code} before anything was recorded")
            failed.exit_code = code
            raise failed
        name = next((Path(word).stem for word in words if word.endswith(".py")), "program")
        program = merged([program for _, program in recorded])
        done = save(recordings, name=name, command=command, target=" ".join(words), program=program, tell=tell)
    return replace(done, exit_code=code)


def _run(started: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of a program under the recorder; TargetError if its Python lacks what the recorder imports."""
    try:
        if Path(started[0]).name != "torchrun":
            asking = [*started[: started.index("-m")], "-c", _LACKED]
            lacked = subprocess.run(asking, env=environment, capture_output=True, text=True, check=False).stdout.split()
            if lacked:
                raise TargetError(
                    f"{started[0]} cannot import {' and '.join(lacked)}, which recording needs: install what is "
                    f"missing there, or name a Python that has it, such as {sys.executable}"
                )
        with _first_interrupt_ignored():
            return subprocess.run(started, env=environment, check=False).returncode
    except OSError as error:
        raise TargetError(f"{started[0]} cannot be started: {error.strerror}") from error


@contextmanager
def _first_interrupt_ignored() -> Iterator[None]:
    """Ctrl-C in a terminal ends the program, whose recording is then saved; a second Ctrl-C ends this process too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A function, not SIG_IGN, which the program would inherit.
    before = signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, signal.default_int_handler))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def started_under_recorder(words: Sequence[str]) -> list[str]:
    """`words` with the recorder inserted before the program.

    >>> started_under_recorder(["torchrun", "--nproc-per-node=2", "train.py"])
    ['torchrun', '--nproc-per-node=2', '-m', 'tilewright.profiling.start', 'train.py']
    """
    launcher = Path(words[0]).name
    if launcher == "torchrun":
        return [words[0], *_torchrun(words[1:])]
    if not launcher.startswith("python") and Path(words[0]) != Path(sys.executable):
        raise UsageError(
            f"{words[0]} is neither python nor torchrun; write `tilewright profile -- python train.py`, "
            "or put `with tilewright.profile():` into the program"
        )
    position = 1
    while position < len(words) and words[position].startswith("-") and words[position] not in ("-m", "-c", "-"):
        position += 2 if words[position] in _WITH_VALUE else 1
    rest = list(words[position:])
    if rest[:2] == ["-m", "torch.distributed.run"]:
        return [*words[:position], *rest[:2], *_torchrun(rest[2:])]
    if not rest or rest[0] in ("-c", "-"):
        raise UsageError("profile a file or a module: `tilewright profile -- python train.py`")
    return [*words[:position], *_STARTER, *rest]


def _torchrun(words: Sequence[str]) -> list[str]:
    """Insert the recorder before the program, which torchrun's own parser finds."""
    from torch.distributed.run import get_args_parser

    taken = get_args_parser().parse_args(list(words))
    if taken.no_python:
        raise UsageError("with --no-python, put `with tilewright.profile():` into the program instead")
    program = [taken.training_script, *taken.training_script_args]
    before = list(words[: len(words) - len(program)])
    if taken.module:
        # -m or --module is among torchrun's options, so the recorder's module takes the program's place.
        return [*before, _STARTER[1], "-m", *program]
    return [*before, *_STARTER, *program]
