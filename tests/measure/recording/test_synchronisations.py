"""Marks of synchronisations, with CUDA's warnings played by Python's: the lines are real, the waits are not."""

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tilewright.measure.recording.compilation import Replacements
from tilewright.measure.recording.ranges import Marker
from tilewright.measure.recording.synchronisations import MARK, marked_synchronisations

MESSAGE = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:159.)"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A CUDA whose sync debug mode is only remembered; what it was set to, in order."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield modes


def marks(run: Callable[[], object]) -> list[str]:
    """The places that `run` was marked at."""
    names: list[str] = []
    with marked_synchronisations(into(names), Replacements()):
        run()
    return [name.removeprefix(MARK) for name in names if name.startswith(MARK)]


def into(names: list[str]) -> Marker:
    """A marker that keeps the names of its ranges."""

    def mark(name: str) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    return mark


def waits() -> None:
    warnings.warn(MESSAGE, UserWarning, stacklevel=1)


def line_within(function: Callable[[], object], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    offset = next(number for number, line in enumerate(lines) if text in line)
    return f"{Path(__file__).relative_to(Path.cwd())}:{first + offset}"


def test_the_line_and_not_that_of_the_def(cuda: list[object]) -> None:
    def step() -> None:
        value = 1
        value += 1
        torch.cuda.synchronize()

    assert marks(step) == [line_within(step, "torch.cuda.synchronize()")]


def test_an_operator_that_warns_each_time(cuda: list[object]) -> None:
    def loop() -> None:
        for _ in range(3):
            waits()

    # The warning's own frame is the test's `waits`: as innermost frame of the user's it is the place.
    assert marks(loop) == 3 * [line_within(waits, "warnings.warn")]
    assert cuda == [0, "warn", 0]


def test_a_frame_of_the_standard_library_is_not_the_users(
    cuda: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging` formats a tensor: the line is the one that logs."""

    class Tensor:
        def __str__(self) -> str:
            torch.cuda.synchronize()
            return "1.0"

    # Its text is made by a function that seems to be PyTorch's.
    code = Tensor.__str__.__code__.replace(co_filename=str(Path(torch.__file__).parent / "_tensor.py"))
    monkeypatch.setattr(Tensor, "__str__", type(Tensor.__str__)(code, globals()))
    logger = logging.Logger("quiet")
    with open(os.devnull, "w") as null:
        logger.addHandler(logging.StreamHandler(null))

        def log() -> None:
            logger.warning("loss %s", Tensor())

        assert marks(log) == [line_within(log, "logger.warning")]


def test_other_warnings_are_shown_as_ever(cuda: list[object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with marked_synchronisations(into([]), Replacements()):
            warnings.warn("something else", UserWarning, stacklevel=1)
            waits()
    assert [str(warning.message) for warning in caught] == ["something else"]


def test_a_mode_that_the_user_set_stays(cuda: list[object]) -> None:
    cuda.append(2)
    assert len(marks(lambda: torch.cuda.synchronize())) == 1
    assert cuda == [0, 2]


def test_everything_is_put_back_after_an_error(cuda: list[object]) -> None:
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize, warnings.showwarning)
    with contextlib.suppress(ZeroDivisionError), marked_synchronisations(into([]), Replacements()):
        raise ZeroDivisionError
    after = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize, warnings.showwarning)
    assert before == after and cuda[-1] == 0


def test_without_a_gpu_nothing_is_touched() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    before = torch.cuda.synchronize
    with marked_synchronisations(into([]), Replacements()):
        assert torch.cuda.synchronize is before
