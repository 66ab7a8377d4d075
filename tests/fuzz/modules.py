"""Random modules: layers, tied parameters, buffers that a call writes, graph breaks, complex inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.fuzz.graphs import SPACE, Input, Pool, always_returned, inputs
from tests.fuzz.layers import INTERRUPTIONS, OF_COMPLEX, OF_IMAGES, OF_INTEGERS, OF_ROWS, STATE
from tests.fuzz.templates import CHOICES, COMPLEX

LAYERS = [*[OF_ROWS] * 3, *[OF_IMAGES] * 2, OF_INTEGERS, STATE]


class Buffer(nn.Module):
    """Holds one tensor, which a call may write or replace."""

    held: torch.Tensor

    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("held", torch.ones(tuple(shape), dtype=dtype))

    def assign(self, value: torch.Tensor) -> torch.Tensor:
        self.held = value
        return value

    def at(self, place: int, value: torch.Tensor) -> torch.Tensor:
        self.held[place] = value
        return self.held.clone()


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, result: result * 0.5)
    layer.register_forward_pre_hook(lambda module, given: (given[0] + 0.1,))
    return layer


def interrupted(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x * 1


def _sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


skipped = torch._dynamo.disable(_sine)


def noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers of a generator of its own."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device)


NAMES = {
    **SPACE,
    **{"nn": nn, "parametrizations": parametrizations, "checkpoint": checkpoint, "Buffer": Buffer, "hooked": hooked},
    **{"interrupted": interrupted, "skipped": skipped, "noise": noise},
}


@dataclass(frozen=True)
class Module:
    """Inputs, the constructors of layers `l0, l1, …`, statements that give `v0, v1, …`, and the results."""

    inputs: tuple[Input, ...]
    layers: tuple[str, ...]
    statements: tuple[str, ...]
    results: tuple[str, ...]
    training: bool

    def source(self) -> str:
        given = ", ".join(f"x{i}" for i in range(len(self.inputs)))
        made = [f"self.l{i} = {layer}" for i, layer in enumerate(self.layers)]
        body = [f"v{i} = {statement}" for i, statement in enumerate(self.statements)]
        body.append(f"return [{', '.join(self.results)}]")
        lines = ["class Program(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        {line}" for line in made]
        lines += [f"    def forward(self, {given}):", *(f"        {line}" for line in body)]
        return "\n".join(lines) + "\n"

    def build(self, seed: int, device: str = "cpu") -> nn.Module:
        space: dict[str, Any] = dict(NAMES)
        exec(compile(self.source(), "<module>", "exec"), space)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made: nn.Module = space["Program"]()
        return made.train(self.training).to(device)

    def make_inputs(self, seed: int, device: str = "cpu") -> list[torch.Tensor]:
        return [given.make(seed + number, device) for number, given in enumerate(self.inputs)]

    def prefixes(self) -> Iterator[Module]:
        """The modules that return one value each, in the order of the statements, and what is always returned."""
        for position in range(len(self.statements)):
            statements = self.statements[: position + 1]
            results = (f"v{position}", *read(statements, self.layers))
            used = [i for i in range(len(self.layers)) if f"self.l{i}" in "".join(statements)]
            layers = self.layers[: max(used, default=-1) + 1]
            yield replace(self, layers=layers, statements=statements, results=results)

    def reproducer(self, seed: int) -> str:
        given = "\n".join(f"#   x{i}: {value}" for i, value in enumerate(self.inputs))
        return f"{self.source()}\n# seed {seed}, training={self.training}, inputs:\n{given}"


class ModulePool(Pool):
    """A pool whose statements may call layers, which are made as the program grows."""

    def __init__(self, random: Random, given: Sequence[Input]) -> None:
        super().__init__(random, given)
        self.layers: list[str] = []
        self.holder = nn.Module()
        self.names = {**NAMES, "self": self.holder}

    def layer(self, choices: Sequence[tuple[str, str]]) -> str | None:
        """A statement that calls a new layer, or None where no value will do."""
        constructor, call = self.random.choice(choices)
        axes = "{axes}" in constructor or "{channels}" in constructor
        letter = "i" if "{i}" in call else "f"
        name = self.pick(lambda t: suits(letter, axes, t), self.values)
        if name is None:
            return None
        value, layer = self.values[name], f"self.l{len(self.layers)}"
        sizes: dict[str, Any] = {"last": value.shape[-1] if value.dim() else 1, "shape": tuple(value.shape)}
        if axes:
            sizes |= {"channels": value.shape[1], "axes": value.dim() - 2}
        made = constructor.format(**sizes)
        if value.is_floating_point() and not made.startswith("Buffer"):
            made += f".to({value.dtype})"
        try:
            module = eval(made, dict(self.names))
        except (RuntimeError, ValueError, AssertionError):
            return None
        setattr(self.holder, f"l{len(self.layers)}", module)
        statement = self.fill(call, {**sizes, "layer": layer, letter: name})
        if statement is not None:
            self.layers.append(made)
        return statement


def read(statements: Sequence[str], layers: Sequence[str]) -> list[str]:
    """`always_returned`, and what layers drew."""
    random = [f"self.l{i}(" for i, layer in enumerate(layers) if "Dropout" in layer or "Transformer" in layer]
    random += [f"self.l{i}," for i, layer in enumerate(layers) if "Dropout" in layer]
    drawn = [f"v{i}" for i, one in enumerate(statements) if any(call in one for call in random)]
    return [*always_returned(statements), *drawn]


def suits(letter: str, axes: bool, value: torch.Tensor) -> bool:
    if letter == "i":
        return not value.is_floating_point() and not value.is_complex() and value.dtype is not torch.bool
    if not value.is_floating_point() or not value.numel() or not value.dim():
        return False
    return not axes or (2 < value.dim() < 6 and value.shape[1] < 40)


def program(number: int) -> Module:
    """Module `number`, always the same."""
    random = Random(f"module {number}")
    while not (module := _drawn(random)) or not runs(module, number):
        pass
    return module


def _drawn(random: Random) -> Module | None:
    given = tuple(replace(one, has_specials=False) for one in inputs(random))
    of_complex = random.random() < 0.2
    if of_complex:
        given = (replace(given[0], dtype=torch.complex64), *given[1:])
    pool = ModulePool(random, given)
    kinds: list[Callable[[], str | None]] = []
    groups = random.choices(CHOICES, k=3) + ([OF_COMPLEX, COMPLEX] if of_complex else [])
    kinds += [lambda: pool.fill(random.choice(random.choice(groups)))] * 5
    kinds += [lambda: pool.layer(random.choice(LAYERS))] * 4
    kinds += [lambda: pool.fill(random.choice(INTERRUPTIONS))] * (random.random() < 0.4)
    statements: list[str] = []
    for _ in range(random.randint(4, 12)):
        pool.add(random.choice(kinds)(), statements)
    if len(statements) < 2:
        return None
    names = [f"v{i}" for i in range(len(statements))]
    results = (names[-1], *read(statements, pool.layers), *random.choices(names, k=random.randint(0, 2)))
    return Module(given, tuple(pool.layers), tuple(statements), results, random.random() < 0.75)


def runs(module: Module, seed: int, device: str = "cpu") -> bool:
    """Whether PyTorch runs it and its backward."""
    try:
        given = module.make_inputs(seed, device)
        ends = [t for t in module.build(seed, device)(*given) if t.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    except (RuntimeError, ValueError, AssertionError):
        return False
    return True
