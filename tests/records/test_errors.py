"""What IPython shows of an error: it asks the exception for its lines."""

import pytest

from tilewright.records.errors import InputError


def test_a_notebook_shows_the_message_alone() -> None:
    assert InputError("case does not fit\n  [2, 3]")._render_traceback_() == [
        "InputError: case does not fit",
        "  [2, 3]",
    ]


def test_with_the_variable_it_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TRACEBACK", "1")
    try:
        raise InputError("case does not fit")
    except InputError as error:
        lines = error._render_traceback_()
    assert lines[0].startswith("Traceback") and any("test_errors.py" in line for line in lines)
