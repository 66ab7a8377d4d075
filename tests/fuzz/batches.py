"""Random programs that are compiled together, and judged by the numbers contract."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch

from tests.fuzz.conditioning import unverified
from tests.fuzz.graphs import Graph, program
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.verify import verify
from tilewright.records.measurement import Verified


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
