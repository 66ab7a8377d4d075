"""Cases in text files: sections of rows, whose fields stand between ` | ` and may be Python.

    [section]
    name | inputs | program
    cubes | fp32[3,5] | x: x**3

The first line of a section names its fields; a row may leave out its last ones, and go on in indented lines. It has no
more fields than these, and where the first one is `name`, no other row has its name.

Where the program is more than an expression, the last field of the first line is its parameters, and the statements
stand below the row. The last of them is the result. `()` stands for no parameters.

    [section]
    name | inputs | x, y
    cubes of sums | fp32[3,5], fp32[5]
        z = x + y
        z**3
"""

import ast
import keyword
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

NAMES: dict[str, Any] = {
    **{"torch": torch, "F": F, "nn": torch.nn, "aten": torch.ops.aten, "own": torch.ops.tilewright},
    **{"math": math, "inf": math.inf},
}
"""What Python in a field may use besides what its test gives it."""


def sections(path: Path) -> list[str]:
    """The names of a file's sections, in order."""
    names = re.findall(r"^\[(.+)\]$", path.read_text("utf-8"), flags=re.M)
    assert len(names) == len({*names}), f"{path.name} has a section twice: {names}"
    return names


def rows(path: Path, section: str) -> list[dict[str, str]]:
    """The rows of a section, each by the names of its fields; what a row leaves out is empty."""
    text = re.sub(r"^#.*\n", "", path.read_text("utf-8"), flags=re.M)
    bodies = re.split(r"^\[.+\]\n", text, flags=re.M)[1:]
    header, *lines = re.sub(r"\n +", " ", bodies[sections(path).index(section)]).strip().splitlines()
    fields = header.split(" | ")
    split = [[*map(str.strip, re.split(r" \|(?= |$)", line))] for line in lines if line]
    for row in split:
        assert len(row) <= len(fields), f"{path.name} [{section}]: {row} has more fields than {fields}"
    if twice := [name for name, count in Counter(row[0] for row in split).items() if count > 1 and fields[0] == "name"]:
        raise AssertionError(f"{path.name} [{section}]: {twice} are names of several rows")
    return [dict(zip_longest(fields, row, fillvalue="")) for row in split]


def value(text: str, names: Mapping[str, Any] | None = None) -> Any:
    """What a field says: `x, y: x + y` is a function, anything else an expression."""
    is_function = re.match(r"(\*?\w+(, )?)*: ", text)
    return eval(f"lambda {text}" if is_function else text, {**NAMES, **(names or {})})


def cases(
    path: Path, section: str, names: Mapping[str, Any] | None = None, texts: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """The rows of a section by name: values of their fields but `texts`; those of `inputs` and `shapes` are lists."""
    lists = ("inputs", "shapes")
    return {
        row.pop("name"): {
            field: text if field in texts else value(f"[{text}]" if field in lists else text, names)
            for field, text in row.items()
        }
        for row in rows(path, section)
    }


class Program(NamedTuple):
    """A row whose statements are a function; `fields` are its others but the name, as text."""

    function: Callable[..., Any]
    fields: dict[str, str]


def programs(path: Path, section: str, names: Mapping[str, Any] | None = None) -> dict[str, Program]:
    """The rows of a section whose statements stand below them, by name; a traceback shows their lines."""
    lines = path.read_text("utf-8").splitlines()
    assert section in sections(path), f"{path.name} has no section [{section}]"
    start = lines.index(f"[{section}]") + 1
    _, *fields, parameters = lines[start].split(" | ")
    # A `__name__` would say that the functions are of that module.
    scope = NAMES | {name: value for name, value in (names or {}).items() if not name.startswith("__")}
    found = dict[str, Program]()
    for number, line in takewhile(lambda it: not it[1].startswith("["), enumerate(lines[start + 1 :], start + 2)):
        if line and line[0] not in "# ":
            name, *texts = line.split(" | ")
            body = takewhile(lambda below: below.startswith(" "), lines[number:])
            function = _function(name, parameters, "\n".join(body), path, number, scope)
            assert name not in found and len(texts) <= len(fields), f"{path.name} [{section}]: {line}"
            found[name] = Program(function, dict(zip(fields, texts + [""] * len(fields), strict=False)))
    return found


def functions(path: Path, section: str, names: Mapping[str, Any] | None = None) -> dict[str, Callable[..., Any]]:
    """The programs of rows that have no other field."""
    return {name: program.function for name, program in programs(path, section, names).items()}


def _function(
    name: str, parameters: str, body: str, path: Path, line: int, scope: dict[str, Any]
) -> Callable[..., Any]:
    called = re.sub(r"\W", "_", name)
    called += "_" * keyword.iskeyword(called)
    tree = ast.parse("\n" * (line - 1) + f"def {called}({parameters.strip('()')}):\n{body}", path.name)
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    last = function.body[-1]
    if isinstance(last, ast.Expr):
        function.body[-1] = ast.copy_location(ast.Return(last.value), last)
    exec(compile(tree, str(path), "exec"), scope)
    made: Callable[..., Any] = scope[called]
    return made
