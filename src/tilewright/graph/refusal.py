"""What PyTorch says when it cannot capture a program, in one message that names the user's line."""

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
"""How Dynamo reports an operator that refused its operands: `call_function NAME(…): got ERROR('…')`."""
SIZE = re.compile(r"FakeTensor\(\.\.\.[^)]*?size=\(([^)]*)\)")
RAISED = re.compile(r"raised exception (.+)")
CONSTANT = re.compile(r"\[?ConstantVariable\(\w+: (.*?)\)\]?")
"""How torch 2.11 writes an argument of that exception."""


def refusal(name: str, error: TorchDynamoException) -> TilewrightError:
    """What Dynamo raised while capturing the case `name`, as the failure that the command line documents.

    InputError where an operator or the user's own code refuses the inputs, with the operator, its
    operands' shapes and the line; a TilewrightError that a backend raised as it was; else
    CaptureError, with the line at which the graph breaks.
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
        hint = " In training, inputs are leaves; --inference leaves gradients out." if "leaf Variable" in what else ""
        return InputError(f"{name} does not accept its inputs {place}\n  {what}{hint}")
    if found := RAISED.search(text):
        raised = CONSTANT.sub(r"\1", found[1])
        return InputError(f"{name} does not accept its inputs {place}\n  {raised}")
    first = text.strip().partition("\n")[0]
    return CaptureError(
        f"{name} is not one graph, it breaks {place}\n  {first}; "
        "torch.compile would run it in pieces: name one of them, or rewrite the line"
    )
