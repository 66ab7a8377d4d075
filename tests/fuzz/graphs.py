"""Random programs over the operators of the table, as source that a person can run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import functional as F

MOST_ELEMENTS = 20_000
LARGEST = 1000.0
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)

# `{f}` is a float of at least 16 bits, `{g}` one that broadcasts against it, `{s}` one of its shape and
# dtype, `{i}`, `{j}` and `{b}`, `{c}` integers and bools likewise, `{z}` and `{w}` complex; `{d}` a dimension of the
# first.
# Values stay near 1 and away from poles, where the error of a result says nothing about its kernel.
SMOOTH = ["relu", "tanh", "sigmoid", "sin", "cos", "erf", "atan", "abs", "neg"]
JUMPS = ["floor", "ceil", "round", "sign"]
ACTIVATIONS = ["gelu", "silu", "softplus", "leaky_relu"]
POINTWISE = [
    *(f"torch.{name}({{f}})" for name in (*SMOOTH, *JUMPS)),
    *(f"F.{name}({{f}})" for name in ACTIVATIONS),
    "F.gelu({f}, approximate='tanh')",
    "torch.exp(-torch.abs({f}))",
    "torch.log1p(torch.abs({f}))",
    "torch.log({f} * {f} + 0.5)",
    "torch.sqrt(torch.abs({f}) + 0.5)",
    "torch.rsqrt({f} * {f} + 0.5)",
    "torch.reciprocal({f} * {f} + 1)",
    "torch.expm1({f}.clamp(-2, 1))",
    "({f} * 0.5).pow(3)",
    "(torch.abs({f}) + 0.5).pow(1.7)",
    "{f}.clamp(min=-0.5)",
    "1 - {f}",
    "{f} + {g}",
    "{f} - 0.5 * {g}",
    "{f} * torch.tanh({g})",
    "{f} / ({g} * {g} + 1)",
    "torch.maximum({f}, {g})",
    "torch.minimum({f}, {g})",
    "torch.where({f} > {g}, {f}, {g})",
    "torch.lerp({f}, {s}, 0.3)",
    "torch.addcmul({f}, {s}, torch.sigmoid({s}), value=0.5)",
    "torch.atan2({f}, {s} * {s} + 0.5)",
    "{f}.masked_fill({b}, 0.25)",
    "torch.where({b}, {f}, 0.5)",
    "F.dropout({f}, 0.3)",
    "{f}.clone()",
    "{f}.float()",
    "{f}.bfloat16()",
    "{f}.detach() + {f}",
]  # fmt: skip
REDUCTIONS = [
    "0.1 * {f}.sum({d})",
    "{f}.mean({d}, keepdim=True)",
    "0.1 * {f}.sum()",
    "{f}.mean()",
    "{f}.amax({d})",
    "{f}.amin({d}, keepdim=True)",
    "{f}.max({d})[0]",
    "{f}.var({d}, correction=0)",
    "torch.sqrt({f}.var({d}, correction=0, keepdim=True) + 0.1)",
    "torch.softmax({f}, {d})",
    "torch.log_softmax({f}, {d})",
    "torch.logsumexp({f}, {d})",
    "torch.linalg.vector_norm({f}, dim={d})",
    "F.layer_norm({f}, {f}.shape[-1:])",
    "F.layer_norm({f}, {f}.shape[-1:], {f}.flatten(0, -2).mean(0) + 1)",
    "F.rms_norm({f}, {f}.shape[-1:])",
    "{f} - {f}.mean({d}, keepdim=True)",
    "{f} * torch.rsqrt({f}.square().mean({d}, keepdim=True) + 0.5)",
    "({f} @ {s}.transpose(-2, -1)) * 0.2",
    "torch.softmax({f} @ {s}.transpose(-2, -1) * 0.1, -1) @ {s}",
    "torch.softmax(0.1 * {f} @ {s}.mT + torch.full(({f}.shape[-2],) * 2, -torch.inf).triu(1), -1) @ {s}",
]
VIEWS = [
    "{f}.reshape(-1)",
    "{f}.flatten(0, 1)",
    "{f}.unsqueeze({d})",
    "{f}.squeeze()",
    "{f}.transpose({d}, -1)",
    "{f}.permute(*reversed(range({f}.dim())))",
    "{f}.expand(2, *{f}.shape)",
    "{f}.narrow({d}, 0, 1)",
    "{f}.flip({d})",
    "{f}.unflatten({d}, (-1, 2))",
    "{f}.transpose(-2, -1).contiguous()",
    "torch.cat([{f}, {s}], {d})",
]
DISCRETE = [
    "{f} > {g}",
    "{f} <= 0.25",
    "{f}.argmax({d})",
    "{f}.max({d}, keepdim=True)[1]",
    "({f} * 3).to(torch.int32)",
    "{f}.isnan()",
    "{f}.any({d})",
    "~{b}",
    "{b} & {c}",
    "{b} ^ {c}",
    "{b}.all({d})",
    "{b}.sum({d})",
    "{b}.to(torch.float32)",
    "{i} + {j}",
    "{i} * 3 - {j}",
    "{i} & {j}",
    "{i} == {j}",
    "{i}.sum({d})",
    "{i}.amax({d})",
    "{i}.clamp(0, 5)",
    "torch.where({b}, {i}, 2)",
    "0.25 * {i}",
]
WRITES = [
    "{f}.clone().mul_(0.5)",
    "{f}.clone().copy_({g}.expand_as({f}))",
    "{f}.clone().masked_fill_({b}, 0.25)",
    "{f}.clone().mul_(0.5).add_({s})",
    "(lambda t: (t.select({d}, 0).mul_(2), t)[1])({f}.clone())",
    "(lambda t: (t.narrow({d}, 0, 1).copy_({f}.narrow({d}, -1, 1)), t)[1])({f} * 1)",
    "(lambda t: (t.transpose({d}, -1).sub_(0.5), t + {f})[1])({f}.clone())",
    "(lambda t: (t[..., ::2].tanh_(), t.flatten())[1])({f}.clone())",
    "(lambda t, u: (t.add_(1), u * t)[1])(*[{f}.clone()] * 2)",
]
SCATTERS = [
    "{f}.select_scatter({f}.select({d}, 0) * 2, {d}, -1)",
    "{f}.slice_scatter({f}.narrow({d}, 0, 1) * 2, {d}, 0, 1)",
    "torch.zeros_like({f}).index_add({d}, torch.arange({f}.shape[{d}], device={f}.device) // 2, {f})",
    "torch.zeros_like({f}).scatter_add({d}, ({f} * 3).detach().abs().long() % {f}.shape[{d}], {f})",
    "torch.zeros_like({f}).scatter({d}, {f}.argsort({d}), {f})",
    "torch.zeros_like({f}).scatter_reduce({d}, ({s} > 0).long() % {f}.shape[{d}], {f}, 'amax', include_self=False)",
    "{f}.index_put((torch.zeros(2, dtype=torch.int64, device={f}.device),), {f}[:1] * 0.5, accumulate=True)",
    "{f}.index_select({d}, torch.zeros(2, dtype=torch.int64, device={f}.device))",
    "{f}.gather({d}, {f}.argmax({d}, keepdim=True))",
    "{f}[..., ({f}.shape[-1] - 1 - torch.arange({f}.shape[-1], device={f}.device))]",
]
EXTREMES = [
    "{f}.sort({d})[0]",
    "{f}.topk(1, {d})[0]",
    "{f}.cummax({d})[0]",
    "{f}.median({d})[0]",
    "{f}.kthvalue(1, {d})[0]",
    "{f}.amax({d}) - {f}.amin({d})",
    # PyTorch's fake tensors refuse some negative dimensions of tensors without elements.
    "torch.linalg.vector_norm({f}, torch.inf, {d} % {f}.dim())",
    "{f} * ({f} == {f}.amax({d}, keepdim=True))",
    "{f} / ({f}.abs().amax({d}, keepdim=True) + 0.5)",
]
DRAWS = [
    "torch.rand_like({f}) * {f}",
    "torch.randn_like({f}) * 0.3 + {f}",
    "torch.bernoulli(torch.sigmoid({f}))",
    "F.dropout({f}, 0.5)",
    "torch.rand({f}.shape, device={f}.device) + {f}",
]
COMPLEX = [
    "torch.complex({f}.float(), {s}.float())",
    "torch.view_as_complex(torch.stack([{f}.float(), -{f}.float()], -1))",
    "0.1 * torch.fft.rfft({f}.float())",
    "0.1 * torch.fft.fft({z}, dim={d})",
    "{z} * {w}.conj() * 0.5",
    "{z} + {w}",
    "{z}.conj()",
    "{z}.mT.conj() * (0.5 + 1j)",
    "{z}.abs()",
    "{z}.real - {z}.imag",
    "torch.view_as_real({z})",
    "0.1 * {z}.sum({d})",
    "{z}.conj().imag",
    "-{z}.imag",
    "{z}.real.clone()",
]
TEMPLATES = [*POINTWISE, *POINTWISE, *REDUCTIONS, *VIEWS, *DISCRETE, *WRITES, *SCATTERS, *EXTREMES, *DRAWS, *COMPLEX]


@dataclass(frozen=True)
class Input:
    """A tensor argument and how it lies in memory: contiguous, transposed, gapped or expanded."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    lies: str

    def make(self, seed: int) -> torch.Tensor:
        """The same values for the same seed; floats want gradients."""
        shape, strided = list(self.shape), None
        if self.lies == "transposed":
            strided = self._draw([*shape[:-2], *reversed(shape[-2:])], seed).mT
        elif self.lies == "gapped":
            strided = self._draw([*shape[:-1], 2 * shape[-1] + 3], seed)[..., 1 : 1 + 2 * shape[-1] : 2]
        elif self.lies == "expanded":
            strided = self._draw([1, *shape[1:]], seed).expand(shape)
        tensor = self._draw(shape, seed) if strided is None else strided
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    def _draw(self, shape: Sequence[int], seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point:
            return torch.randn(list(shape), generator=generator).to(self.dtype)
        return torch.randint(2 if self.dtype is torch.bool else 8, list(shape), generator=generator).to(self.dtype)


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
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(self.source(name), f"<{name}>", "exec"), space)
        found: Callable[..., list[torch.Tensor]] = space[name]
        return found

    def make_inputs(self, seed: int) -> list[torch.Tensor]:
        return [given.make(seed + number) for number, given in enumerate(self.inputs)]

    def with_sizes(self, others: Mapping[int, int]) -> Graph:
        """The program for inputs that have other extents in place of these."""
        shapes = [tuple(others.get(n, n) for n in given.shape) for given in self.inputs]
        return replace(self, inputs=tuple(map(lambda given, shape: replace(given, shape=shape), self.inputs, shapes)))

    def prefixes(self) -> Iterator[Graph]:
        """The programs that return one value each, in the order of the statements, and all draws before it."""
        for position in range(len(self.statements)):
            statements = self.statements[: position + 1]
            yield replace(self, statements=statements, results=(f"v{position}", *draws(statements)))

    def reproducer(self, seed: int) -> str:
        """A program that shows the failure, with nothing left out."""
        given = "\n".join(f"#   x{i}: {value}" for i, value in enumerate(self.inputs))
        return f"{self.source()}\n# inputs, made with seed {seed}:\n{given}"


class Pool:
    """The values that the next operator of a random program may use; the program runs as it grows."""

    def __init__(self, random: Random, inputs: Sequence[Input]) -> None:
        self.random = random
        self.values = {f"x{i}": given.make(i).detach() for i, given in enumerate(inputs)}

    def pick(self, wanted: Callable[[torch.Tensor], bool]) -> str | None:
        """A value that will do: as often one of the newest three as any other, so that programs get deep."""
        names = [name for name, value in self.values.items() if wanted(value)]
        newest = names[-3:] if self.random.random() < 0.5 else names
        return self.random.choice(newest) if names else None

    def fill(self, template: str) -> str | None:
        """`template` with names for its operands, or None where nothing fits."""
        chosen: dict[str, str] = {}
        first: torch.Tensor | None = None
        for letter in dict.fromkeys(part[0] for part in template.split("{")[1:]):
            if letter == "d":
                if first is None or not first.dim():
                    return None
                chosen["d"] = str(self.random.randrange(-first.dim(), first.dim()))
                continue
            name = self.pick(functools.partial(fits, letter, first))
            if name is None:
                return None
            chosen[letter] = name
            first = self.values[name] if first is None else first
        return template.format(**chosen)

    def run(self, statement: str) -> torch.Tensor | None:
        """The value of a statement, or None where PyTorch has none or it is too large."""
        try:
            value: torch.Tensor = eval(statement, {"torch": torch, "F": F}, self.values)
        except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
            return None
        modest = not is_inexact(value) or bool((value.abs() < LARGEST).all())
        return value if value.numel() <= MOST_ELEMENTS and modest else None


def fits(letter: str, first: torch.Tensor | None, value: torch.Tensor) -> bool:
    """Whether `value` can stand for `{letter}` where `first` is the first operand."""
    kind = value.dtype.is_floating_point if letter in "fgs" else value.dtype is torch.bool
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
    found = []
    for number in range(random.randint(1, 4)):
        part = list(shape)
        if number and random.random() < 0.5:
            part = [1 if random.random() < 0.3 else n for n in part[random.randint(0, len(part)) :]]
        own = dtype if random.random() < 0.8 else random.choice([*FLOATS, *INTEGERS, torch.bool])
        ways = ["contiguous"] * 3
        ways += ["gapped"] if part else []
        ways += ["expanded"] if part and part[0] else []
        ways += ["transposed"] if len(part) > 1 else []
        found.append(Input(tuple(part), own, random.choice(ways)))
    return tuple(found)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """A program of up to a dozen statements with one to three results."""
    # One draw for the whole program: drawn piece by piece, neighbours would be copies with one piece changed.
    random = draw(st.randoms(use_true_random=True))
    given = inputs(random)
    pool = Pool(random, given)
    statements: list[str] = []
    for _ in range(random.randint(3, 12)):
        statement = pool.fill(random.choice(TEMPLATES))
        value = None if statement is None else pool.run(statement)
        if statement is not None and value is not None:
            pool.values[f"v{len(statements)}"] = value
            statements.append(statement)
    if not statements:
        statements.append("x0 + x0")
    names = [f"v{i}" for i in range(len(statements))]
    others = random.choices(names, k=random.randint(0, 2))
    return Graph(given, tuple(statements), (names[-1], *draws(statements), *others))


def draws(statements: Sequence[str]) -> list[str]:
    """The names of random values, which programs return.

    A draw that nobody reads is dropped by AOTAutograd, and every draw after it is another one than eager's.
    """
    return [f"v{i}" for i, statement in enumerate(statements) if any(name in statement for name in RANDOM)]


RANDOM = ("dropout", "torch.rand", "torch.bernoulli")
