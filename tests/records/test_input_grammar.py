"""The grammar of `--inputs`: every example of its page, and what a value of it becomes."""

import re
from pathlib import Path

import pytest

from tilewright.records.case import InputSpec, leaves
from tilewright.records.errors import UsageError
from tilewright.records.input_grammar import parse_arguments

PAGE = (Path(__file__).parents[2] / "docs" / "inputs.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.*?)` \| (.*) \|$", PAGE, re.MULTILINE)
CALLS = [(text, call) for text, call in ROWS if call.startswith("`model(")]
REFUSED = [(text, said) for text, said in ROWS if not said.startswith("`model(")]


@pytest.mark.parametrize(("text", "call"), CALLS, ids=[text for text, _ in CALLS])
def test_what_the_page_shows_is_understood(text: str, call: str) -> None:
    positional, keywords = parse_arguments(text)
    assert list(keywords) == re.findall(r"\b(\w+)=", call)
    assert len([*leaves((positional, keywords))]) == len(re.findall(r"\w\[", text))


@pytest.mark.parametrize(("text", "said"), REFUSED, ids=[text for text, _ in REFUSED])
def test_what_the_page_refuses_is_refused_in_its_words(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_arguments(text)
    assert str(raised.value).startswith(f"input {text!r} {said}") and "\n" not in str(raised.value)


def test_a_page_without_examples_tests_nothing() -> None:
    assert len(CALLS) > 6 and len(REFUSED) > 15


def test_values_are_nested_as_they_are_written() -> None:
    x, y = InputSpec("float32", (2, 3), ("B", None)), InputSpec("int64", (2,), ("B",), (1, 9))
    text = " ( f32[B=2,3] , {a = i64[B]>=1<9, b=(None,-2,1.5e3)} ), flag=True,named=@given "
    assert parse_arguments(text, {"given": 7}.__getitem__) == (
        ((x, {"a": y, "b": (None, -2, 1500.0)}),),
        {"flag": True, "named": 7},
    )


@pytest.mark.parametrize(
    "text",
    ["", " ", ",", "=", "x=", "f32[4]]", "f32[[4]]", "f32[,]", "f32[4,]x", "f32[4;5]", "f32[B=]", "f32[=4]", "nan",
     "i64[4]<", "i64[4]>=1", "i64[4]<x", "i64[4]<1.5", "@", "@x", "f32[4] f32[4]", "{a=f32[4]", "{a}", "(f32[4]}",
     "f32{4}", "f32(4)", "\0", "f32[²]", "f32[٣]", "f32[1e3]", "B=4", "f32[B],f32[B=x]"],
)  # fmt: skip
def test_nonsense_is_one_line(text: str) -> None:
    try:
        found = parse_arguments(text)
    except UsageError as error:
        assert "\n" not in str(error) and len(str(error)) < 300
    else:
        assert text == "B=4" and found == ((), {"B": 4})
