"""Translates Dynamo's capture errors into one message with the user's line."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tilewright.graph.source import user_line
from tilewright.records.errors import CaptureError, InputError, TilewrightError

if TYPE_CHECKING:
    from torch._dynamo.exc import TorchDynamoException

OPERATOR = re.compile(
    r"call_\w+ (?:<built-in (?:function|method) )?(?P<name>[\w.]+)[^(]*\((?P<operands>.*)\): "
    r"got \w+\((?P<quote>['\"])(?P<reason>.*)(?P=quote)\)"
)
"""Dynamo's message for an operator that rejects its operands: `call_function NAME(…): got ERROR('…')`."""
SIZE = re.compile(r"FakeTensor\(\.\.\.[^)]*?size=\(([^)]*)\)")
RAISED = re.compile(r"raised exception (.+)")
CONSTANT = re.compile(r"\[?ConstantVariable\(\w+: (.*?)\)\]?")
"""An argument of that exception in torch 2.11."""


def capture_error(name: str, error: TorchDynamoException) -> TilewrightError:
    """The documented error for what Dynamo raised while capturing the case `name`.

    InputError if an operator or the user's code rejects the inputs, with the operator, its operands' shapes and
    the line; a backend's TilewrightError unchanged; else CaptureError with the line of the graph break.
    """
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, TilewrightError):
        return inner
    text = str(error)
    line = user_line(text.rpartition("from user code:")[2])
    place = f"at {line}" if line else "at an unknown place"
    if found := OPERATOR.search(text):
        shapes = ", ".join(f"[{size.rstrip(', ')}]" for size in SIZE.findall(found["operands"]))
        what = f"{found['name']} of {shapes or 'no tensor'}: {found['reason']}"
        hint = (
            " In training, inputs are leaves; use --inference to capture without gradients."
            if "leaf Variable" in what
            else ""
        )
        return InputError(f"{name} does not accept its inputs {place}\n  {what}{hint}")
    if found := RAISED.search(text):
        raised = CONSTANT.sub(r"\1", found[1])
        return InputError(f"{name} does not accept its inputs {place}\n  {raised}")
    first = text.strip().partition("\n")[0]
    return CaptureError(
        f"{name} is not one graph; it breaks {place}\n  {first}; "
        "torch.compile would run it as several graphs: name a part as the target, or rewrite the line"
    )
