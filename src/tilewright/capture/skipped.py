"""Reports functions that Dynamo skips entirely: which, where and why.

    for i in range(3):
        print(i)             a graph break in a loop cannot be resumed from: no graph, and no call of the backend
        x = x + 1

At other graph breaks the backend gets the graph before the break, with the reason (`graph_break`). Here the
backend is not called and the whole function runs in Python; so does a function that calls a module which Dynamo does
not trace, such as `nn.LSTM`. This file uses a callback of Dynamo's private modules (torch 2.11 to 2.13) that runs at
the end of each compilation, whatever ended it.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from torch._dynamo.callback import callback_handler

from tilewright.capture.errors import in_words
from tilewright.graph.source import library_prefixes, place_text, user_frame
from tilewright.records.program import Fallback

Report = Callable[[Fallback], None]


def watch(backend: object, report: Report) -> None:
    """Call `report` with each function that `torch.compile` for `backend` skips.

    An exception of `report` is raised by the call that is being compiled. If several threads compile at once, only
    the last to finish is reported.
    """

    def note(_: object) -> None:
        found = _skipped(backend)
        if found is not None:
            try:
                report(found)
            except Exception:
                _end_pending()
                raise

    callback_handler.end_callbacks = _PersistentCallbacks([*callback_handler.end_callbacks, note], note)


class _PersistentCallbacks(list[Any]):
    """Callbacks, one of which survives `torch._dynamo.reset`."""

    def __init__(self, callbacks: list[Any], lasting: object) -> None:
        super().__init__(callbacks)
        self.lasting = lasting

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback is self.lasting]


def _end_pending() -> None:
    """Decrement PyTorch's count of pending compilations, which it does only after the callbacks return."""
    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    setattr(callback_handler, name, getattr(callback_handler, name) - 1)


def _skipped(backend: object) -> Fallback | None:
    """The function skipped by the compilation that ends here, if Dynamo handles the error and it is for `backend`."""
    from torch._dynamo.exc import Unsupported

    error = sys.exc_info()[1]
    if not isinstance(error, Unsupported):
        return None
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    compilation = next((f for f in frames if {"compiler_fn", "one_graph", "code"} <= f.f_locals.keys()), None)
    if compilation is None or compilation.f_locals["one_graph"]:
        return None
    requested = compilation.f_locals["compiler_fn"]
    while requested is not backend:
        requested = getattr(requested, "_torchdynamo_orig_backend", None) or getattr(requested, "compiler_fn", None)
        if requested is None:
            return None
    code: CodeType = compilation.f_locals["code"]
    what = "the call" if code.co_filename.startswith(library_prefixes()) else f"the function {code.co_name}"
    return Fallback(what, _place(error, compilation), in_words(str(error.msg)))


def _place(error: Any, compilation: FrameType) -> str:
    """The innermost traced line of the user's code, else the line that called the compiled function."""
    lines = [(frame.filename, frame.lineno) for frame in getattr(error, "real_stack", None) or ()]
    lines = [line for line in lines if not line[0].startswith(library_prefixes())]
    if not lines and (caller := user_frame(compilation)) is not None:
        lines = [(caller.f_code.co_filename, caller.f_lineno)]
    return place_text(*lines[-1], linecache.getline(*lines[-1])) if lines else "an unknown place"
