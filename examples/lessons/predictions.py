"""Grades a file of predictions, one a line: `reads_naive = 5*N*M + 2*N`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tilewright.records.errors import UsageError, VerificationError

from .lesson import Lesson, Question, Words, value

_NEAR = 1.2
Phrases = Mapping[str, str]


def words(name: str, language: str) -> tuple[dict[str, Words], Phrases]:
    """What `en.toml` or `zh.toml` says of each question of a lesson, and the phrases around it."""
    said = _said(language)
    return {question: Words(**row) for question, row in said[name].items() if isinstance(row, dict)}, said["phrases"]


def translations(language: str) -> Mapping[str, str]:
    """What is said of operators, by the English sentence; nothing in English."""
    return _said(language).get("operators", {})


def _said(language: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / f"{language}.toml").read_text(encoding="utf-8"))


def grade(lesson: Lesson, said: Mapping[str, Words], phrases: Phrases, file: Path) -> Iterator[str]:
    """A sentence or two for each question, in the lesson's order, then how many are right.

    Raises VerificationError with that count if a prediction is wrong or missing.
    """
    given = _read(file)
    known = [question.name for question in lesson.questions]
    if strange := [name for name in given if name not in known]:
        raise UsageError(
            f"{file} answers {', '.join(strange)}, which the lesson does not ask; it asks {', '.join(known)}"
        )
    right = 0
    for question in lesson.questions:
        phrase: str = "missing"
        facts: dict[str, str] = {}
        if answer := given.get(question.name, ""):
            phrase, facts = _verdict(question, said[question.name], answer, lesson)
        right += phrase in ("right", "near")
        yield f"{question.name}: {phrases[phrase].format_map(facts)}"
    total = phrases["total"].format(right=right, all=len(known))
    if right < len(known):
        raise VerificationError(total)
    yield total


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


def _verdict(question: Question, words: Words, answer: str, lesson: Lesson) -> tuple[str, dict[str, str]]:
    """The phrase for an answer, and what stands in it."""
    truth = question.truth()
    if not isinstance(truth, (int, float)):
        if answer not in question.choices:
            raise UsageError(f"{question.name} = {answer}: choose one of {', '.join(question.choices)}")
        why = words.why if answer in truth else words.mistakes.get(answer, words.why)
        return "right" if answer in truth else "mistaken", {"said": answer, "truth": " / ".join(truth), "why": why}
    said = value(answer, lesson.sizes)
    facts = {"said": _shown(answer, said), "truth": _number(truth, question.factor), "why": words.why}
    mistake = next((m for m in words.mistakes if _equal(said, value(m, lesson.sizes), 1)), None)
    # What is measured may be off by more than a mistake is.
    if _equal(said, truth, question.factor if mistake is None else min(question.factor, _NEAR)):
        return "right" if question.factor == 1 or facts["said"] == facts["truth"] else "near", facts
    if mistake is not None:
        return "mistaken", facts | {"why": words.mistakes[mistake]}
    if said <= 0 or truth <= 0:
        return "mistaken", facts
    times = max(truth / said, said / truth)
    return "less" if said < truth else "more", facts | {"times": f"{times:,.0f}" if times >= 1000 else f"{times:.3g}"}


def _number(number: float, factor: float = 1) -> str:
    return f"{number:,.12g}" if factor == 1 else f"{number:,.4g}"


def _shown(answer: str, said: float) -> str:
    plain = _number(said)
    return plain if answer.replace(",", "") == plain.replace(",", "") else f"{answer} = {plain}"


def _equal(said: float, truth: float, factor: float) -> bool:
    if factor == 1:
        return abs(said - truth) <= 1e-9 * abs(truth)
    return said > 0 and max(said / truth, truth / said) <= factor
