"""Helpers of the command-line tests: the user's file and a command's outcome."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MODELS = """
import torch
from torch import nn
from tilewright.records.case import Case, InputSpec

number = 3

def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

small = Case("small gelu", lambda: gelu, [InputSpec.parse("fp32[N=64,M=32]")])

def product(x, y):
    return x.relu() @ y

normed = nn.LayerNorm(8)

def ninth(x):
    return x[:, 9].sin()

def turned(x):
    return x.permute(0, 2, 1)

def asserts(x):
    assert x.shape[1] == 3, "three channels are needed"
    return x.sin()

def breaks(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()

def selects(x):
    return x[x > 0].sin()

def two(x, i):
    return {"rows": x[i].exp(), "sum": x.sum()}

def writes(x):
    x.add_(1)
    return x * 2

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        return self.dropout(self.norm(x)).relu()

instance = Normed()
"""


@dataclass
class Ended:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


Tilewright = Callable[..., Ended]


def between(lines: list[str], first: str, last: str = "") -> list[str]:
    """The lines from the one that starts with `first` to the next empty one, or one that is `last`."""
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    stop = next((i for i, line in enumerate(lines) if i > start and line == last), len(lines))
    return lines[start:stop]


OWN_PATH = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
# A shell starts background jobs with SIGINT ignored, and their children inherit that.
WITHOUT_MEASURED_CEILINGS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from tilewright.hardware import profiles
profiles.local_profile = lambda **_: profiles.profile_for("cpu")
from tilewright.cli import main
main()
"""


def documented_keys(verb: str) -> set[str]:
    """The keys that docs/json.md describes of a verb's JSON, or of `a row of` one of its lists."""
    text = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    _, heading, behind = text.partition(f"# {verb}\n")
    assert heading, verb
    rows = re.findall(r"^\| (`.*?) \|", re.split(r"\n##", behind)[0], flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}
