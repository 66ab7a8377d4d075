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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.profiling.compiled import merged
from tilewright.profiling.saved import SavedProfile, save
from tilewright.profiling.start import ASKED, FOLDER
from tilewright.records.errors import TargetError, TilewrightError, UsageError
from tilewright.records.program import Program

_LOOK_SECONDS = 1.0
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
    early: Callable[[SavedProfile], None] = lambda _: None,
) -> SavedProfile | None:
    """Run `words` (`python train.py --lr 3`, `torchrun --nproc-per-node 2 train.py`) and make a run of its traces.

    `StepEnds` says what ends a step. Each rank writes a trace, and the run has all of them. With `stop` the program
    ends when its steps are recorded; without, if it runs on, the run is saved then and given to `early`. The program's
    output is not redirected. Returns None with `plan.nvtx`, where Nsight Systems records. A program that fails or is
    interrupted keeps what was recorded of it; its exit code is the profile's.

    Raises UsageError (`words` start no Python program), TargetError (it cannot be started, or failed before anything
    was recorded, with its exit code), TraceError (it ended before recording began) or StoreError.
    """
    started = started_under_recorder(words)
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as given:
        folder, saved = Path(given), list[SavedProfile]()
        (folder / ASKED).write_bytes(pickle.dumps((plan, stop)))

        def saved_run() -> SavedProfile:
            recorded = _recorded(folder)
            name = next((Path(word).stem for word in words if word.endswith(".py")), "program")
            program = merged([program for _, program, _ in recorded])
            recordings = [recording for recording, _, _ in recorded]
            return save(recordings, name=name, command=command, target=" ".join(words), program=program, tell=tell)

        def while_it_runs() -> bool:
            if plan.nvtx or stop or not _is_complete(folder):
                return False
            # What fails here is raised when the program has ended.
            with suppress(TilewrightError):
                saved.append(saved_run())
                early(saved[0])
            return True

        tell("running the program")
        code = _run(started, os.environ | {FOLDER: given}, while_it_runs)
        if plan.nvtx and not code:
            return None
        # A shell's convention: 128 + the signal's number.
        code = 128 - code if code < 0 else code
        if not saved and code and not any(recording.trace for recording, _, _ in _recorded(folder)):
            failed = TargetError(f"{' '.join(words)} ended with exit code {code} before anything was recorded")
            failed.exit_code = code
            raise failed
        try:
            return replace(saved[0] if saved else saved_run(), exit_code=code)
        except TilewrightError as failure:
            failure.exit_code = code or failure.exit_code
            raise


def measure_missing_ceilings(tell: Callable[[str], None]) -> None:
    """Measure and keep this CPU's ceilings, some seconds, if none are kept for it with this number of threads.

    Not a GPU's, since this process would then hold memory of it while the program runs.
    """
    from tilewright.hardware.ceilings import device_name, kept_ceilings
    from tilewright.hardware.detect import detect
    from tilewright.hardware.profiles import local_profile

    machine = detect()
    if not machine.gpus and not kept_ceilings(device_name(machine, "cpu")):
        tell("measuring this machine's ceilings, once")
        local_profile(device="cpu")


def _recorded(folder: Path) -> list[tuple[Recording, Program, int]]:
    """What each process has recorded, in the order of the ranks, and the number of processes."""
    return [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.recorded"))]


def _is_complete(folder: Path) -> bool:
    """Whether all processes have recorded their steps."""
    found = len(list(folder.glob("*.recorded")))
    return bool(found) and all(it.trace and found >= processes for it, _, processes in _recorded(folder))


def _run(started: Sequence[str], environment: Mapping[str, str], while_it_runs: Callable[[], bool]) -> int:
    """The exit code of a program under the recorder; calls `while_it_runs` until that returns True.

    Raises TargetError if its Python lacks what the recorder imports.
    """
    try:
        if Path(started[0]).name != "torchrun":
            asking = [*started[: started.index("-m")], "-c", _LACKED]
            lacked = subprocess.run(asking, env=environment, capture_output=True, text=True, check=False).stdout.split()
            if lacked:
                raise TargetError(
                    f"{started[0]} cannot import {' and '.join(lacked)}, which recording needs: install what is "
                    f"missing there, or name a Python that has it, such as {sys.executable}"
                )
        with subprocess.Popen(started, env=environment) as process, _interrupts_reach(process):
            ended = False
            while not ended:
                try:
                    return process.wait(_LOOK_SECONDS)
                except subprocess.TimeoutExpired:
                    ended = while_it_runs()
            return process.wait()
    except OSError as error:
        raise TargetError(f"{started[0]} cannot be started: {error.strerror}") from error


@contextmanager
def _interrupts_reach(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """The first SIGINT ends the program, whose recording is then saved; a second one ends this process too.

    A terminal sends Ctrl-C to both processes; a signal to this one alone is passed on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not _in_foreground():
            process.send_signal(signal.SIGINT)

    # A function, not SIG_IGN, which the program would inherit.
    before = signal.signal(signal.SIGINT, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process."""
    try:
        with open("/dev/tty") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


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
