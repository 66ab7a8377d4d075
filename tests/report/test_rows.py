"""The answer to a query as a table."""

from tests.report.printing import printed
from tilewright.report.rows import show_rows


def lines_of(columns: list[str], rows: list[tuple[object, ...]], width: int = 60) -> list[str]:
    return [line.rstrip() for line in printed(show_rows(columns, rows), width).splitlines()]


def test_numbers_stand_to_the_right_and_what_is_missing_is_said() -> None:
    assert lines_of(["name", "n", "share"], [("exp", 20, 0.28571428571), ("\x1b[2J", 4_000_000_000, None)]) == [
        "name           n  share",
        "exp           20  0.285714",
        "�[2J  4000000000  NULL",
    ]
    assert lines_of(["us"], [(12345678.25,), (0.0,)]) == ["        us", "12345678.2", "         0"]


def test_long_text_is_folded_and_never_cut() -> None:
    lines = lines_of(["source"], [("a" * 90,)], width=40)
    assert "".join(lines[1:]) == "a" * 90


def test_a_table_too_wide_is_a_list_of_its_rows() -> None:
    """`SELECT * FROM device_slice` has thirty columns."""
    columns = [f"column_{number}" for number in range(30)]
    lines = lines_of(columns, [tuple(range(30)), ("a" * 70, *range(29))])
    assert lines[:3] == ["row 1", "column_0   0", "column_1   1"]
    assert lines[31] == "row 2" and len(lines) == 31 + 32
    assert "".join(line[11:] for line in lines[32:34]) == "a" * 70


def test_an_answer_without_rows_has_its_columns() -> None:
    assert lines_of(["a", "b"], []) == ["a  b"]
