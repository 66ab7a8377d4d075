"""Text files of cases: what a row cannot mean is an error, not left out."""

from pathlib import Path

import pytest

from tests.tables import programs, rows, value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nname | inputs\nfirst | fp32[3] | x: x + 1\n", "more fields than"),
        ("[a]\nname | inputs\nfirst | fp32[3]\nfirst | fp32[5]\n", "names of several rows"),
        ("[a]\nname | inputs\nfirst | 1\n[a]\nname | inputs\nsecond | 2\n", "a section twice"),
    ],
)
def test_what_a_row_cannot_mean_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "cases.txt"
    file.write_text(text)
    with pytest.raises(AssertionError, match=message):
        rows(file, "a")


@pytest.mark.parametrize("row", ["first | 1 | 2\n    x\n", "first | 1\n    x\nfirst | 2\n    x\n"])
def test_what_a_program_cannot_mean_is_an_error(tmp_path: Path, row: str) -> None:
    file = tmp_path / "cases.txt"
    file.write_text(f"[a]\nname | inputs | x\n{row}")
    with pytest.raises(AssertionError, match="first"):
        programs(file, "a")


def test_rows_may_leave_out_fields_and_go_on_below(tmp_path: Path) -> None:
    file = tmp_path / "cases.txt"
    file.write_text("[a]\nname | inputs | program\nfirst | [3] |\n    x: x + 1\n# a comment\nsecond\n")
    first, second = rows(file, "a")
    assert (first["name"], value(first["program"])(2)) == ("first", 3)
    assert second == {"name": "second", "inputs": "", "program": ""}
