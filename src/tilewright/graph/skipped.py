"""Functions that Dynamo leaves out altogether: which, where and why.

    for i in range(3):
        print(i)             a break that cannot be resumed from: no graph, and no call of the backend
        x = x + 1

At a break elsewhere the backend is given the graph before it, with the reason (`capture.graph_break`). Here nobody
is called, and all of the function runs as it stands; so does what calls a module that Dynamo does not trace, as
`nn.LSTM` is. What Dynamo has, in torch 2.11 to 2.13, is a callback at the end of each compilation, whatever ended it.
With `capture.py` and `cuda_graph.py` in touching PyTorch's private modules.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._dynamo.callback import callback_handler

from tilewright.records.program import Fallback

Report = Callable[[Fallback], None]
SHORT = 40
"""Characters of a context that still says something to who did not write Dynamo."""
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def watch(backend: object, report: Report) -> None:
    """Have `report` called with each function that is left out of a `torch.compile` for `backend`.

    What `report` raises becomes the error of the call that is being compiled. Where threads compile at one time,
    only the last to end is heard.
    """

    def note(_: object) -> None:
        found = _left_out(backend)
        if found is not None:
            try:
                report(found)
            except Exception:
                _end_pending()
                raise

    callback_handler.end_callbacks = _Lasting([*callback_handler.end_callbacks, note], note)


class _Lasting(list[Any]):
    """Callbacks, one of which stays when `torch._dynamo.reset` clears them."""

    def __init__(self, callbacks: list[Any], lasting: object) -> None:
        super().__init__(callbacks)
        self.lasting = lasting

    def clear(self) -> None:
        self[:] = [callback for callback in self if callback is self.lasting]


def _end_pending() -> None:
    """Count the compilation that ends as ended: PyTorch does so after its callbacks only."""
    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    setattr(callback_handler, name, getattr(callback_handler, name) - 1)


def _left_out(backend: object) -> Fallback | None:
    """What the compilation that ends here leaves out, if its error stays with Dynamo and it was for `backend`."""
    from torch._dynamo.exc import Unsupported

    error = sys.exc_info()[1]
    if not isinstance(error, Unsupported):
        return None
    compilation = _around(sys._getframe(), lambda frame: {"compiler_fn", "one_graph", "code"} <= frame.f_locals.keys())
    if compilation is None or compilation.f_locals["one_graph"]:
        return None
    asked = compilation.f_locals["compiler_fn"]
    while asked is not backend:
        asked = getattr(asked, "_torchdynamo_orig_backend", None) or getattr(asked, "compiler_fn", None)
        if asked is None:
            return None
    code: CodeType = compilation.f_locals["code"]
    what = "the call" if code.co_filename.startswith(_LIBRARIES) else f"the function {code.co_name}"
    return Fallback(what, _place(error, compilation), _reason(str(error.msg)))


def _reason(message: str) -> str:
    """`Attempted to wrap RNN, GRU, or LSTM: LSTM(8, 8)`, of a message with explanation, hints and context."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["no reason is given"]
    context = next((line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context")), "")
    return f"{lines[0]}: {context}" if 0 < len(context) <= SHORT else lines[0]


def _place(error: Any, compilation: FrameType) -> str:
    """The innermost line of the user's that was being traced, else the one that called what is compiled."""
    lines = [(frame.filename, frame.lineno) for frame in getattr(error, "real_stack", None) or ()]
    own = [place for place in lines if not place[0].startswith(_LIBRARIES)]
    caller = _around(compilation, lambda frame: not frame.f_code.co_filename.startswith(_LIBRARIES))
    if not own and caller is not None:
        own = [(caller.f_code.co_filename, caller.f_lineno)]
    if not own:
        return "an unknown place"
    filename, number = own[-1]
    text = linecache.getline(filename, number).strip()
    return f"{os.path.basename(filename)}:{number}" + (f": {text}" if text else "")


def _around(inner: FrameType, wanted: Callable[[FrameType], bool]) -> FrameType | None:
    """The nearest frame around `inner` that is `wanted`."""
    return next((frame for frame, _ in traceback.walk_stack(inner) if wanted(frame)), None)
