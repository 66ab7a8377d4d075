"""Dynamo's capture errors as one message with the user's line, and why it ended a graph, in the user's words."""

from __future__ import annotations

import re

from torch import fx

from tilewright.graph.source import place_text, user_line
from tilewright.records.errors import CaptureError, InputError, TilewrightError
from tilewright.records.program import Fallback

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
        return inner
    text = str(error)
    line = user_line(text.rpartition("from user code:")[2])
    # A module that is one of PyTorch's own layers has no line.
    place = f" at {line}" if line else ""
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
    advice = "name a part as the target, or rewrite the line"
    if RECURRENT in first:
        advice += ", or let Dynamo trace recurrent layers: torch._dynamo.config.allow_rnn = True"
    return CaptureError(
        f"{name} is not one graph; it breaks{place}\n  {first}; torch.compile would run it as several graphs: {advice}"
    )


SHORT = 40
"""Longer contexts of Dynamo's messages are omitted."""


def graph_break(module: fx.GraphModule) -> Fallback | None:
    """The graph break that ended this graph, if there was one.

    Dynamo marks the cuts between the buckets of a DDP module as breaks, too; no operator runs there.
    """
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or any(f.name == "DDPOptimizer" for f in reason.user_stack):
        return None
    where = "an unknown place"
    if reason.user_stack:
        frame = reason.user_stack[-1]
        where = place_text(frame.filename, frame.lineno, frame.line or "")
    return Fallback("the call that breaks the graph", where, in_words(reason.reason))


def in_words(message: str) -> str:
    """The first line of Dynamo's message with its context, without names of Dynamo's own.

    >>> in_words("generic_jump TensorVariable()")
    "which branch is taken depends on a tensor's value"
    >>> in_words("Attempted to wrap RNN, GRU, or LSTM\\n  Developer debug context: LSTM(8, 8)")
    'Attempted to wrap RNN, GRU, or LSTM: LSTM(8, 8)'
    """
    if jump := re.match(r"generic_jump (\w+)", message):
        value = "a tensor's value" if jump[1] == "TensorVariable" else "a value that is known only when it runs"
        return f"which branch is taken depends on {value}"
    if message.startswith("step_unsupported"):
        # Dynamo restarts the analysis here and does not keep why.
        return "Dynamo does not trace this statement; TORCH_LOGS=graph_breaks says why"
    lines = [line.strip() for line in message.strip().splitlines()] or ["no reason is given"]
    context = next((line.partition(":")[2].strip() for line in lines if line.startswith("Developer debug context")), "")
    return f"{lines[0]}: {context}" if 0 < len(context) <= SHORT else lines[0]
