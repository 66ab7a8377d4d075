"""What Dynamo does not capture: its errors as one message with the user's line, and why it ended a graph.

Calls that only print or log (logging, warnings, `print`) end a graph where Dynamo meets them.

Reports functions that Dynamo skips entirely: which, where and why.

    for i in range(3):
        print(i)             a graph break in a loop cannot be resumed from: no graph, and no call of the backend
        x = x + 1

    if torch.equal(x, y):    a graph break before any operator: no call of the backend for what ran until here

At other graph breaks the backend gets the graph before the break, with the reason (`graph_break`). In the first form
the backend is not called and the whole function runs in Python; so does a function that calls a module which Dynamo
does not trace, such as `nn.LSTM`. This file uses a callback of Dynamo's private modules (torch 2.11 to 2.13) that runs
at the end of each compilation, whatever ended it.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Self

import torch
from torch import fx
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback
from torch._dynamo.utils import graph_break_reasons

from tilewright.graph.source import library_prefixes, place_text, user_frame, user_line
from tilewright.records.errors import CaptureError, InputError, TilewrightError, traceback_wanted
from tilewright.records.program import Fallback

METHODS = {"debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor"}
"""Methods of loggers. Libraries add methods with such names, as Transformers adds `warning_once`."""
METRICS = logging.getLogger("torch._dynamo.metrics_context")
"""torch 2.11 logs an error here if it cannot sort the ignored functions."""


@contextmanager
def messages_ignored() -> Iterator[None]:
    """Programs captured in this block are one graph whatever they print; what they print is lost."""
    methods = {value for name, value in vars(logging.Logger).items() if name.partition("_")[0] in METHODS}
    functions: set[Callable[..., Any]] = {getattr(logging, name) for name in METHODS if hasattr(logging, name)}
    ignored = {print, warnings.warn, warnings.warn_explicit, *functions, *methods}
    before, METRICS.disabled = METRICS.disabled, True
    try:
        with torch._dynamo.config.patch(ignore_logging_functions=ignored):
            yield
    finally:
        METRICS.disabled = before


class StrictError(CaptureError, BackendCompilerFailed):
    """What the strict mode refuses to leave to PyTorch, as one message with the user's line.

    Dynamo raises an error of this class as it is, to the user's call: without its own frames and hints, which
    `TILEWRIGHT_TRACEBACK=1` leaves in. `inner_exception` is what failed, if something did.
    """

    def __init__(self, fallback: Fallback, error: Exception | None = None) -> None:
        self.text = (
            f"{fallback.what} at {fallback.where.removesuffix(':')}: {fallback.why}\n"
            "  TILEWRIGHT_STRICT=1 makes this an error; without it PyTorch runs this part"
        )
        ShortenTraceback.__init__(self, self.text, first_useful_frame=None)
        self.backend_name, self.inner_exception = "tilewright", error or self
        self.exit_code = getattr(error, "exit_code", self.exit_code)

    def __str__(self) -> str:
        # Dynamo adds its hints to `args`.
        return self.text

    def remove_dynamo_frames(self) -> Self:
        return self if traceback_wanted() else self.with_traceback(None)


Report = Callable[[Fallback], None]


def watch(backend: object, report: Report) -> None:
    """Call `report` with each function that `torch.compile` for `backend` skips, and each break without a graph.

    An exception of `report` is raised by the call that is being compiled. If several threads compile at once, only
    the last to finish is reported.
    """

    def note(_: object) -> None:
        reasons = _new_breaks()
        found = [one] if (one := _skipped(backend)) else [*map(_broken, reasons)] if _is_for(backend) else []
        try:
            for one in found:
                report(one)
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


def _new_breaks() -> list[Any]:
    """Dynamo's reasons for the breaks of this compilation that the backend was not told with their graph."""
    found = list(itertools.takewhile(lambda reason: not vars(reason).get(TOLD), reversed(graph_break_reasons)))
    for reason in found:
        setattr(reason, TOLD, True)
    return [] if sys.exc_info()[1] else [reason for reason in found if not _is_wanted(reason)]


def _compilation() -> FrameType | None:
    """Dynamo's frame that compiles."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    return next((f for f in frames if {"compiler_fn", "one_graph", "code"} <= f.f_locals.keys()), None)


def _is_for(backend: object, compilation: FrameType | None = None) -> bool:
    compilation = compilation or _compilation()
    requested = compilation and compilation.f_locals["compiler_fn"]
    while requested is not None and requested is not backend:
        requested = getattr(requested, "_torchdynamo_orig_backend", None) or getattr(requested, "compiler_fn", None)
    return requested is not None


def _skipped(backend: object) -> Fallback | None:
    """The function skipped by the compilation that ends here, if Dynamo handles the error and it is for `backend`."""
    from torch._dynamo.exc import Unsupported

    error = sys.exc_info()[1]
    compilation = _compilation()
    if not isinstance(error, Unsupported):
        return None
    if compilation is None or compilation.f_locals["one_graph"] or not _is_for(backend, compilation):
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


OPERATOR = re.compile(
    r"call_\w+ (?:<(?:built-in )?(?:function|method) )?(?P<name>[\w.]+)[^(]*\((?P<operands>.*)\): "
    r"got \w+\((?P<quote>['\"])(?P<reason>.*)(?P=quote)\)"
)
"""Dynamo's message for an operator that rejects its operands: `call_function NAME(…): got ERROR('…')`."""
SIZE = re.compile(r"FakeTensor\(\.\.\.[^)]*?size=\(([^)]*)\)")
FALSE = re.compile(r"^Data-dependent assertion failed.*ConstantVariable\(bool: False\)", re.DOTALL)
"""Dynamo's message for an assertion about shapes that does not hold."""
UNPACKED = "Length mismatch when unpacking"
"""Dynamo's message for a shape, or a tuple of tensors, of more or fewer items; of torch 2.11."""
RAISED = re.compile(r"raised exception (?!SystemExit|KeyboardInterrupt)(.+)")
"""Of the user's own exceptions, those that say something about the inputs."""
BRANCH = "Data-dependent branching"
"""The first line of Dynamo's message for a branch on a value where one graph is asked for."""
RECURRENT = "RNN, GRU, or LSTM"
"""In Dynamo's message for a recurrent layer, which it traces if asked to."""
CONSTANT = re.compile(r"\[?ConstantVariable\(\w+: (.*?)\)\]?")
"""An argument of that exception in torch 2.11."""


def capture_error(name: str, error: Exception) -> TilewrightError:
    """The documented error for what Dynamo, or the user's code within it, raised while capturing the case `name`.

    InputError if an operator or the user's code rejects the inputs, with the operator, its operands' shapes and
    the line; a backend's TilewrightError unchanged; else CaptureError with the line of the graph break.
    """
    from torch._dynamo.exc import TorchDynamoException

    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, TilewrightError):
        # Its traceback is that of PyTorch's compiler.
        return inner.with_traceback(None)
    text = str(error)
    line = user_line(text.rpartition("from user code:")[2])
    # A module that is one of PyTorch's own layers has no line.
    place = f" at {line}" if line else ""
    broken = f"; it breaks{place}" if line else ""
    first = text.strip().partition("\n")[0]
    refusal: str | None = None
    if found := OPERATOR.search(text):
        shapes = ", ".join(f"[{size.rstrip(', ')}]" for size in SIZE.findall(found["operands"]))
        refusal = f"{found['name']} of {shapes or 'no tensor'}: {found['reason']}"
        if "leaf Variable" in refusal:
            refusal += " In training, inputs are leaves; use --inference to capture without gradients."
    elif found := RAISED.search(text):
        refusal = CONSTANT.sub(r"\1", found[1])
    elif first.startswith(UNPACKED):
        refusal = first
    elif FALSE.search(text):
        refusal = "the assertion does not hold for their shapes"
    elif not isinstance(error, TorchDynamoException):
        refusal = f"{type(error).__name__}: {first}"
    if refusal is not None:
        return InputError(f"{name} does not accept its inputs{place}\n  {refusal}")
    advice = "torch.compile would run it as several graphs: name a part as the target, or rewrite the line"
    why = in_words(text if BRANCH in first else first)
    return CaptureError(f"{name} is not one graph{broken}\n  {why}" + ("" if RECURRENT in first else f"; {advice}"))


SHORT = 40
"""Longer contexts of Dynamo's messages are omitted."""


def graph_break(module: fx.GraphModule) -> Fallback | None:
    """The graph break that ended this graph, if there was one.

    Dynamo marks the cuts between the buckets of a DDP module as breaks, too; no operator runs there.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    setattr(reason, TOLD, True)
    return None if _is_cut_of_ddp(reason) else _broken(reason)


TOLD = "_told_to_tilewright"


def _is_cut_of_ddp(reason: Any) -> bool:
    return any(frame.name == "DDPOptimizer" for frame in reason.user_stack)


def _is_wanted(reason: Any) -> bool:
    """Whether no operator runs there: also not at `torch._dynamo.graph_break()`, with which optimizers' steps begin,
    and not where PyTorch's wrappers keep their books, in frames none of which is the program's."""
    others = (*library_prefixes(), contextlib.__file__)
    is_theirs = bool(reason.user_stack) and all(frame.filename.startswith(others) for frame in reason.user_stack)
    return is_theirs or _is_cut_of_ddp(reason) or "`torch._dynamo.graph_break()`" in reason.reason


def _broken(reason: Any) -> Fallback:
    where = "an unknown place"
    if reason.user_stack:
        frame = reason.user_stack[-1]
        where = place_text(frame.filename, frame.lineno, frame.line or "")
    return Fallback("the call that breaks the graph", where, in_words(reason.reason))


def in_words(message: str) -> str:
    """The first line of Dynamo's message with its context, without names of Dynamo's own.

    >>> in_words("generic_jump TensorVariable()")
    "which branch is taken depends on a tensor's value"
    >>> in_words("Data-dependent branching\\n  Developer debug context: attempted to jump with TensorVariable()")
    "which branch is taken depends on a tensor's value"
    >>> in_words("Attempted to wrap RNN, GRU, or LSTM\\n  Developer debug context: LSTM(8, 8)")
    "Dynamo traces recurrent layers only if the model's file sets torch._dynamo.config.allow_rnn = True"
    """
    if jump := re.match(rf"(?:generic_jump|{BRANCH}(?:.|\n)* attempted to jump with) (\w+)", message):
        value = "a tensor's value" if jump[1] == "TensorVariable" else "a value that is known only when it runs"
        return f"which branch is taken depends on {value}"
    if RECURRENT in message:
        return "Dynamo traces recurrent layers only if the model's file sets torch._dynamo.config.allow_rnn = True"
    if message.startswith("step_unsupported"):
        # Dynamo restarts the analysis here and does not keep why.
        return "Dynamo does not trace this statement; TORCH_LOGS=graph_breaks says why"
    lines = [line.strip() for line in message.strip().splitlines()] or ["no reason is given"]
    context = next((line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context")), "")
    return f"{lines[0]}: {context}" if 0 < len(context) <= SHORT else lines[0]
