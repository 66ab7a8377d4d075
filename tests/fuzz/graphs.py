"""Random programs over the operators of the table, as source that a person can run again."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, nan, prod
from random import Random
from typing import Any

import torch
from torch.nn import functional as F

from tests.fuzz.templates import CHOICES, OF_SPECIAL_VALUES, RANDOM

MOST_ELEMENTS = 20_000
LARGEST = 1000.0
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
SPECIAL_SHARE = 0.06


def autocast(like: torch.Tensor, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of `function` under bf16 autocast."""
    with torch.autocast(like.device.type, torch.bfloat16):
        return function()


SPACE = {"__name__": __name__, "torch": torch, "F": F, "autocast": autocast}
"""Names that statements may use."""


@dataclass(frozen=True)
class Input:
    """A tensor argument and how it lies in memory: contiguous, transposed, gapped or expanded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lies: str
    wants_gradient: bool = True
    """If it is of floats."""
    has_specials: bool = False
    """Some floats are NaN, infinite, zero of either sign, subnormal or large."""

    def make(self, seed: int, device: str = "cpu") -> torch.Tensor:
        """The same values for the same seed, on every device."""
        shape, strided = list(self.shape), None
        if self.lies == "transposed":
            strided = self._draw([*shape[:-2], *reversed(shape[-2:])], seed).to(device).mT
        elif self.lies == "gapped":
            strided = self._draw([*shape[:-1], 2 * shape[-1] + 3], seed).to(device)[..., 1 : 1 + 2 * shape[-1] : 2]
        elif self.lies == "expanded":
            strided = self._draw([1, *shape[1:]], seed).to(device).expand(shape)
        tensor = self._draw(shape, seed).to(device) if strided is None else strided
        return tensor.detach().requires_grad_(self.wants_gradient and is_inexact(tensor))

    def _draw(self, shape: Sequence[int], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_complex:
            return torch.randn(list(shape), generator=generator, dtype=self.dtype)
        if self.dtype.is_floating_point:
            drawn = torch.randn(list(shape), generator=generator).to(self.dtype)
            return self._with_specials(drawn, generator) if self.has_specials else drawn
        return torch.randint(2 if self.dtype is torch.bool else 8, list(shape), generator=generator).to(self.dtype)

    def _with_specials(self, drawn: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        large = 1e15 if self.dtype is not torch.float16 else 100.0
        tiny = torch.finfo(self.dtype).tiny / 8
        values = torch.tensor([nan, inf, -inf, 0.0, -0.0, tiny, -tiny, large, -large]).to(self.dtype)
        which = torch.randint(len(values), drawn.shape, generator=generator)
        return drawn.where(torch.rand(drawn.shape, generator=generator) > SPECIAL_SHARE, values[which])


@dataclass(frozen=True)
class Graph:
    """Inputs `x0, x1, …`, statements that give `v0, v1, …`, and the names of the results."""

    inputs: tuple[Input, ...]
    statements: tuple[str, ...]
    results: tuple[str, ...]

    def source(self, name: str = "graph") -> str:
        names = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        body = [f"v{i} = {statement}" for i, statement in enumerate(self.statements)]
        return "\n    ".join([f"def {name}({names}):", *body, f"return [{', '.join(self.results)}]"]) + "\n"

    def function(self, name: str = "graph") -> Callable[..., list[torch.Tensor]]:
        space: dict[str, Any] = dict(SPACE)
        exec(compile(self.source(name), f"<{name}>", "exec"), space)
        found: Callable[..., list[torch.Tensor]] = space[name]
        return found

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        return [given.make(seed + number, device) for number, given in enumerate(self.inputs)]

    def with_sizes(self, others: Mapping[int, int]) -> Graph:
        """The program for inputs that have other extents in place of these."""
        shapes = [tuple(others.get(n, n) for n in given.shape) for given in self.inputs]
        return replace(self, inputs=tuple(map(lambda given, shape: replace(given, shape=shape), self.inputs, shapes)))

    def prefixes(self) -> Iterator[Graph]:
        """The programs that return one value each, in the order of the statements, and what is always returned."""
        for position in range(len(self.statements)):
            statements = self.statements[: position + 1]
            yield replace(self, statements=statements, results=(f"v{position}", *always_returned(statements)))

    def reproducer(self, seed: int) -> str:
        """A program that shows the failure, with nothing left out."""
        given = "\n".join(f"#   x{i}: {value}" for i, value in enumerate(self.inputs))
        return f"{self.source()}\n# inputs, made with seed {seed}:\n{given}"


class Pool:
    """The values that the next operator of a random program may use; the program runs as it grows."""

    def __init__(self, random: Random, inputs: Sequence[Input]) -> None:
        self.random = random
        self.values = {f"x{i}": given.make(i).detach() for i, given in enumerate(inputs)}
        self.has_specials = any(given.has_specials for given in inputs)
        self.names: Mapping[str, Any] = SPACE
        self.writable = [f"x{i}" for i, given in enumerate(inputs) if not given.wants_gradient]

    def pick(self, wanted: Callable[[torch.Tensor], bool], among: Iterable[str]) -> str | None:
        """A value that will do: as often one of the newest three as any other, so that programs get deep."""
        names = [name for name in among if wanted(self.values[name])]
        newest = names[-3:] if self.random.random() < 0.5 else names
        return self.random.choice(newest) if names else None

    def fill(self, template: str, given: Mapping[str, Any] | None = None) -> str | None:
        """`template` with names for its operands, or None where nothing fits; `given` are those already chosen."""
        chosen: dict[str, Any] = dict(given or {})
        first = self.values[chosen["f"]] if "f" in chosen else None
        parts = [part.partition("}")[0] for part in template.split("{")[1:]]
        letters = dict.fromkeys(part for part in parts if part not in chosen)
        for letter in sorted(letters, key="d".__eq__):
            if letter == "d":
                if first is None or not first.dim():
                    return None
                chosen["d"] = str(self.random.randrange(-first.dim(), first.dim()))
                continue
            names = self.writable if letter == "u" else self.values
            name = self.pick(functools.partial(fits, letter, first), names)
            if name is None:
                return None
            chosen[letter] = name
            first = self.values[name] if first is None else first
        return template.format(**chosen)

    def run(self, statement: str) -> torch.Tensor | None:
        """The value of a statement, or None where PyTorch has none or it is too large."""
        try:
            value: torch.Tensor = eval(statement, {**self.names, **self.values})
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError, ZeroDivisionError):
            return None
        modest = not is_inexact(value) or self.has_specials or bool((value.abs() < LARGEST).all())
        return value if value.numel() <= MOST_ELEMENTS and modest else None

    def add(self, statement: str | None, statements: list[str]) -> None:
        """Make a statement the program's next one, where it has a value."""
        value = None if statement is None else self.run(statement)
        if statement is not None and value is not None:
            self.values[f"v{len(statements)}"] = value
            statements.append(statement)


def fits(letter: str, first: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Whether `value` can stand for `{letter}` where `first` is the first operand."""
    kind = value.dtype.is_floating_point if letter in "fgsu" else value.dtype is torch.bool
    if letter == "h":
        kind = not value.is_complex()
    if letter in "ij":
        kind = not is_inexact(value) and value.dtype is not torch.bool
    if letter in "zw":
        kind = value.is_complex()
    if not kind or first is None:
        return kind
    if letter == "s":
        return value.shape == first.shape and value.dtype is first.dtype
    pairs = zip(reversed(value.shape), reversed(first.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def is_inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


SIZES = [1, 2, 3, 5, 7, 8, 16, 33]
SHAPES = [(130, 140), (3, 700), (1500,), (700, 3), (0, 3), (2, 0), (17, 1, 65), ()]


def inputs(random: Random) -> tuple[Input, ...]:
    """A few operands that broadcast against the first."""
    shape = tuple(random.choices(SIZES, k=random.randint(1, 4))) if random.random() < 0.7 else random.choice(SHAPES)
    while prod(shape) > 3000 and shape not in SHAPES:
        shape = shape[1:]
    dtype = random.choice([torch.float32, *FLOATS])
    has_specials = random.random() < 0.1
    found = []
    for number in range(random.randint(1, 4)):
        part = list(shape)
        if number and random.random() < 0.5:
            part = [1 if random.random() < 0.3 else n for n in part[random.randint(0, len(part)) :]]
        own = dtype if random.random() < 0.8 else random.choice([*FLOATS, *INTEGERS, torch.bool])
        ways = ["contiguous"] * 3
        ways += ["gapped"] if part else []
        wants_gradient = random.random() < 0.8
        # PyTorch refuses most writes of a tensor whose elements share memory.
        ways += ["expanded"] if part and part[0] and wants_gradient else []
        ways += ["transposed"] if len(part) > 1 else []
        found.append(Input(tuple(part), own, random.choice(ways), wants_gradient, has_specials))
    return tuple(found)


def program(number: int) -> Graph:
    """Program `number`, always the same: up to a dozen statements with one to three results."""
    random = Random(number)
    while not (graph := _drawn(random)) or not runs(graph, number):
        pass
    return graph


def _drawn(random: Random) -> Graph | None:
    given = inputs(random)
    pool = Pool(random, given)
    statements: list[str] = []
    # Few groups, so that a program's statements meet values of their kinds.
    groups = random.choices(OF_SPECIAL_VALUES if pool.has_specials else CHOICES, k=4)
    for _ in range(random.randint(4, 16)):
        pool.add(pool.fill(random.choice(random.choice(groups))), statements)
    if len(statements) < 2:
        return None
    names = [f"v{i}" for i in range(len(statements))]
    others = random.choices(names, k=random.randint(0, 2))
    return Graph(given, tuple(statements), (names[-1], *always_returned(statements), *others))


def runs(graph: Graph, seed: int, device: str = "cpu") -> bool:
    """Whether PyTorch runs it and its backward, which some writes and dtypes prevent."""
    given = graph.make_inputs(seed, device)
    try:
        ends = [t for t in graph.function()(*given) if t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except RuntimeError:
        return False
    return True


def always_returned(statements: Sequence[str]) -> list[str]:
    """The names of random values and of written arguments.

    A draw that nobody reads is dropped by AOTAutograd, and every draw after it is another one than eager's.
    """
    writes = re.compile(r"\b(x\d+)\b[^ ]*_\(")
    drawn = (any(name in statement for name in RANDOM) or writes.search(statement) for statement in statements)
    return [f"v{i}" for i, found in enumerate(drawn) if found]
