"""`tilewright check LESSON FILE`: grades a student's predictions or operator."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tilewright.records.errors import UsageError

from .lesson import Lesson


def lesson_named(name: str) -> Lesson:
    from .catalogue import LESSONS

    if name not in LESSONS:
        raise UsageError(f"no lesson {name!r}; there are {', '.join(LESSONS)}")
    return LESSONS[name]


def check(name: str, file: Path, language: str = "en") -> Iterator[str]:
    """The lines that grade `file`: Python is an operator, anything else holds predictions.

    Raises VerificationError after the last line if an answer is wrong.
    """
    lesson = lesson_named(name)
    if language not in ("en", "zh"):
        raise UsageError(f"no language {language!r}; there are en and zh")
    if file.suffix != ".py":
        from .predictions import grade, words

        yield from grade(lesson, *words(name, language), file)
        return
    if not lesson.operator:
        raise UsageError(
            f"the lesson {name!r} asks for no operator; give a file of predictions, one name = number a line"
        )
    import torch

    if not torch.cuda.is_available():
        # Triton reads it when it is imported.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        from .interpreter import install

        install()
    from tilewright.case_names import load_object

    from .operators import Sentences
    from .operators import grade as grade_operator
    from .predictions import translations

    yield from grade_operator(
        lesson.operator, load_object(f"{file}:{lesson.operator}"), Sentences(translations(language))
    )
