"""Random programs that are compiled together, and judged by the numbers contract."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tests.fuzz.conditioning import unverified
from tests.fuzz.graphs import Graph, program
from tests.fuzz.modules import Module
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.reference import copies
from tilewright.measure.truth.verify import verify
from tilewright.records.measurement import Verified

MEANT = ("the call that breaks the graph",)
"""What `Fallback` calls a graph break."""


@contextmanager
def _strict(wanted: bool) -> Iterator[None]:
    before = os.environ.get("TILEWRIGHT_STRICT", "")
    os.environ["TILEWRIGHT_STRICT"] = "1" if wanted else "0"
    try:
        yield
    finally:
        os.environ["TILEWRIGHT_STRICT"] = before


def drawn(first: int, count: int) -> list[Graph]:
    """Programs `first`, `first` + 1, …"""
    # Programs are run while they are drawn, and some draw numbers themselves.
    with torch.random.fork_rng():
        torch.manual_seed(first)
        return [program(first + i) for i in range(count)]


class Batch:
    """Programs that are compiled together, as one function of all their inputs."""

    def __init__(self, programs: Sequence[Graph], first: int, device: str = "cpu") -> None:
        self.programs = programs
        self.device = device
        self.seeds = [1000 * (first + i) for i in range(len(programs))]
        self.owner = [i for i, graph in enumerate(programs) for _ in graph.inputs]

    def function(self) -> Callable[..., list[list[torch.Tensor]]]:
        functions = [graph.function(f"graph{i}") for i, graph in enumerate(self.programs)]
        counts = [len(graph.inputs) for graph in self.programs]

        def all_of_them(*tensors: torch.Tensor) -> list[list[torch.Tensor]]:
            results, start = [], 0
            for function, count in zip(functions, counts, strict=True):
                results.append(function(*tensors[start : start + count]))
                start += count
            return results

        return all_of_them

    def inputs(self) -> list[torch.Tensor]:
        seeded = zip(self.programs, self.seeds, strict=True)
        return [t for graph, seed in seeded for t in graph.make_inputs(seed, self.device)]

    def check(self, training: bool) -> tuple[list[Verified], Recording]:
        """The figures of every result and gradient; what compiling them recorded."""
        torch._dynamo.reset()
        function = self.function()
        with recording() as record:
            compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
            rows = verify(function, compiled, self.inputs(), seed=self.seeds[0], training=training)
        return rows, record

    def unverified(self, training: bool) -> set[int]:
        """The programs whose results, computed together with the others', the contract cannot judge."""
        return {self.program_of(name) for name in unverified(self.function(), self.inputs(), self.seeds[0], training)}

    def program_of(self, tensor: str) -> int:
        """Which program a tensor belongs to: `output[3][0]` to program 3, `input 7` to whose input that is."""
        number = int(re.findall(r"\d+", tensor)[0])
        return number if tensor.startswith("output") else self.owner[number]

    def missed(self, rows: Sequence[Verified], training: bool) -> dict[int, list[Verified]]:
        """By program the rows that miss the contract, of the programs that it can judge."""
        found: dict[int, list[Verified]] = {}
        for row in rows:
            if not row.ok:
                found.setdefault(self.program_of(row.tensor), []).append(row)
        for number in self.unverified(training) if found else ():
            found.pop(number, None)
        return found


def failure(graph: Graph, seed: int, training: bool, rows: Sequence[Verified], device: str = "cpu") -> str:
    """The message: the shortest prefix of the program that fails alone, or the whole program."""
    for part in [*graph.prefixes(), graph]:
        try:
            alone = Batch([part], seed // 1000, device)
            found, _ = alone.check(training)
            broken = alone.missed(found, training)
        except Exception as error:
            return f"{part.reproducer(seed)}\n{type(error).__name__}: {error}"
        if broken:
            return part.reproducer(seed) + "\n" + "\n".join(map(str, broken[0]))
    return graph.reproducer(seed) + "\nfails only beside others:\n" + "\n".join(map(str, rows))


class Alone:
    """A module, compiled as its number says: for its sizes, for some that may change, for any; every fourth without
    gradients."""

    def __init__(self, module: Module, number: int, device: str = "cpu") -> None:
        self.module = module
        self.seed = 1000 * number
        self.built = module.build(self.seed, device)
        self.inputs = module.make_inputs(self.seed, device)
        self.dynamic = (False, None, True)[number % 3]
        self.gradients = number % 4 != 3

    def compiled(self, compiler: str | Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
        torch._dynamo.reset()
        compiled = torch.compile(self.built, backend=compiler, dynamic=self.dynamic)

        def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
            for tensor in tensors if self.dynamic is None else ():
                if tensor.dim():
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
            results: list[torch.Tensor] = compiled(*tensors)
            return results

        return call

    def is_refused(self) -> bool:
        """Whether PyTorch fails with every compiler, in what it does before it calls one."""
        try:
            with torch._dynamo.config.patch(allow_rnn=True):
                self.compiled("aot_eager")(*copies(self.inputs))
        except Exception:
            return True
        return False

    def check(self) -> tuple[list[Verified], Recording]:
        call = self.compiled(backend)
        with recording() as record, _strict(not self.breaks), torch._dynamo.config.patch(allow_rnn=True):
            rows = verify(self.built, call, self.inputs, seed=self.seed, training=self.gradients)
        return rows, record

    @property
    def breaks(self) -> bool:
        """Whether some of it is meant to be left to PyTorch."""
        source = self.module.source()
        return any(
            word in source for word in ("interrupted", "skipped", "noise", "item()", " if ", "momentum=None", "> 0]")
        )

    def left(self, record: Recording) -> list[str]:
        """What was left to PyTorch without that."""
        return [str(one) for one in record.fallbacks if not (self.breaks and one.what in MEANT)]

    def missed(self, rows: Sequence[Verified]) -> list[Verified]:
        """The rows that miss the contract, of those that it can judge."""
        broken = {row.tensor: row for row in rows if not row.ok}
        for name in unverified(self.built, self.inputs, self.seed, self.gradients) if broken else ():
            broken.pop(name, None)
        return list(broken.values())


def module_failure(module: Module, number: int, device: str = "cpu") -> str:
    """The message: the shortest prefix of the module that fails, or the whole module."""
    for part in [*module.prefixes(), module]:
        try:
            alone = Alone(part, number, device)
            rows, record = alone.check()
            broken = [*map(str, alone.missed(rows)), *alone.left(record)]
        except Exception as error:
            return f"{part.reproducer(alone.seed)}\n{type(error).__name__}: {error}"
        if broken:
            return part.reproducer(alone.seed) + "\n" + "\n".join(broken)
    return module.reproducer(alone.seed)
