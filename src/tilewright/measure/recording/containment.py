"""Where the recorder fails, the recording ends, and the program goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class _GivesUp(Protocol):
    def give_up(self, error: Exception) -> None: ...


R = TypeVar("R", bound=_GivesUp)
P = ParamSpec("P")


def contained(method: Callable[Concatenate[R, P], None]) -> Callable[Concatenate[R, P], None]:
    """The recording ends where `method` fails."""

    @wraps(method)
    def call(recorder: R, /, *arguments: P.args, **options: P.kwargs) -> None:
        try:
            method(recorder, *arguments, **options)
        except Exception as error:
            recorder.give_up(error)

    return call
