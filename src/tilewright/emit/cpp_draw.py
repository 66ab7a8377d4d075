"""How a C++ kernel draws random numbers: ahead of each innermost loop, for the elements that it visits.

Every thread has its own copy of the stream, which `random.h` moves to where the thread's elements
begin; from there it is read in order.
"""

from __future__ import annotations

from tilewright.loops.nest import Nest


def draws_of(nest: Nest) -> list[int]:
    """The positions of the steps that draw."""
    return [i for i, step in enumerate(nest.steps) if step.name == "draw"]


def open_stream(i: int, room: int) -> list[str]:
    """The stream of step `i`, and room for what it gives one innermost loop."""
    return [
        f"tw_stream stream{i};",
        f"stream{i}.block = -1;",
        f"uint8_t* const drawn{i} = (uint8_t*)__builtin_malloc({room});",
    ]


def close_stream(i: int) -> str:
    return f"__builtin_free(drawn{i});"


def draw(i: int, nest: Nest, saved: str, first: str, count: str) -> str:
    """Fills `drawn{i}` for `count` elements from the `first` on; `saved` points to the stream's state."""
    return f"tw_draw(&stream{i}, {saved}, {first}, {count}, {nest.steps[i].constant}L, drawn{i});"


def drawn(i: int, position: str) -> str:
    """What was drawn for the element at `position` of the innermost loop."""
    return f"drawn{i}[{position}] != 0"
