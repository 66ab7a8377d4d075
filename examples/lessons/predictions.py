"""Grades a file of predictions, one a line: `reads_naive = 5*N*M + 2*N`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from tilewright.records.errors import UsageError

from .lesson import Lesson, Question, Words, value

_NEAR = 1.2


def words(name: str, language: str) -> dict[str, Words]:
    """What `en.toml` or `zh.toml` says of each question of a lesson."""
    said = tomllib.loads((Path(__file__).parent / f"{language}.toml").read_text(encoding="utf-8"))[name]
    return {question: Words(**row) for question, row in said.items() if isinstance(row, dict)}


def grade(lesson: Lesson, said: dict[str, Words], file: Path) -> Iterator[str]:
    """A sentence or two for each question, in the lesson's order."""
    given = _read(file)
    known = [question.name for question in lesson.questions]
    if strange := [name for name in given if name not in known]:
        raise UsageError(
            f"{file} answers {', '.join(strange)}, which the lesson does not ask; it asks {', '.join(known)}"
        )
    right = 0
    for question in lesson.questions:
        answer = given.get(question.name, "")
        verdict, is_right = (
            _verdict(question, said[question.name], answer, lesson) if answer else ("no prediction yet", False)
        )
        right += is_right
        yield f"{question.name}: {verdict}"
    yield f"{right} of {len(lesson.questions)} right"


def _read(file: Path) -> dict[str, str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {file}: {getattr(error, 'strerror', None) or 'it is not text'}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        name, equals, answer = line.partition("#")[0].partition("=")
        if not name.strip():
            continue
        if not equals:
            raise UsageError(f"{file}:{number} is no prediction: write name = number or formula")
        found[name.strip()] = answer.strip()
    return found


def _verdict(question: Question, words: Words, answer: str, lesson: Lesson) -> tuple[str, bool]:
    truth = question.truth()
    if isinstance(truth, str):
        if answer not in question.choices:
            raise UsageError(f"{question.name} = {answer}: choose one of {', '.join(question.choices)}")
        if answer == truth:
            return f"right, {truth}. {words.why}", True
        return f"you say {answer}; it is {truth}. {words.mistakes.get(answer, words.why)}", False
    said = value(answer, lesson.sizes)
    here, there = _shown(answer, said), _number(truth, question.factor)
    mistake = next((m for m in words.mistakes if _equal(said, value(m, lesson.sizes), 1)), None)
    # What is measured may be off by more than a mistake is.
    if _equal(said, truth, question.factor if mistake is None else min(question.factor, _NEAR)):
        about = "" if question.factor == 1 else f"; it is {there}"
        return f"right, {here}{about}. {words.why}", True
    if mistake is not None:
        return f"you say {here}; it is {there}. {words.mistakes[mistake]}", False
    return f"you say {here}; it is {there}{_distance(said, truth)}. {words.why}", False


def _number(number: float, factor: float = 1) -> str:
    return f"{number:,.12g}" if factor == 1 else f"{number:,.4g}"


def _shown(answer: str, said: float) -> str:
    plain = _number(said)
    return plain if answer.replace(",", "") == plain.replace(",", "") else f"{answer} = {plain}"


def _equal(said: float, truth: float, factor: float) -> bool:
    if factor == 1:
        return abs(said - truth) <= 1e-9 * abs(truth)
    return said > 0 and max(said / truth, truth / said) <= factor


def _distance(said: float, truth: float) -> str:
    if said <= 0 or truth <= 0:
        return ""
    return f", {truth / said:.3g} times that" if truth > said else f": you say {said / truth:.3g} times as much"
