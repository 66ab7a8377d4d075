"""All source files: their size, their rooms' sizes, and who may use PyTorch's private names."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/tilewright"
LONGEST_FILE, LONGEST_FUNCTION = 400, 60
LONGER = {
    "kernels/attention/__init__.py: attention",
    *(f"kernels/attention/portable/{name}" for name in ("backward.py: backward_dk_dv", "backward_dq.py: backward_dq")),
    "kernels/attention/portable/forward.py: forward",
    "kernels/attention/decode/triton_kernel.py: decode",
}
"""A docstring with all arguments, and Triton kernels, which have one function each."""
PRIVATE_ROOMS = {"capture", "pytorch"}
PUBLIC_BY_USE = {"_ops", "_pytree", "_python_dispatch"}
"""`OpOverload` is the type of an operator; PyTorch's notes on extending it name the other two."""


@functools.cache
def _sources() -> dict[Path, tuple[str, ast.Module]]:
    """Text and syntax tree of each file, by its path in the package."""
    texts = {path.relative_to(PACKAGE): path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: (text, ast.parse(text)) for path, text in texts.items()}


def _private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines that name a private module or function of PyTorch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split(".")[1:], *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for it in node.names if it.name.startswith("torch.") for part in it.name.split(".")[1:]]
        else:
            continue
        for name in names:
            if name.startswith("_") and not name.startswith("__") and name not in PUBLIC_BY_USE:
                yield node.lineno, name


def test_only_two_rooms_use_private_names_of_pytorch() -> None:
    found = [
        f"{path}:{line}: torch.{name}"
        for path, (_, tree) in _sources().items()
        if path.parts[0] not in PRIVATE_ROOMS
        for line, name in _private(tree)
    ]
    assert found == []


def test_files_and_functions_are_short() -> None:
    assert [path for path, (text, _) in _sources().items() if text.count("\n") > LONGEST_FILE] == []
    functions = {
        f"{path}: {node.name}"
        for path, (_, tree) in _sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > LONGEST_FUNCTION
    }
    assert functions == LONGER


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def _code_lines(text: str, tree: ast.Module) -> int:
    """Lines with code: neither blank, nor a comment, nor a docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for each in node.body
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) and isinstance(each.value.value, str)
        for line in range(each.lineno, (each.end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") and n not in strings for n, line in lines)


def test_rooms_stay_within_their_budgets() -> None:
    """pyproject.toml has the budgets, in lines of code; a commit that raises one says why."""
    budgets: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["tilewright"]["lines"]
    lines: Counter[str] = Counter()
    for path, (text, tree) in _sources().items():
        lines[path.parts[0].removesuffix(".py")] += _code_lines(text, tree)
    print("\n".join(f"{room:<12} {lines[room]:6,} of {budgets.get(room, 0):6,}" for room in sorted(lines)))
    assert {room: count for room, count in lines.items() if count > budgets.get(room, 0)} == {}
    # A budget far above what there is bounds nothing.
    assert {room for room, budget in budgets.items() if budget > lines[room] * 1.05 + 50} == set()


def test_what_is_listed_as_slow_is_there() -> None:
    listed = [line.split("::") for line in (ROOT / "tests/slow.txt").read_text("utf-8").splitlines()]
    places = [(ROOT / path, names[-1]) for path, *names in listed if path.startswith("tests/")]
    gone = [name for path, name in places if not path.exists() or f"def {name}(" not in path.read_text("utf-8")]
    assert gone == []
