"""Random numbers in a C++ kernel, drawn before each innermost loop for the elements that it visits.

Each thread has a copy of the stream, which `random.h` positions at the thread's first element and reads in order.
"""

from __future__ import annotations

from tilewright.loops.nest import Nest


def draws_of(nest: Nest) -> list[int]:
    """The positions of the steps that draw."""
    return [i for i, step in enumerate(nest.steps) if step.name == "draw"]


def open_stream(i: int, room: int) -> list[str]:
    """Declare the stream of step `i` and a buffer for the draws of one innermost loop (`room` elements)."""
    return [
        f"tw_stream stream{i};",
        f"stream{i}.block = -1;",
        f"uint8_t* const drawn{i} = (uint8_t*)__builtin_malloc({room});",
    ]


def close_stream(i: int) -> str:
    return f"__builtin_free(drawn{i});"


def draw(i: int, nest: Nest, saved: str, first: str, count: str) -> str:
    """Fill `drawn{i}` for `count` elements from `first` on; `saved` points to the stream's state."""
    return f"tw_draw(&stream{i}, {saved}, {first}, {count}, {nest.steps[i].constant}L, drawn{i});"


def drawn(i: int, position: str) -> str:
    """The draw of the element at `position` of the innermost loop."""
    return f"drawn{i}[{position}] != 0"
