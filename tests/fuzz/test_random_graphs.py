"""Random programs, compiled many at a time, keep the numbers contract: results and gradients.

`TILEWRIGHT_FUZZ_GRAPHS` says how many (100 unless told). The programs are the same at every run.
"""

import os
import re
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.fuzz.conditioning import unverified
from tests.fuzz.graphs import Graph, program
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.verify import verify
from tilewright.records.measurement import Verified

GRAPHS = int(os.environ.get("TILEWRIGHT_FUZZ_GRAPHS") or 100)
FIRST = 25
TOGETHER = 25


def drawn(first: int) -> list[Graph]:
    """The programs of the batch that begins with number `first`."""
    # Programs are run while they are drawn, and some draw numbers themselves.
    with torch.random.fork_rng():
        torch.manual_seed(first)
        return [program(first + i) for i in range(TOGETHER)]


class Batch:
    """Programs that are compiled together, as one function of all their inputs."""

    def __init__(self, programs: Sequence[Graph], first: int) -> None:
        self.programs = programs
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
        return [t for graph, seed in zip(self.programs, self.seeds, strict=True) for t in graph.make_inputs(seed)]

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


def failure(graph: Graph, seed: int, training: bool, rows: Sequence[Verified]) -> str:
    """The message: the shortest prefix of the program that fails alone, or the whole program."""
    for part in [*graph.prefixes(), graph]:
        try:
            alone = Batch([part], seed // 1000)
            found, _ = alone.check(training)
            broken = alone.missed(found, training)
        except Exception as error:
            return f"{part.reproducer(seed)}\n{type(error).__name__}: {error}"
        if broken:
            return part.reproducer(seed) + "\n" + "\n".join(map(str, broken[0]))
    return graph.reproducer(seed) + "\nfails only beside others:\n" + "\n".join(map(str, rows))


@pytest.mark.parametrize("first", range(FIRST, FIRST + GRAPHS, TOGETHER))
def test_random_graphs_keep_the_numbers_contract(first: int) -> None:
    # Every third batch is compiled for inference.
    training = first // TOGETHER % 3 != 2
    batch = Batch(drawn(first), first)
    try:
        rows, record = batch.check(training)
    except Exception as error:
        found = [failure(g, s, training, []) for g, s in zip(batch.programs, batch.seeds, strict=True)]
        raise AssertionError("\n\n".join(text for text in found if "Error" in text)) from error
    assert record.fallbacks == []
    executables = [graph.executable for graph in record.graphs]
    # Beside a result without dimensions, backward is compiled first without the other gradients, then with all.
    assert 1 + training <= len(executables) <= 1 + 2 * training
    assert all(executable is not None and executable.kernels for executable in executables)
    broken = batch.missed(rows, training)
    assert not broken, "\n\n".join(
        failure(batch.programs[i], batch.seeds[i], training, rows) for i, rows in broken.items()
    )
