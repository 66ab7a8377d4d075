"""Work counted instead of timed: the same on every machine."""

import sys
from collections.abc import Callable
from types import FrameType


def calls_made(work: Callable[[], object], within: str = "", most: float = float("inf")) -> int:
    """How many Python functions `work` calls on this thread, of files whose path contains `within`.

    Past `most` it is stopped by an AssertionError, so work that would never end fails too. Functions in C do not count.
    """
    count = 0

    def count_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        if event == "call" and within in frame.f_code.co_filename:
            count += 1
            if count > most:
                sys.setprofile(None)
                raise AssertionError(f"more than {most:,.0f} calls")

    sys.setprofile(count_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count
